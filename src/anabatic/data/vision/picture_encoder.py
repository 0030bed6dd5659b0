"""Conversations with pictures as token ids: each picture's token is repeated as often as the tower makes features."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.chat.loss_mask import LossTurns
from anabatic.data.readers.document import SKIP_HINT, Message
from anabatic.data.vision.picture_batch import pack_grids
from anabatic.data.vision.picture_files import load_picture
from anabatic.data.vision.picture_rules import PictureRules, VideoRules
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.data.vision.row_objects import place_objects, split_objects
from anabatic.data.vision.row_pictures import TAG, place_pictures
from anabatic.data.vision.video_files import describe_source, is_video, measure_video, read_frames

_VIDEO_BORDERS = ("<|begin_of_video|>", "", "<|end_of_video|>")
"""Of GLM-V, whose frames have the tokens of pictures."""
_PROBE = "\ue0f4\ue0f5"
"""Private-use characters, which no template writes."""


class PictureTexts:
    """Text that a chat template writes for pictures and videos.

    Attributes:
        tokens: ids of the token before a picture, of the one that it is made of, and of the one behind it.
        picture: for a picture.

    Raises:
        DataError: the tokenizer lacks the tokens of pictures.
    """

    def __init__(self, tokenizer: Any, rules: PictureRules) -> None:
        self.tokens = find_picture_tokens(tokenizer, rules)
        self.rules = rules
        names = tokenizer.convert_ids_to_tokens(self.tokens)
        self.picture = _find_text(tokenizer, "image", names[1], names[1] if rules.adds_borders else "".join(names))
        self._video = self._written = ""
        if (video := rules.video) is not None:
            self._written = tokenizer.convert_ids_to_tokens(video.written_token) or ""
            around = names if video.image_token == video.written_token else _VIDEO_BORDERS
            self._video = _find_text(tokenizer, "video", self._written, f"{around[0]}{self._written}{around[2]}")
            self._frame = (names[0], tokenizer.convert_ids_to_tokens(video.image_token), names[2])

    def write(self, grid: PictureGrid, rate: float) -> str:
        """Return the text of a picture or a video.

        Args:
            rate: of a video, frames of a second.
        """
        if not grid.frames:
            return self.picture
        if self.rules.video is None or not self._written:
            raise DataError("the tokenizer lacks the token of videos", "use the tokenizer of the model")
        return self._video.replace(self._written, self.rules.video.write_frames(grid.frames, rate, self._frame))

    def place_rows(
        self, turns: Sequence[Sequence[Message]], pictures: Sequence[tuple[str, ...]], names: Sequence[str]
    ) -> list[tuple[list[Message], list[PictureGrid]]]:
        """Return turns of rows with texts in place of tags, and the pictures in the order of these.

        Raises:
            DataError: a picture cannot be used, or a row has more or fewer tags.
        """
        found = []
        parts = [split_objects(each) for each in pictures]
        measured = measure_pictures([shown for shown, _ in parts], names, self.rules)
        for asked, (shown, objects), each, name in zip(turns, parts, measured, names, strict=True):
            placed, order = place_pictures(asked, shown, name, [self.write(one.grid, one.rate) for one in each])
            placed = place_objects(placed, objects, name, [one.size for one in each], self.rules)
            found.append((placed, [each[at].grid for at in order]))
        return found


class PictureRenderer:
    """Renders conversations of text and pictures; in place of `rendering.render_conversations`.

    Args:
        limit: tokens of a conversation with pictures at most; None: any number.
    """

    def __init__(self, tokenizer: Any, rules: PictureRules, limit: int | None) -> None:
        self._tokenizer, self._rules, self._limit = tokenizer, rules, limit
        self._texts = PictureTexts(tokenizer, rules)

    def render(
        self,
        conversations: Sequence[Sequence[Message]],
        pictures: Sequence[tuple[str, ...]],
        names: Sequence[str],
        tools: Sequence[list[dict[str, Any]] | None],
        turns: LossTurns,
    ) -> list[rendering.RenderedConversation]:
        """Return the conversations, with each picture's token as often as it has features.

        Raises:
            DataError: a conversation or a picture cannot be used.
        """
        try:
            rows = self._texts.place_rows(conversations, pictures, names)
        except DataError as error:
            raise DataError(str(error), f"{error.hint}, {SKIP_HINT}") from error
        placed, grids = [row[0] for row in rows], [row[1] for row in rows]
        rendered = rendering.render_conversations(placed, self._tokenizer, names=names, tools=tools, turns=turns)
        return [self._expand(*each) for each in zip(rendered, grids, names, strict=True)]

    @staticmethod
    def _name_bounds(grids: Sequence[PictureGrid]) -> str:
        return "vision.video_max_pixels or vision.fps" if any(one.frames for one in grids) else "vision.max_pixels"

    def _expand(
        self, rendered: rendering.RenderedConversation, grids: Sequence[PictureGrid], name: str
    ) -> rendering.RenderedConversation:
        """Repeat each picture's token; nothing of a picture is learned."""
        try:
            ids, repeats = expand_pictures(rendered.ids, grids, self._texts, name)
        except DataError as error:
            raise DataError(str(error), f"{error.hint}, {SKIP_HINT}") from error
        if not grids:
            return rendered
        if self._limit is not None and len(ids) > self._limit:
            tokens = [self._rules.count_tokens(grid.grid) * grid.times for grid in grids]
            raise DataError(
                f"{name}: {len(ids):,} tokens, {' + '.join(f'{one:,}' for one in tokens)} of them of pictures; at most"
                f" {self._limit:,} fit (batch.seq_len), and rows with pictures are not cut",
                f"raise batch.seq_len, or lower {self._name_bounds(grids)}, {SKIP_HINT}",
            )
        mask = np.repeat(rendered.mask, repeats)
        is_picture = self._rules.find_features(ids)
        mask[is_picture | np.isin(ids, self._texts.tokens)] = 0
        return rendering.RenderedConversation(
            ids,
            mask,
            rendered.text,
            np.repeat(np.asarray(rendered.token_ends, dtype=np.int64), repeats).tolist(),
            np.repeat(rendered.special_tokens_mask, repeats),
            pack_grids(grids),
            is_picture,
        )


