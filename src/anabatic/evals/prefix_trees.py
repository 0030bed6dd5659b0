"""Texts whose last tokens are scored, laid out so that equal beginnings are read once.

Sorted, texts that begin alike stand side by side; each run of them becomes a tree in depth-first order, and a batch is
a few trees beside each other (`device.segments.PackedTrees`). Built on the host, without the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ScoredText:
    """A text, `tokens` long, of which the last `num_scored` tokens count: at least 1, and one token stands before
    them."""

    tokens: Sequence[int] | np.ndarray
    num_scored: int


@dataclass
class PrefixTree:
    """Texts that begin alike. The last token of a text is only asked for, so it is no node unless another continues.

    Attributes:
        ids, depths, ends: of each node: its token, its position, and where the nodes below it end.
        rows, targets: of each token that counts somewhere: the node before it, and the token itself.
        target_rows: number of a text -> its places in `rows`.
    """

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    target_rows: dict[int, list[int]] = field(default_factory=dict)
    _path: list[int] = field(default_factory=list)
    _target_index: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_text(self, number: int, text: ScoredText, shared: int) -> None:
        """Add a text whose first `shared` input tokens are those of the text before it."""
        inputs = len(text.tokens) - 1
        self._close_path(shared)
        first = len(self.ids)
        fresh = inputs - shared
        self.ids += np.asarray(text.tokens[shared:-1], dtype=np.int64).tolist()
        self.depths += range(shared, inputs)
        self.ends += [0] * fresh
        self._path += range(first, first + fresh)
        places = []
        for at in range(len(text.tokens) - text.num_scored, len(text.tokens)):
            key = (self._path[at - 1], int(text.tokens[at]))
            if key not in self._target_index:
                self._target_index[key] = len(self.rows)
                self.rows.append(key[0])
                self.targets.append(key[1])
            places.append(self._target_index[key])
        self.target_rows[number] = places

    def close(self) -> None:
        """End the tree: nothing is added any more."""
        self._close_path(0)

    def _close_path(self, depth: int) -> None:
        for place in self._path[depth:]:
            self.ends[place] = len(self.ids)
        del self._path[depth:]

    @property
    def has_branches(self) -> bool:
        """True when it is more than one text from its beginning to its end."""
        return any(depth != place for place, depth in enumerate(self.depths))


def build_trees(texts: Sequence[ScoredText], hidden_size: int, most: int, share: bool = True) -> list[PrefixTree]:
    """Return the texts as trees, the longest first.

    A text joins the tree before it when that is less work than reading it alone. The work of a layer grows with
    24 H^2 per token (four products of the attention, three of the MLP, about 12 H^2 weights) and with 4 H per pair of
    tokens that attention looks at; divided by 4 H.

    Args:
        hidden_size: H.
        most: nodes of a tree at most, where it has several texts.
        share: False: every text is a tree by itself, to compare.
    """
    keys = [np.asarray(text.tokens[:-1], dtype=">u4") for text in texts]
    order = sorted(range(len(texts)), key=lambda number: keys[number].tobytes())
    made: list[PrefixTree] = []
    before: np.ndarray | None = None
    for number in order:
        now = keys[number]
        shared = 0 if before is None or not share else _common_length(before, now)
        fresh = len(now) - shared
        if made and shared and _is_worth_sharing(len(made[-1].ids), fresh, len(now), hidden_size, most):
            made[-1].add_text(number, texts[number], shared)
        else:
            made.append(PrefixTree())
            made[-1].add_text(number, texts[number], 0)
        before = now
    for tree in made:
        tree.close()
    return sorted(made, key=lambda tree: -len(tree.ids))


def batch_trees(made: Sequence[PrefixTree], batch_tokens: int) -> Iterator[list[PrefixTree]]:
    """Yield trees of like size that have at most `batch_tokens` nodes together; a larger tree stands alone."""
    batch: list[PrefixTree] = []
    size = 0
    for tree in made:
        if batch and size + len(tree.ids) > batch_tokens:
            yield batch
            batch, size = [], 0
        batch.append(tree)
        size += len(tree.ids)
    if batch:
        yield batch


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _is_worth_sharing(size: int, fresh: int, alone: int, hidden_size: int, most: int) -> bool:
    if size + fresh > most:
        return False
    together = _estimate_work(size + fresh, 1.0, hidden_size) - _estimate_work(size, 1.0, hidden_size)
    return together <= _estimate_work(alone, 0.5, hidden_size)


def _estimate_work(tokens: int, share_of_pairs: float, hidden_size: int) -> float:
    return tokens * (6 * hidden_size + share_of_pairs * tokens)
