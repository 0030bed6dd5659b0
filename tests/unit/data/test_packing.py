"""Packing: nothing lost, nothing mixed up, labels that follow their tokens."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.data.batching.packing import (
    IGNORE_INDEX,
    TokenSegment,
    choose_best_fit,
    collate_packed,
    pack_best_fit,
    split_into_segments,
)
from anabatic.data.batching.shuffle import ShuffledOrder, permute_indices, splitmix64_hash

lengths = st.lists(st.integers(1, 40), max_size=60)


@given(st.integers(0, 500), st.integers(1, 40))
def test_cut_covers_the_text_once(length, seq_len):
    pieces = split_into_segments(length, seq_len)
    assert sum(n for _, n in pieces) == length
    assert all(n == seq_len for _, n in pieces[:-1])
    assert [start for start, _ in pieces] == list(range(0, length, seq_len))


def test_choose_takes_the_oldest_that_fits_else_the_longest_that_fits():
    assert choose_best_fit([5, 9, 3], 6) == 0
    assert choose_best_fit([9, 3, 5, 4], 6) == 2
    assert choose_best_fit([9, 8], 6) is None
    assert choose_best_fit([], 6) is None


@given(lengths, st.integers(40, 90), st.integers(1, 9))
def test_best_fit_places_every_piece_once(pieces, capacity, lookahead):
    groups = list(pack_best_fit(pieces, capacity, lookahead))
    assert sorted(index for group in groups for index in group) == list(range(len(pieces)))
    assert all(0 < sum(pieces[index] for index in group) <= capacity for group in groups)


def test_best_fit_wastes_little():
    rng = np.random.default_rng(0)
    pieces = rng.integers(10, 500, 4000).tolist()
    groups = list(pack_best_fit(pieces, 2048))
    assert sum(pieces) / (len(groups) * 2048) > 0.99


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(0, 50), st.integers(2, 20))
@settings(deadline=None)
def test_flatten_against_a_slow_reference(sizes, tail, seq_len):
    rng = np.random.default_rng(len(sizes))
    pieces = [
        TokenSegment(rng.integers(1, 99, n + 1), rng.integers(0, 2, n + 1).astype(np.uint8) if n % 2 else None)
        for n in sizes
    ]
    capacity = sum(sizes) + tail
    batch = collate_packed(pieces, capacity, 7, seq_len, {"a": 1})
    ids, labels, positions = [], [], []
    for piece in pieces:
        for at in range(piece.num_inputs):
            learned = piece.loss_mask is None or piece.loss_mask[at + 1]
            ids.append(int(piece.ids[at]))
            labels.append(int(piece.ids[at + 1]) if learned else IGNORE_INDEX)
            positions.append(at)
    for at in range(tail):
        ids.append(7)
        labels.append(IGNORE_INDEX)
        positions.append(at % seq_len)
    assert batch.input_ids.tolist() == ids
    assert batch.labels.tolist() == labels
    assert batch.position_ids.tolist() == positions
    assert batch.num_tokens == sum(sizes)
    assert batch.num_targets == sum(label != IGNORE_INDEX for label in labels)
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == capacity
    assert [at for at in range(capacity) if positions[at] == 0] == batch.cu_seqlens[:-1]
    assert batch.loader_state == {"a": 1}
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype} == {torch.int64}


@given(st.integers(1, 3000), st.integers(0, 2**63))
@settings(deadline=None)
def test_permute_is_a_permutation(n, key):
    assert sorted(permute_indices(np.arange(n), n, key).tolist()) == list(range(n))


def test_permute_shuffles_and_depends_on_the_key():
    n = 5000
    one, two = permute_indices(np.arange(n), n, 1), permute_indices(np.arange(n), n, 2)
    assert (one == two).mean() < 0.01
    assert abs(np.corrcoef(np.arange(n), one)[0, 1]) < 0.05
    assert (np.diff(one) == 1).mean() < 0.01


def test_permute_of_a_huge_domain_stays_inside():
    n = 10**12 + 39
    values = permute_indices(np.arange(n - 1000, n), n, 5)
    assert len(set(values.tolist())) == 1000
    assert values.min() >= 0 and values.max() < n


def test_order_gives_every_epoch_another_permutation():
    order = ShuffledOrder(2500, splitmix64_hash(3))
    epochs = [[order[epoch * 2500 + at] for at in range(2500)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(2500))
    assert epochs[0] != epochs[1]
    assert order[1234] == epochs[0][1234]
