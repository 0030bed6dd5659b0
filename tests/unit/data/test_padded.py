"""Padded micro-batches: every row once a pass, like lengths together, resumable, the loss and gradient of packing."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.data.batching.loader import Loader
from anabatic.data.batching.mixture import MixtureStage
from anabatic.data.batching.packing import IGNORE_INDEX, Batch, TokenSegment, collate_packed, collate_padded
from anabatic.data.batching.padding import WINDOW_BATCHES, estimate_epoch_batches, group_by_length
from anabatic.data.shards.reader import ShardSet
from anabatic.device.attention import PackedSegments
from anabatic.models import forward
from anabatic_testing.tiny_corpora import write_chat_shards, write_text_shards
from anabatic_testing.tiny_models import build_tiny_model


def rows_of(number: int, seed: int = 0, longest: int = 40, first: int = 1000) -> list[tuple[list[int], list[int]]]:
    """Conversations whose first token names them."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, longest, number)
    return [([first + n, *rng.integers(2, 900, size)], [0, *[1] * int(size)]) for n, size in enumerate(sizes)]


def take(sets: list[tuple[ShardSet, float | None]], number: int, **options: Any) -> list[Batch]:
    options = {"seq_len": 40, "micro_batch_tokens": 128, "seed": 1, "packing": False, **options}
    with Loader(sets, **options) as loader:
        return list(islice(loader, number))


def names(batch: Batch) -> list[int]:
    """The first token of every row."""
    return batch.input_ids[torch.tensor(batch.cu_seqlens[:-1])].tolist()


def content(batch: Batch) -> tuple[Any, ...]:
    return batch.input_ids.tolist(), batch.labels.tolist(), batch.cu_seqlens, batch.num_targets, batch.num_tokens


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(50, 300))
def test_groups_hold_every_row_once_and_fit(lengths: list[int], capacity: int) -> None:
    made = group_by_length(np.asarray(lengths), capacity)
    assert sorted(int(row) for group in made for row in group) == list(range(len(lengths)))
    assert all(len(group) * max(lengths[row] for row in group) <= capacity for group in made)
    joined = [lengths[row] for group in made for row in group]
    assert joined == sorted(lengths, reverse=True)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.booleans())
@settings(deadline=None)
def test_pad_against_a_slow_reference(sizes: list[int], masked: bool) -> None:
    rng = np.random.default_rng(len(sizes))
    pieces = [
        TokenSegment(rng.integers(1, 99, n + 1), rng.integers(0, 2, n + 1).astype(np.uint8) if masked else None)
        for n in sizes
    ]
    batch = collate_padded(pieces, 64, 7, 64, {"a": 1})
    longest, ids, labels = max(sizes), [], []
    for piece in pieces:
        for at in range(longest):
            real = at < piece.num_inputs
            learned = real and (piece.loss_mask is None or bool(piece.loss_mask[at + 1]))
            ids.append(int(piece.ids[at]) if real else 7)
            labels.append(int(piece.ids[at + 1]) if learned else IGNORE_INDEX)
    assert batch.input_ids.tolist() == ids and batch.labels.tolist() == labels
    assert batch.position_ids.tolist() == list(range(longest)) * len(sizes)
    assert batch.num_targets == sum(label != IGNORE_INDEX for label in labels) and batch.num_tokens == sum(sizes)
    assert PackedSegments(batch.cu_seqlens, torch.device("cpu")).is_identity and batch.loader_state == {"a": 1}


