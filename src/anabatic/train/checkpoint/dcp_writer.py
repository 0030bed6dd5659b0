"""The storage writer and the planner of torch.distributed.checkpoint: checksums, and plans that grow linearly.

Imported when the first checkpoint is written: it imports sharded tensors.
"""

from __future__ import annotations

import gc
import hashlib
import heapq
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import is_sharded
from anabatic.train.checkpoint.manifest import ChecksumFile, FileEntry

_NEVER = 2**30
"""Collections of the middle generation before a full one."""


class FullCollectionPause:
    """Keeps Python's garbage collector from full collections while millions of shards are unpickled.

    Each would look through all of them: four fifths of the time to read an index (`benchmarks/at_scale.py --only
    plan`). Young objects are collected as ever, also those of a training in another thread.
    """

    def __init__(self) -> None:
        self._thresholds: tuple[int, int, int] | None = None

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin the pause, unless it has begun."""
        if self._thresholds is None:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(*self._thresholds[:2], _NEVER)

    def stop(self) -> None:
        """End the pause, if it has begun."""
        if self._thresholds is not None:
            gc.set_threshold(*self._thresholds)
        self._thresholds = None


class _ChecksumFileSystem(FileSystem):
    def __init__(self, written: dict[str, FileEntry]) -> None:
        super().__init__()
        self.written = written

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a file that is checksummed and, at its end, synced."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with ChecksumFile(Path(path), self.written) as file:
            yield file

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename the file and its entry."""
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class ChecksumStorageWriter(FileSystemWriter):
    """Writes this rank's files of a checkpoint into `folder`.

    Where rank 0 gathers what all ranks plan and what they have written, full garbage collections pause.

    Attributes:
        written: the files so far: name -> entry.
        pause: of full garbage collections; whoever saves stops it at the end.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # the file syncs itself, with what was still buffered
        self.written: dict[str, FileEntry] = {}
        self.fs = _ChecksumFileSystem(self.written)
        self.pause = FullCollectionPause()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan that torch gathers on rank 0."""
        plan = super().prepare_local_plan(plan)
        self.pause.start()
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; torch gathers what comes of it on rank 0."""
        self.pause.stop()
        results = super().write_data(plan, planner)
        self.pause.start()
        return results


@dataclass(frozen=True)
class _PlanNote:
    """What a rank's plan says besides its tensors.

    Attributes:
        whole: digest of names, shapes and types of the tensors that every rank holds whole.
        mappings: of the first rank of each stage: its names, as torch keeps them in a checkpoint.
    """

    whole: str
    mappings: Mapping[str, Any] = field(default_factory=dict)


class LinearSavePlanner(DefaultSavePlanner):
    """Decides which rank writes what, with work on rank 0 that is linear in the number of ranks.

    torch's planner gathers a list of all tensors from every rank, also of those that every rank holds whole. And it
    compares each pair of a tensor's shards where these do not follow one another along the tensor's longest dimension
    (torch 2.13, checkpoint/default_planner.py, `_validate_global_plan`): with 4,096 ranks 2.8 s of CPU each time.

    Args:
        group: the ranks that save. Whole tensors have the same names, shapes and types on each rank of a stage.
        stages: of a pipeline, the slowest dimension of the mesh.
    """

    def __init__(self, group: RankGroup, stages: int = 1) -> None:
        super().__init__()
        self._group, self._copies = group, group.size // stages

    def create_local_plan(self) -> SavePlan:
        """Return this rank's shards, and its share of the tensors that every rank holds whole."""
        tensors: dict[str, Tensor] = self.state_dict
        whole = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
        described = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in whole.items())
        digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
        own = self._group.rank % self._copies
        others = {name for name, rank in assign_tensors(whole, self._copies).items() if rank != own}
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in others]
        note = _PlanNote(digest, self.mappings if own == 0 else {})
        self.plan = replace(plan, items=items, planner_data=note)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans of all ranks, each shard in one of them, and what the checkpoint says of its tensors.

        Raises:
            ValueError: the ranks hold different whole tensors, or the shards of a tensor overlap or leave gaps.
        """
        notes: list[_PlanNote] = [plan.planner_data for plan in all_plans]
        for rank, note in enumerate(notes):
            first = rank - rank % self._copies
            if note.whole != notes[first].whole:
                raise ValueError(f"rank {rank} holds other tensors than rank {first}")
        plans, metadata = create_default_global_save_plan(dedup_save_plans(all_plans))
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                _require_whole(name, entry.size, entry.chunks)
        # Only rank 0 needs the names.
        self.global_plan = [replace(plan, planner_data=None) for plan in plans]
        mappings = {name: key for note in notes for name, key in note.mappings.items()}
        self.metadata = replace(metadata, planner_data=mappings)
        return self.global_plan, self.metadata


def assign_tensors(tensors: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Return which rank writes each tensor, equal on every rank: the largest first, to who has the fewest bytes."""
    loads = [(0, rank) for rank in range(ranks)]
    assigned = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        size, rank = heapq.heappop(loads)
        assigned[name] = rank
        heapq.heappush(loads, (size + tensors[name].nbytes, rank))
    return assigned


def _require_whole(name: str, size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Make sure that shards are a whole tensor: as many elements, none outside, none twice.

    Raises:
        ValueError: they are not.
    """
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    found = sum(math.prod(chunk.sizes) for chunk in filled)
    if found != math.prod(size):
        raise ValueError(f"the shards of {name} have {found} of {math.prod(size)} elements")
    for chunk in filled:
        if any(start + length > limit for start, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ValueError(f"a shard of {name} is outside of it")
    # Along the dimension that tells most shards apart, few of them are side by side.
    axis = max(range(len(size)), key=lambda axis: len({chunk.offsets[axis] for chunk in filled}), default=0)
    beside: list[ChunkStorageMetadata] = []
    for chunk in sorted(filled, key=lambda chunk: tuple(chunk.offsets[axis:])) if len(filled) > 1 else ():
        beside = [other for other in beside if other.offsets[axis] + other.sizes[axis] > chunk.offsets[axis]]
        if any(_overlap(chunk, other) for other in beside):
            raise ValueError(f"two shards of {name} overlap")
        beside.append(chunk)


def _overlap(one: ChunkStorageMetadata, two: ChunkStorageMetadata) -> bool:
    spans = zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    return all(start < other + other_length and other < start + length for start, length, other, other_length in spans)
