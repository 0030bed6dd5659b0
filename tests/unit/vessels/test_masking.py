"""Which words are hidden: as many as wanted, by the shares of the groups, another draw in every pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.data.batching.packing import IGNORE_INDEX
from anabatic_vessels.words.masking import (
    MASK_FRACTION,
    RANDOM_FRACTION,
    NextWordTargets,
    WordMasking,
    allocate_mask_quota,
)

GROUPS = np.repeat([-1, 0, 1, 2, 3], [3, 40, 5, 20, 4])
"""Of 72 ids: 3 never hidden, 40 of the first group, 5, 20 and 4 of the others."""
SHARES = np.asarray([0.4, 0.3, 0.2, 0.1])
MASK = 1


def masking(**options: object) -> WordMasking:
    return WordMasking(GROUPS, SHARES, 0.15, MASK, seed=7, **options)  # type: ignore[arg-type]


def text(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, len(GROUPS), length).astype(np.int32)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.floats(0, 60))
def test_a_quota_takes_what_is_there(there: list[int], wanted: float) -> None:
    found = allocate_mask_quota(np.asarray(there), SHARES, wanted)
    assert (found <= np.asarray(there) + 1e-9).all() and (found >= 0).all()
    assert found.sum() == pytest.approx(min(wanted, sum(there)), abs=1e-6)
    roomy = found < np.asarray(there) - 1e-6
    if roomy.sum() > 1:
        assert np.ptp((found / SHARES)[roomy]) < 1e-6  # what has room gets its share


@pytest.mark.parametrize("shift", [True, False])
def test_targets_are_the_hidden_words(shift: bool) -> None:
    hide = masking(shift_targets=shift)
    for number in range(40):
        ids = text(200, number)
        read, targets = hide(ids, number, 0)
        at = np.flatnonzero(targets != IGNORE_INDEX)
        place = at + 1 if shift else at
        assert (targets[at] == ids[place]).all() and (GROUPS[ids[place]] >= 0).all()
        rest = np.setdiff1d(np.arange(1 if shift else 0, 200), place)
        assert (read[rest] == ids[rest]).all()


def test_shares_of_groups_and_of_what_replaces_them() -> None:
    hide = masking()
    kinds = np.zeros(3)
    for number in range(300):
        ids = text(400, number)
        read, targets = hide(ids, number, 0)
        at = np.flatnonzero(targets != IGNORE_INDEX)
        new, old = read[at + 1], targets[at]
        kinds += [(new == MASK).sum(), ((new != MASK) & (new != old)).sum(), (new == old).sum()]
    hidden = np.asarray([hide.masked_counts[number] for number in range(4)])
    assert hidden.sum() / hide.masked_counts[None] == pytest.approx(0.15, rel=0.01)
    assert hidden / hidden.sum() == pytest.approx(SHARES, abs=0.01)
    assert kinds / kinds.sum() == pytest.approx(
        [MASK_FRACTION, RANDOM_FRACTION, 1 - MASK_FRACTION - RANDOM_FRACTION], abs=0.01
    )


def test_every_pass_hides_others_and_the_same_pass_the_same() -> None:
    ids = text(300, 0)
    first, again, other = masking()(ids, 5, 0), masking()(ids, 5, 0), masking()(ids, 5, 1)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first[1] != other[1]).any() and (first[1] != masking()(ids, 6, 0)[1]).any()


def test_the_scripts_hide_each_word_by_itself() -> None:
    hide = masking(shift_targets=False, is_independent=True)
    for number in range(300):
        hide(text(400, number), number, 0)
    words = np.bincount(GROUPS[GROUPS >= 0]) / len(GROUPS) * 300 * 400
    found = np.asarray([hide.masked_counts[number] for number in range(4)]) / words
    assert found == pytest.approx(0.15 * SHARES, rel=0.12)


def test_next_word() -> None:
    read, targets = NextWordTargets()(np.asarray([4, 5, 6], np.int32), 0, 0)
    assert read.tolist() == [4, 5, 6] and targets.tolist() == [5, 6, IGNORE_INDEX]
