"""The plan of the ring against the mask of the whole batch: every pair of tokens is computed once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from anabatic.core.errors import DataError
from anabatic.parallel.context_ring import RingPlan
from anabatic.parallel.mesh import ContextGroup
from anabatic.parallel.token_split import TokenSplit

CPU = torch.device("cpu")


def plans_of(borders: list[int], ranks: int) -> list[RingPlan]:
    groups = [ContextGroup(rank, ranks, pieces=2) for rank in range(ranks)]
    return [RingPlan(borders, TokenSplit(borders[-1], group), CPU) for group in groups]


def computed(borders: list[int], ranks: int) -> torch.Tensor:
    """How often each pair (query, key) of the batch is computed, `[T, T]`; keys as they were sent."""
    plans = plans_of(borders, ranks)
    every = torch.arange(borders[-1])
    rows = [plan.split.take(every) for plan in plans]
    counts = torch.zeros(borders[-1], borders[-1], dtype=torch.int64)
    for rank, plan in enumerate(plans):
        inner = plan.segments.cu_seqlens
        for start, end in zip(inner, inner[1:], strict=False):
            part = rows[rank][start:end]
            counts[part[:, None], part[None, :]] += torch.ones(len(part), len(part), dtype=torch.int64).tril()
        for at, round_plan in enumerate(plan.rounds):
            keys = rows[rank]
            if round_plan.distance:
                source = (rank - round_plan.distance) % ranks
                there = plans[source].rounds[at]
                assert there.distance == round_plan.distance
                parts = [rows[source][part] for part in there.sent]
                keys = torch.cat(parts) if parts else every[:0]
                assert len(keys) == round_plan.received
            for queries, part in round_plan.blocks:
                counts[rows[rank][queries][:, None], keys[part][None, :]] += 1
    return counts


def mask_of(borders: list[int]) -> torch.Tensor:
    ids = torch.cat([torch.full((end - start,), start) for start, end in zip(borders, borders[1:], strict=False)])
    return (ids[:, None] == ids[None, :]).tril().long()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 14), min_size=1, max_size=8), st.integers(2, 5))
def test_every_pair_is_computed_once(lengths: list[int], ranks: int) -> None:
    assume(sum(lengths) >= 2 * ranks)
    borders = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    assert torch.equal(computed(borders, ranks), mask_of(borders))


def test_the_work_of_one_document_is_balanced() -> None:
    plans = plans_of([0, 64], 4)
    work = []
    for plan in plans:
        inner = plan.segments.cu_seqlens
        own = sum((end - start) * (end - start + 1) // 2 for start, end in zip(inner, inner[1:], strict=False))
        blocks = [block for round_plan in plan.rounds for block in round_plan.blocks]
        work.append(own + sum((q.stop - q.start) * (k.stop - k.start) for q, k in blocks))
    assert len(set(work)) == 1 and sum(work) == 64 * 65 // 2


def test_a_batch_without_a_token_for_each_piece_is_refused() -> None:
    with pytest.raises(DataError, match="a batch of 7 tokens is too short for 4 ranks"):
        TokenSplit(7, ContextGroup(0, 4, pieces=2))


@pytest.mark.parametrize("ranks", [2, 4])
def test_documents_that_end_where_pieces_end_are_not_sent(ranks: int) -> None:
    borders = list(range(0, 8 * 2 * ranks + 1, 4))
    assert all(not plan.rounds for plan in plans_of(borders, ranks))
