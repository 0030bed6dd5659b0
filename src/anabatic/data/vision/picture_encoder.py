"""Conversations with pictures as token ids: each picture's token is repeated as often as the tower makes features."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.chat.loss_mask import LossTurns
from anabatic.data.readers.document import SKIP_HINT, Message
from anabatic.data.vision.picture_batch import pack_grids
from anabatic.data.vision.picture_files import load_picture, make_name
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.data.vision.row_pictures import TAG, place_pictures

_PROBE = "\ue0f4\ue0f5"
"""Private-use characters, which no template writes."""


class PictureRenderer:
    """Renders conversations of text and pictures; in place of `rendering.render_conversations`.

    Args:
        limit: tokens of a conversation with pictures at most; None: any number.
    """

    def __init__(self, tokenizer: Any, rules: PictureRules, limit: int | None) -> None:
        self._tokenizer, self._rules, self._limit = tokenizer, rules, limit
        self._tokens, self._picture_text = find_picture_tokens(tokenizer, rules), find_picture_text(tokenizer, rules)

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
            grids = measure_pictures(pictures, names, self._rules)
            rows = zip(conversations, pictures, names, strict=True)
            placed = [place_pictures(given, shown, name, self._picture_text) for given, shown, name in rows]
        except DataError as error:
            raise DataError(str(error), f"{error.hint}, {SKIP_HINT}") from error
        rendered = rendering.render_conversations(placed, self._tokenizer, names=names, tools=tools, turns=turns)
        return [self._expand(*each) for each in zip(rendered, grids, names, strict=True)]

    def _expand(
        self, rendered: rendering.RenderedConversation, grids: tuple[PictureGrid, ...], name: str
    ) -> rendering.RenderedConversation:
        """Repeat each picture's token; nothing of a picture is learned."""
        try:
            ids, repeats = expand_pictures(rendered.ids, grids, self._rules, self._tokens, name)
        except DataError as error:
            raise DataError(str(error), f"{error.hint}, {SKIP_HINT}") from error
        if not grids:
            return rendered
        if self._limit is not None and len(ids) > self._limit:
            tokens = [self._rules.count_tokens(grid[1:]) for grid in grids]
            raise DataError(
                f"{name}: {len(ids):,} tokens, {' + '.join(f'{one:,}' for one in tokens)} of them of pictures; at most"
                f" {self._limit:,} fit (batch.seq_len), and rows with pictures are not cut",
                f"raise batch.seq_len, or lower vision.max_pixels, {SKIP_HINT}",
            )
        mask = np.repeat(rendered.mask, repeats)
        mask[np.isin(ids, self._tokens)] = 0
        return rendering.RenderedConversation(
            ids,
            mask,
            rendered.text,
            np.repeat(np.asarray(rendered.token_ends, dtype=np.int64), repeats).tolist(),
            np.repeat(rendered.special_tokens_mask, repeats),
            pack_grids(grids),
            ids == self._rules.image_token,
        )


def expand_pictures(
    ids: np.ndarray, grids: Sequence[PictureGrid], rules: PictureRules, tokens: tuple[int, int, int], name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's input, int64, in which a picture's token occurs once per feature, and how many tokens each of
    `ids`, `[n]`, has become, int64 `[n]`.

    Args:
        tokens: of `find_picture_tokens`.

    Raises:
        DataError: the text has more or fewer tokens of pictures than there are pictures.
    """
    places = np.flatnonzero(ids == rules.image_token)
    if len(places) != len(grids):
        raise DataError(
            f"{name}: {len(places)} tokens of pictures in the text, {len(grids)} pictures",
            f"write {TAG} where a picture stands, and no other token of pictures",
        )
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = [rules.count_tokens(grid[1:]) + 2 * rules.adds_borders for grid in grids]
    expanded = np.repeat(ids, repeats)
    if rules.adds_borders:
        ends = np.cumsum(repeats)[places]
        expanded[ends - repeats[places]], expanded[ends - 1] = tokens[0], tokens[2]
    return expanded, repeats


def measure_pictures(
    rows: Sequence[tuple[str, ...]], names: Sequence[str], rules: PictureRules
) -> list[tuple[PictureGrid, ...]]:
    """Decode every picture once, on all cores, and return its grid: what is broken is known before the training.

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


def _measure(picture: str, name: str, rules: PictureRules) -> PictureGrid:
    try:
        width, height = load_picture(picture).size
        return (picture, *rules.fit_grid(height, width))
    except DataError as error:
        raise DataError(f"{name}: {error}", error.hint) from error
    except ValueError as error:
        raise DataError(f"{name}: {make_name(picture)}: {error}", "cut the picture") from error


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


def find_picture_text(tokenizer: Any, rules: PictureRules) -> str:
    """Return what the chat template writes for a picture; of a template that knows none the model's own tokens.

    Raises:
        DataError: the tokenizer lacks the tokens of pictures.
    """
    tokens = tokenizer.convert_ids_to_tokens(find_picture_tokens(tokenizer, rules))
    own = tokens[1] if rules.adds_borders else "".join(tokens)
    text = {"type": "text", "text": _PROBE}
    try:
        bare, seen = (
            tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
            for parts in ([text], [{"type": "image"}, text])
        )
    except Exception:  # templates of text alone raise anything for parts
        return own
    start = bare.find(_PROBE)
    written = seen[start : seen.find(_PROBE)] if start >= 0 and seen.startswith(bare[:start]) else ""
    return written if written.count(tokens[1]) == 1 else own
