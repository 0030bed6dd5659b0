"""Conversations with pictures as token ids: each picture's token is repeated as often as the tower makes features."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from anabatic.core.errors import DataError
from anabatic.data.chat import rendering
from anabatic.data.chat.loss_mask import LossPolicy
from anabatic.data.readers.document import SKIP_HINT, Document
from anabatic.data.shards.encoders import ChatEncoder
from anabatic.data.shards.writer import DocumentCounts, EncodedEntry
from anabatic.data.vision.picture_files import load_picture, make_name
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.data.vision.picture_tensors import PictureGrid
from anabatic.data.vision.row_pictures import TAG

_PROBE = "\ue0f4\ue0f5"
"""Private-use characters, which no template writes."""


@dataclass(frozen=True)
class SeenConversation(rendering.RenderedConversation):
    """A conversation after its pictures' tokens were repeated.

    Attributes:
        pictures: in the order of their tokens.
    """

    pictures: tuple[PictureGrid, ...] = ()


class PictureEncoder(ChatEncoder):
    """Conversations of text and pictures through a chat template; arguments as of `ChatEncoder`."""

    def __init__(
        self,
        tokenizer: Any,
        counts: DocumentCounts,
        *,
        seq_len: int | None,
        learning: LossPolicy,
        skip_bad: bool,
        rules: PictureRules,
    ) -> None:
        super().__init__(tokenizer, counts, seq_len=seq_len, learning=learning, skip_bad=skip_bad)
        self._rules = rules
        self._picture_text = find_picture_text(tokenizer, rules)

    def _render_batch(self, batch: Sequence[Document]) -> list[rendering.RenderedConversation]:
        grids = measure_pictures(
            [document.pictures for document in batch], [one.location for one in batch], self._rules
        )
        placed = [replace(one, messages=place_pictures(one, self._picture_text)) for one in batch]
        rendered = super()._render_batch(placed)
        return [self._expand(*each) for each in zip(rendered, grids, batch, strict=True)]

    def _expand(
        self, rendered: rendering.RenderedConversation, grids: tuple[PictureGrid, ...], document: Document
    ) -> SeenConversation:
        """Repeat each picture's token; nothing of a picture is learned."""
        repeats = count_repeats(rendered.ids, grids, self._rules, document.location)
        ids = np.repeat(rendered.ids, repeats)
        if grids and self._seq_len is not None and len(ids) > self._seq_len + 1:
            tokens = [self._rules.count_tokens(grid[1:]) for grid in grids]
            raise DataError(
                f"{document.location}: {len(ids) - 1:,} tokens, {' + '.join(f'{one:,}' for one in tokens)} of them of"
                f" pictures; batch.seq_len is {self._seq_len:,}, and rows with pictures are not cut",
                f"raise batch.seq_len, or lower vision.max_pixels, {SKIP_HINT}",
            )
        mask = np.repeat(rendered.mask, repeats)
        mask[ids == self._rules.image_token] = 0
        return SeenConversation(
            ids,
            mask,
            rendered.text,
            np.repeat(np.asarray(rendered.token_ends, dtype=np.int64), repeats).tolist(),
            np.repeat(rendered.special_tokens_mask, repeats),
            grids,
        )

    def _build_entries(self, rendered: rendering.RenderedConversation) -> list[EncodedEntry]:
        entries = super()._build_entries(rendered)
        pictures = rendered.pictures if isinstance(rendered, SeenConversation) else ()
        return [self._attach(entry, pictures) for entry in entries] if pictures else entries

    def _attach(self, entry: EncodedEntry, pictures: tuple[PictureGrid, ...]) -> EncodedEntry:
        mask = np.frombuffer(entry.mask or b"", dtype=np.uint8).copy()
        mask[np.asarray(entry.ids) == self._rules.image_token] = 0  # `train_on_inputs` learns all tokens but these
        return entry._replace(mask=mask.tobytes(), pictures=pack_grids(pictures))


def count_repeats(ids: np.ndarray, grids: Sequence[PictureGrid], rules: PictureRules, name: str) -> np.ndarray:
    """Return the number of times each token occurs in the model's input, int64 `[n]`: a picture's, once per feature.

    Raises:
        DataError: the text has more or fewer tokens of pictures than there are pictures.
    """
    places = np.flatnonzero(ids == rules.image_token)
    if len(places) != len(grids):
        raise DataError(
            f"{name}: {len(places)} tokens of pictures in the text, {len(grids)} pictures",
            f"write {TAG} where a picture stands, and no other token of pictures, {SKIP_HINT}",
        )
    repeats = np.ones(len(ids), dtype=np.int64)
    repeats[places] = [rules.count_tokens(grid[1:]) for grid in grids]
    return repeats


def pack_grids(pictures: Sequence[PictureGrid]) -> bytes:
    """Return pictures and their grids as a shard keeps them."""
    return json.dumps(pictures, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogateescape")


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
        raise DataError(f"{name}: {error}", f"{error.hint}, {SKIP_HINT}") from error
    except ValueError as error:
        raise DataError(f"{name}: {make_name(picture)}: {error}", f"cut the picture, {SKIP_HINT}") from error


def place_pictures(document: Document, text: str) -> list[dict[str, Any]]:
    """Return the turns with `text`, the template's for a picture, in place of each tag.

    A row with pictures and no tag at all has them before its first question (ms-swift).

    Raises:
        DataError: there are more tags than pictures, or fewer.
    """
    turns = document.messages or []
    tags = sum(str(turn.get("content") or "").count(TAG) for turn in turns)
    pictures = len(document.pictures)
    if tags == 0 and pictures:
        first = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), 0)
        before = text * pictures
        return [
            {**turn, "content": f"{before}{turn.get('content') or ''}"} if number == first else turn
            for number, turn in enumerate(turns)
        ]
    if tags != pictures:
        raise DataError(
            f"{document.location}: {tags} x {TAG} in the turns, {pictures} pictures in the row",
            f'write {TAG} once for each entry of "images", {SKIP_HINT}',
        )
    return [
        {**turn, "content": turn["content"].replace(TAG, text)} if TAG in (turn.get("content") or "") else turn
        for turn in turns
    ]


def find_picture_text(tokenizer: Any, rules: PictureRules) -> str:
    """Return what the chat template writes for a picture; of a template that knows none the model's own tokens.

    Raises:
        DataError: the tokenizer lacks the tokens of pictures.
    """
    tokens = tokenizer.convert_ids_to_tokens([rules.start_token, rules.image_token, rules.end_token])
    if any(token is None for token in tokens):
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer lacks the tokens of pictures"
            f" ({rules.start_token}, {rules.image_token}, {rules.end_token})",
            "use the tokenizer of the model",
        )
    text = {"type": "text", "text": _PROBE}
    try:
        bare, seen = (
            tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
            for parts in ([text], [{"type": "image"}, text])
        )
    except Exception:  # templates of text alone raise anything for parts
        return "".join(tokens)
    start = bare.find(_PROBE)
    written = seen[start : seen.find(_PROBE)] if start >= 0 and seen.startswith(bare[:start]) else ""
    return written if written.count(tokens[1]) == 1 else "".join(tokens)
