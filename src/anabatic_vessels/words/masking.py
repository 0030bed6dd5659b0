"""Mask words for the model to guess; drawn again in every pass over the data.

Words are hidden after they became ids, each group of words with its own share, so that the many words of a
position do not crowd out the few of the motion.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from anabatic.data.batching.packing import IGNORE_INDEX
from anabatic.data.batching.shuffle import splitmix64_hash

MASK_FRACTION, RANDOM_FRACTION = 0.8, 0.1
"""Shares of the hidden words that become the mask word, and any other word; the rest stays (BERT, arXiv 1810.04805,
section 3.1)."""


@dataclass
class WordMasking:
    """Hides words.

    Attributes:
        group_of_id: int64 `[V]`, the group of every id; -1: never hidden.
        group_fractions: of the hidden words, one for each group; they sum to 1.
        mask_ratio: share of the words that may be hidden, which are.
        mask_id: the mask word.
        seed: of the draw.
        shift_targets: a word is predicted where the one before it is read, as causal models are used to (LLM2Vec, arXiv
            2404.05961, section 2); False: where it is read itself.
        is_independent: every word is hidden by itself with probability `mask_ratio` times its group's share, as the
            "token_for_nj" scripts do, instead of `mask_ratio` of all words by the shares.
        masked_counts: words of each group that were hidden, and `None`: words that could be; for the log.
    """

    group_of_id: np.ndarray
    group_fractions: np.ndarray
    mask_ratio: float
    mask_id: int
    seed: int
    shift_targets: bool = True
    is_independent: bool = False
    masked_counts: Counter[int | None] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._eligible = np.flatnonzero(self.group_of_id >= 0).astype(np.int32)

    def __call__(self, ids: np.ndarray, number: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the words to read and the target of every position; the same for the same sequence and pass."""
        random = np.random.Generator(np.random.SFC64(splitmix64_hash(self.seed, number, turn)))
        hidden = self._choose_masked_positions(ids, random)
        read = ids.copy()
        kind = random.random(len(hidden))
        read[hidden[kind < MASK_FRACTION]] = self.mask_id
        others = hidden[(kind >= MASK_FRACTION) & (kind < MASK_FRACTION + RANDOM_FRACTION)]
        read[others] = random.choice(self._eligible, len(others))
        targets = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        at = hidden[hidden > 0] - 1 if self.shift_targets else hidden
        targets[at] = ids[at + 1] if self.shift_targets else ids[at]
        return read, targets

    def _choose_masked_positions(self, ids: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the places of the hidden words, ascending."""
        group = self.group_of_id[ids]
        places = np.flatnonzero(group >= 0)
        self.masked_counts[None] += len(places)
        if self.is_independent:
            limits = self.mask_ratio * self.group_fractions[group[places]]
            chosen: np.ndarray = places[random.random(len(places)) < limits]
            self._count_masked(group[chosen])
            return chosen
        counts = np.bincount(group[places], minlength=len(self.group_fractions))
        num_masked = self.mask_ratio * len(places)
        quotas = allocate_mask_quota(counts, self.group_fractions, num_masked)
        chosen_parts = []
        for number, quota in enumerate(quotas):
            count = int(quota) + int(random.random() < quota - int(quota))
            if count:
                chosen_parts.append(random.choice(places[group[places] == number], min(count, counts[number]), False))
        chosen = np.sort(np.concatenate([*chosen_parts, np.empty(0, np.int64)])).astype(np.int64)
        self._count_masked(group[chosen])
        return chosen

    def _count_masked(self, groups: np.ndarray) -> None:
        for number, found in enumerate(np.bincount(groups, minlength=len(self.group_fractions))):
            self.masked_counts[number] += int(found)


def allocate_mask_quota(counts: np.ndarray, fractions: np.ndarray, num_masked: float) -> np.ndarray:
    """Return how many words of each group to hide, as fractions: by the shares, no more than there are; what a group
    lacks goes to the others by their shares.

    Args:
        counts: words of each group in the sequence.
        fractions: of each group.
        num_masked: words to hide together.
    """
    found = np.zeros(len(fractions))
    open_groups = (counts > 0) & (fractions > 0)
    while open_groups.any() and num_masked - found.sum() > 1e-9:
        part = np.where(open_groups, fractions, 0.0)
        found = found + (num_masked - found.sum()) * part / part.sum()
        full = open_groups & (found >= counts)
        found = np.minimum(found, counts)
        if not full.any():
            break
        open_groups &= ~full
    return found


@dataclass(frozen=True)
class NextWordTargets:
    """Every word is predicted from those before it."""

    def __call__(self, ids: np.ndarray, number: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequence and the word that follows each; the last has none."""
        return ids, np.append(ids[1:], IGNORE_INDEX).astype(np.int64)
