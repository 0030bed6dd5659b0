"""Sequences of words in batches: whole, each with its class, numbers and weight, another draw in every pass."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from anabatic.data.batching.loader import Loader
from anabatic.data.batching.packing import IGNORE_INDEX
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.sequence.dataset import RandomCrop, SequenceDataset, collate_classification, collate_word_targets

IDS = [np.arange(n, 2 * n + 2, dtype=np.int32) for n in range(1, 30)]
LABELS = [n % 3 for n in range(29)]


def turns(ids: np.ndarray, number: int, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Shows the pass in which a sequence is read."""
    return np.full_like(ids, turn), np.full(len(ids), number)


def test_every_sequence_comes_once_a_pass_with_what_belongs_to_it() -> None:
    features = np.asarray(LABELS, np.float32)[:, None] + [[0.5, 1.5]]
    made = SequenceDataset("x", IDS, LABELS, features.astype(np.float32), weights=np.linspace(0.5, 1.5, 29))
    seen = []
    with Loader([(made, None)], seq_len=64, micro_batch_tokens=128, lay=collate_classification, lookahead=1) as loader:
        while len(seen) < 29:
            batch = next(loader)
            numbers = batch.extra["number"].tolist()
            assert batch.num_targets == len(numbers)
            for row, (start, stop) in enumerate(itertools.pairwise(batch.cu_seqlens[: len(numbers) + 1])):
                number = numbers[row]
                assert batch.input_ids[start:stop].tolist() == IDS[number].tolist()
                assert batch.labels[start:stop].tolist() == [IGNORE_INDEX] * (stop - start - 1) + [LABELS[number]]
                assert batch.extra["features"][row].tolist() == [LABELS[number] + 0.5, LABELS[number] + 1.5]
                assert batch.extra["weight"][row] == pytest.approx(0.5 + number / 28)
            assert (batch.labels[batch.cu_seqlens[len(numbers)] :] == IGNORE_INDEX).all()
            seen += numbers
    assert sorted(seen[:29]) == list(range(29))


@pytest.mark.parametrize("world", [1, 2])
def test_the_pass_is_known_for_any_number_of_processes_and_after_a_restart(world: int) -> None:
    made = SequenceDataset("x", IDS, LABELS, draw=turns)
    options = {
        "seq_len": 64,
        "micro_batch_tokens": 128,
        "lay": collate_word_targets,
        "world_size": world,
        "lookahead": 1,
    }
    read: dict[int, set[int]] = {}
    state = None
    for _ in range(40):
        for rank in range(world):
            with Loader([(made, None)], rank=rank, state=state, **options) as loader:  # type: ignore[arg-type]
                batch = next(loader)
            for number, start in zip(batch.extra["number"].tolist(), batch.cu_seqlens, strict=False):
                turn = int(batch.input_ids[start])
                assert turn not in read.setdefault(number, set())
                read[number].add(turn)
                assert int(batch.labels[start]) == number
        state = batch.loader_state
    assert all(found == set(range(len(found))) for found in read.values()) and len(read) == 29
    assert max(map(len, read.values())) - min(map(len, read.values())) <= 1


def test_held_out_ones_come_once() -> None:
    made = SequenceDataset("x", IDS, LABELS)
    for world in (1, 3):
        numbers = [
            number
            for rank in range(world)
            for batch in ValidationBatches([made], 64, 128, 10**9, rank, world, collate_classification)
            for number in batch.extra["number"].tolist()
        ]
        assert sorted(numbers) == list(range(29))


def test_labels_of_an_empty_batch() -> None:
    batch = collate_classification([], 16, 0, 8)
    assert batch.num_targets == 0 and batch.extra["number"].numel() == 0
    assert torch.equal(batch.labels, torch.full((16,), IGNORE_INDEX))


def test_a_crop_is_a_run_of_points_and_another_one_in_every_pass() -> None:
    starts = np.zeros(10, bool)
    starts[0] = True
    rows = [np.asarray([0, 1, 2, 0, 3, 0, 4, 5, 6, 0, 7], np.int32), np.asarray([0, 8], np.int32)]
    made = SequenceDataset("x", rows, [0, 1], crop=RandomCrop(starts, 0.5, seed=3))
    runs = set()
    for turn in range(60):
        entry = made.locate_entry(0, turn)
        read = made.read_segment(entry, 0, entry.num_inputs).ids.tolist()
        assert entry == made.locate_entry(0, turn) and read[0] == 0 and 2 <= read.count(0) <= 4
        assert any(rows[0][first : first + len(read)].tolist() == read for first in range(11))
        runs.add(tuple(read))
        assert made.read_segment(made.locate_entry(1, turn), 0, 2).ids.tolist() == [0, 8]
    assert len(runs) == 6  # 3 runs of two points, 2 of three, the whole
    assert made.num_tokens == made.locate_entry(0).num_inputs + 2
