"""Which rank writes what of a checkpoint: whole tensors once, shards checked, work linear in the number of ranks."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from anabatic.core.errors import CheckpointError
from anabatic.core.paths import RunFolder
from anabatic.parallel.mesh import RankGroup
from anabatic.train.checkpoint import dcp_writer, storage
from anabatic.train.checkpoint.dcp_writer import LinearSavePlanner, assign_tensors

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a shard."""


def whole_plans(tensors: list[dict[str, torch.Tensor]]) -> tuple[LinearSavePlanner, list[SavePlan]]:
    """Return rank 0's planner and the plans of all ranks."""
    planners = [LinearSavePlanner(RankGroup(rank, len(tensors))) for rank in range(len(tensors))]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(dict(tensors[rank]), is_coordinator=rank == 0)
    return planners[0], [planner.create_local_plan() for planner in planners]


def shard_plans(size: tuple[int, ...], boxes: list[Box]) -> tuple[LinearSavePlanner, list[SavePlan]]:
    """Return rank 0's planner and one plan for each shard of the tensor `w`, as a sharded tensor makes them."""
    planner, plans = whole_plans([{} for _ in boxes])
    for plan, (offsets, sizes) in zip(plans, boxes, strict=True):
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(), torch.Size(size))
        plan.items.append(WriteItem(MetadataIndex("w", torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data))
    return planner, plans


def test_each_whole_tensor_is_written_by_one_rank() -> None:
    tensors = {f"model.{number}": torch.zeros(number + 1) for number in range(40)}
    planner, plans = whole_plans([tensors] * 64)
    assert sum(len(plan.items) for plan in plans) == 40  # what rank 0 gathers does not grow with the ranks
    plans, metadata = planner.create_global_plan(plans)
    assert sorted(item.index.fqn for plan in plans for item in plan.items) == sorted(tensors)
    assert set(metadata.state_dict_metadata) == set(tensors) == set(metadata.planner_data)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 9), st.randoms())
def test_the_bytes_are_spread_over_the_ranks(sizes: list[int], ranks: int, draw: object) -> None:
    tensors = {f"t{number}": torch.zeros(size) for number, size in enumerate(sizes)}
    found = assign_tensors(tensors, ranks)
    names = list(tensors)
    draw.shuffle(names)  # type: ignore[attr-defined]
    assert assign_tensors({name: tensors[name] for name in names}, ranks) == found
    assert set(found) == set(tensors) and set(found.values()) <= set(range(ranks))
    loads = [sum(tensors[name].nbytes for name, rank in found.items() if rank == one) for one in range(ranks)]
    assert max(loads) - min(loads) <= 4 * max(sizes, default=0)


def test_ranks_with_other_tensors_are_refused() -> None:
    planner, plans = whole_plans([{"a": torch.zeros(2)}, {"a": torch.zeros(2)}, {"b": torch.zeros(2)}])
    with pytest.raises(ValueError, match="rank 2 holds other tensors than rank 0"):
        planner.create_global_plan(plans)
    planner, plans = whole_plans([{"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}])
    with pytest.raises(ValueError, match="rank 1 holds other tensors"):
        planner.create_global_plan(plans)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 8)), ((2, 0), (1, 8))], "the shards of w have 24 of 32 elements"),
        ([((0, 0), (2, 8)), ((1, 0), (2, 8))], "two shards of w overlap"),
        ([((0, 0), (2, 8)), ((3, 0), (2, 8))], "a shard of w is outside of it"),
        ([((0, 0), (4, 4)), ((0, 2), (2, 4)), ((2, 4), (2, 4))], "two shards of w overlap"),
    ],
)
def test_shards_that_are_no_whole_tensor_are_refused(boxes: list[Box], message: str) -> None:
    planner, plans = shard_plans((4, 8), boxes)
    with pytest.raises(ValueError, match=message):
        planner.create_global_plan(plans)


@pytest.mark.parametrize("across", [1, 8])
def test_comparing_shards_is_linear(across: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a matrix with more columns than rows, and a grid of shards as tensor parallelism makes it."""
    ranks, compared = 512, 0
    overlap = dcp_writer._overlap

    def counting(*chunks: ChunkStorageMetadata) -> bool:
        nonlocal compared
        compared += 1
        return overlap(*chunks)

    monkeypatch.setattr(dcp_writer, "_overlap", counting)
    rows, columns = ranks // across, 4096 // across
    boxes = [((row, column * columns), (1, columns)) for row in range(rows) for column in range(across)]
    boxes += [((rows, 0), (0, 4096))]  # a rank without a row
    planner, plans = shard_plans((rows, 4096), boxes)
    _, metadata = planner.create_global_plan(plans)
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata) and len(entry.chunks) == ranks + 1
    assert compared <= across * ranks


def test_full_collections_pause_once_and_come_back() -> None:
    before = gc.get_threshold()
    pause = dcp_writer.FullCollectionPause()
    pause.stop()
    assert gc.get_threshold() == before
    pause.start()
    pause.start()
    assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > before[2] and gc.isenabled()
    pause.stop()
    assert gc.get_threshold() == before


def test_full_collections_come_back_after_a_save_that_fails(tmp_path: Path) -> None:
    before = gc.get_threshold()
    writer = dcp_writer.ChecksumStorageWriter(tmp_path)
    writer.set_up_storage_writer(True)
    planner = LinearSavePlanner(RankGroup(0, 1))
    planner.set_up_planner({"w": torch.zeros(2)}, is_coordinator=True)
    writer.prepare_local_plan(planner.create_local_plan())
    assert gc.get_threshold() != before, "as plans are gathered"
    writer.pause.stop()
    content = storage.CheckpointContent({"w": torch.zeros(2, device="meta")}, {}, "{}")  # has no bytes to write
    storage.ignore_dcp_warnings()
    with pytest.raises(CheckpointError):
        storage.save_checkpoint(RunFolder(tmp_path / "run"), 1, content, RankGroup(0, 1))
    assert gc.get_threshold() == before