def test_loss_and_gradient_are_those_of_packing() -> None:
    model = build_tiny_model().double()
    rng = np.random.default_rng(0)
    pieces = []
    for n in (5, 23, 11, 17, 3):
        mask = rng.integers(0, 2, n + 1).astype(np.uint8)
        mask[-1] = 1
        pieces.append(TokenSegment(rng.integers(1, 320, n + 1), mask))

    def measured(batch: Batch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = forward.compute_summed_loss(model, forward.pack_batch(batch, torch.device("cpu")), 2**20)
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    one, padded = collate_packed(pieces, 80, 0, 64), collate_padded(pieces, 80, 0, 64)
    assert one.num_targets == padded.num_targets
    (loss, grads), (other, others) = measured(one), measured(padded)
    torch.testing.assert_close(other, loss, rtol=1e-7, atol=0.0)
    assert len(grads) == len(others) == len(list(model.parameters()))
    for grad, same in zip(grads, others, strict=True):
        # Norms and logits are made in fp32 even for float64 weights, and add up in another order.
        torch.testing.assert_close(same, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("number", [30, 1500])  # less than a window, and several
def test_every_row_comes_once_per_pass(tmp_path: Path, number: int) -> None:
    made = write_chat_shards(tmp_path / "c", rows_of(number))
    batches, padding = estimate_epoch_batches([made], 40, 128, 1)
    taken = take([(made, None)], 3 * batches)
    drawn = [name for batch in taken for name in names(batch)]
    first, second = drawn[:number], drawn[number : 2 * number]
    assert sorted(first) == sorted(second) == [ids[0] for ids, _ in rows_of(number)]
    assert first != second and first != sorted(first)
    assert all(len(batch.input_ids) <= 128 for batch in taken)
    assert all(len(set(np.diff(batch.cu_seqlens))) == 1 for batch in taken)
    share = 1 - sum(batch.num_tokens for batch in taken) / sum(len(batch.input_ids) for batch in taken)
    assert padding == pytest.approx(share, abs=0.03) and share < 0.15
    real, placed = taken[-1].loader_state["tokens"]
    assert 1 - real / placed == pytest.approx(share)


def test_one_window_is_planned_exactly(tmp_path: Path) -> None:
    made = write_chat_shards(tmp_path / "c", rows_of(30))
    batches, padding = estimate_epoch_batches([made], 40, 128, 1)
    taken = take([(made, None)], batches)
    assert sum(len(names(batch)) for batch in taken) == 30
    placed = sum(len(batch.input_ids) for batch in taken)
    assert padding == 1 - sum(batch.num_tokens for batch in taken) / placed


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_stream_is_the_same_for_any_world_size(tmp_path: Path, world_size: int) -> None:
    made = write_chat_shards(tmp_path / "c", rows_of(200))
    alone = [content(batch) for batch in take([(made, None)], 60)]
    ranks = [take([(made, None)], 60 // world_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [content(batch) for each in zip(*ranks, strict=True) for batch in each] == alone
    assert all(a.loader_state == b.loader_state for a, b in zip(ranks[0], ranks[1], strict=True))


@pytest.mark.parametrize("stop", [1, 2, 17, WINDOW_BATCHES - 1, WINDOW_BATCHES + 9, 150])
def test_resuming_from_any_state_gives_the_same_batches(tmp_path: Path, stop: int) -> None:
    sets = [
        (write_chat_shards(tmp_path / "a", rows_of(300)), 0.7),
        (write_chat_shards(tmp_path / "b", rows_of(90, 1, 30, 5000)), 0.3),
    ]
    stages = [MixtureStage(0, (0.9, 0.1)), MixtureStage(70, (0.2, 0.8))]
    whole = take(sets, 180, stages=stages)
    state = json.loads(json.dumps(whole[stop - 1].loader_state))
    rest = take(sets, 180 - stop, stages=stages, state=state)
    assert [content(batch) for batch in rest] == [content(batch) for batch in whole[stop:]]
    assert [batch.loader_state for batch in rest] == [batch.loader_state for batch in whole[stop:]]


def test_a_curriculum_holds_in_every_stage(tmp_path: Path) -> None:
    """Also from the very batch on at which a stage begins, and the state counts what was drawn."""
    sets = [
        (write_chat_shards(tmp_path / "a", rows_of(100)), None),
        (write_chat_shards(tmp_path / "b", rows_of(40, 1, 40, 5000)), None),
    ]
    taken = take(
        sets, 90, stages=[MixtureStage(0, (1.0, 0.0)), MixtureStage(20, (0.5, 0.5)), MixtureStage(50, (0.25, 0.75))]
    )
    for start, stop, share in ((0, 20, 1.0), (20, 50, 0.5), (50, 90, 0.25)):
        easy = [name < 5000 for batch in taken[start:stop] for name in names(batch)]
        # The last window of the third stage continues behind the end.
        assert np.mean(easy) == pytest.approx(share, abs=0.01 if stop < 90 else 0.1), (start, stop)
    drawn = Counter(name < 5000 for batch in taken for name in names(batch))
    assert taken[-1].loader_state["samples"] == [drawn[True], drawn[False]]
    assert [taken[at].loader_state["stage"][0] for at in (19, 20, 49, 50)] == [0, 1, 1, 2]


def test_packed_states_count_samples_and_padding_too(tmp_path: Path) -> None:
    made = write_chat_shards(tmp_path / "c", rows_of(60))
    taken = take([(made, None)], 7, packing=True)
    assert taken[-1].loader_state["tokens"] == [sum(batch.num_tokens for batch in taken), 7 * 128]


def test_text_has_no_rows(tmp_path: Path) -> None:
    made = write_text_shards(tmp_path / "notes", [[1, 2, 3]])
    with pytest.raises(ConfigError, match="batch.packing is false, and notes is plain text") as caught:
        take([(made, None)], 1)
    assert "packing" in caught.value.hint