def expand_pictures(
    ids: np.ndarray, grids: Sequence[PictureGrid], texts: PictureTexts, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's input, int64, in which a picture's token occurs once per feature, and how many tokens each of
    `ids`, `[n]`, has become, int64 `[n]`.

    Raises:
        DataError: the text has more or fewer tokens of pictures than there are pictures.
    """
    rules = texts.rules
    places = np.flatnonzero(rules.find_features(ids))
    runs = [rules.count_tokens(grid.grid) * times for grid in grids for times in grid.runs]
    if len(places) != len(runs):
        raise DataError(
            f"{name}: {len(places)} tokens of pictures in the text, {len(runs)} pictures",
            f"write {TAG} where a picture stands, and no other token of pictures",
        )
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = [run + 2 * rules.adds_borders for run in runs]
    expanded = np.repeat(ids, repeats)
    if rules.adds_borders:
        ends = np.cumsum(repeats)[places]
        expanded[ends - repeats[places]], expanded[ends - 1] = texts.tokens[0], texts.tokens[2]
    return expanded, repeats


class MeasuredPicture(NamedTuple):
    """A picture or a video that was decoded.

    Attributes:
        size: width and height.
        rate: of a video, frames of a second.
    """

    grid: PictureGrid
    size: tuple[int, int]
    rate: float = 0.0


def measure_pictures(
    rows: Sequence[tuple[str, ...]], names: Sequence[str], rules: PictureRules
) -> list[tuple[MeasuredPicture, ...]]:
    """Decode every picture and the shown frames of every video once, on all cores, and return their grids: what is
    broken is known before the training.

    Args:
        names: of the rows, for messages.

    Raises:
        DataError: a picture cannot be used; the row is named.
    """
    tasks = [(picture, name) for pictures, name in zip(rows, names, strict=True) for picture in pictures]
    if not tasks:
        return [()] * len(rows)
    with ThreadPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as pool:
        measured = iter(list(pool.map(lambda task: _measure(task[0], task[1], rules), tasks)))
    return [tuple(next(measured) for _ in pictures) for pictures in rows]


def _measure(picture: str, name: str, rules: PictureRules) -> MeasuredPicture:
    try:
        if is_video(picture):
            return _measure_video(picture, rules.video)
        width, height = load_picture(picture).size
        return MeasuredPicture(PictureGrid(picture, *rules.fit_grid(height, width)), (width, height))
    except DataError as error:
        raise DataError(f"{name}: {error}", error.hint) from error
    except ValueError as error:
        raise DataError(f"{name}: {describe_source(picture)}: {error}", "cut the picture") from error


def _measure_video(source: str, rules: VideoRules | None) -> MeasuredPicture:
    """Return the shown frames of a video: of a file some, of listed ones all."""
    if rules is None:
        what = f"{describe_source(source)}: a video, and how the model's processor reads those is not known here"
        raise DataError(what, "show its frames as pictures")
    facts = measure_video(source)
    rate = facts.rate or rules.fps
    shown = rules.sample_frames(facts.num_frames, rate) if facts.rate else list(range(facts.num_frames))
    if len(shown) < rules.frames:
        what = f"{describe_source(source)}: {facts.num_frames} frames, {len(shown)} of them shown"
        raise DataError(f"{what}; {rules.frames} are needed", "give a longer video, or a picture")
    if not facts.rate and len(shown) > rules.max_frames:
        what = f"{describe_source(source)}: {len(shown):,} frames are listed, {rules.max_frames:,} are shown at most"
        raise DataError(what, "list fewer, or raise vision.max_frames")
    grid = rules.fit_frames(facts.height, facts.width, len(shown))
    interval = rules.positions_per_second * (rules.frames / (len(shown) / facts.num_frames * rate))
    shown += shown[-1:] * (-len(shown) % rules.frames)
    for _ in read_frames(source, shown, decode_only=True):
        pass
    measured = PictureGrid(source, *grid, len(shown) // rules.frames, tuple(shown), interval)
    return MeasuredPicture(measured, (facts.width, facts.height), rate)


def find_picture_tokens(tokenizer: Any, rules: PictureRules) -> tuple[int, int, int]:
    """Return the ids of the token before a picture, of the one that it is made of, and of the one behind it.

    Raises:
        DataError: the tokenizer lacks one.
    """
    start, end = rules.start_token, rules.end_token
    if start is None or end is None:
        start, end = (getattr(tokenizer, f"{side}_image_token_id", None) for side in ("start", "end"))
    if start is None or end is None or None in tokenizer.convert_ids_to_tokens([start, rules.image_token, end]):
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer lacks tokens of pictures ({start}, {rules.image_token}, {end})",
            "use the tokenizer of the model",
        )
    return start, rules.image_token, end


def _find_text(tokenizer: Any, kind: str, token: str, own: str) -> str:
    """Return what the chat template writes for a picture or a video; `own`: it knows text alone.

    Args:
        token: that occurs in it once.
    """
    text = {"type": "text", "text": _PROBE}
    try:
        bare, seen = (
            tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
            for parts in ([text], [{"type": kind}, text])
        )
    except Exception:  # templates of text alone raise anything for parts
        return own
    start = bare.find(_PROBE)
    written = seen[start : seen.find(_PROBE)] if start >= 0 and seen.startswith(bare[:start]) else ""
    return written if written.count(token) == 1 else own
