"""The mesh of a job's ranks: one DeviceMesh with named dimensions, and the groups that are cut out of it.

Dimensions (`plan/mesh_shape.py`): `pipeline`, `replicate`, `shard`, `context`, `expert`, `tensor`. Every
group of ranks that anything uses is made here, once: a dimension of the mesh, or several that are flattened.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anabatic.plan.mesh_shape import MeshShape


@dataclass(frozen=True)
class RankGroup:
    """A group of processes of the job that includes this one.

    Attributes:
        process_group: torch's process group; None: all processes.
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ContextGroup(RankGroup):
    """Ranks that share the tokens of a batch.

    Attributes:
        pieces: runs of tokens of each rank: 1 for Ulysses, 2 for the ring.
    """

    pieces: int = 1


SINGLE_RANK = RankGroup()
SINGLE_CONTEXT = ContextGroup()
BATCH_DIMENSIONS = ("replicate", "shard", "expert")
"""Dimensions along which ranks have different batches."""
GRADIENT_DIMENSIONS = ("replicate", "shard", "context", "expert")
"""Dimensions along which gradients of one parameter are added, except those of divided experts."""
EXPERT_COPY_DIMENSIONS = ("replicate", "shard", "context")
"""Dimensions along which gradients of divided experts are added."""
SHARD_DIMENSIONS = ("shard", "context", "expert")
"""Dimensions that shard parameters together; those of divided experts without the last."""


class RankMesh:
    """The mesh of all ranks; dimensions of size 1 are left out, and groups are made on first use.

    All ranks must ask for the same groups in the same order.

    Args:
        device_type: of the tensors that collectives take.
        shape: sizes of the dimensions; their product is the number of all processes, more than 1.
    """

    def __init__(self, device_type: str, shape: MeshShape) -> None:
        self.device_type, self.shape = device_type, shape
        sizes = {name: size for name, size in shape.get_sizes().items() if size > 1}
        self.device_mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self._names = tuple(sizes)
        self._submeshes: dict[tuple[str, ...], DeviceMesh] = {}
        if shape.tensor > 1 or shape.expert > 1:
            # Tensors sharded twice are gathered in two steps when a model is saved, and torch warns each time.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    def get_submesh(self, dimensions: Sequence[str]) -> DeviceMesh | None:
        """Return one dimension of the mesh: the one named, or several flattened; None: this rank is alone in it."""
        names = tuple(name for name in dimensions if name in self._names)
        if not names:
            return None
        if names not in self._submeshes:
            found = self.device_mesh[names[0]] if len(names) == 1 else self.device_mesh[names]._flatten("_".join(names))
            self._submeshes[names] = found
        return self._submeshes[names]

    def get_group(self, dimensions: Sequence[str]) -> RankGroup:
        """Return the ranks that differ from this one along these dimensions alone."""
        submesh = self.get_submesh(dimensions)
        if submesh is None:
            return SINGLE_RANK
        return RankGroup(submesh.get_local_rank(), submesh.size(), submesh.get_group())

    def get_fsdp_mesh(self, dimensions: Sequence[str] = SHARD_DIMENSIONS) -> DeviceMesh:
        """Return the mesh for FSDP2: the ranks that shard parameters, below the copies if there are several."""
        shards = self.get_submesh(dimensions)
        copies = self.get_submesh(("replicate",))
        assert shards is not None  # plan.mesh_shape
        if copies is None:
            return shards
        name = shards.mesh_dim_names
        assert name is not None
        return self.device_mesh["replicate", name[0]]
