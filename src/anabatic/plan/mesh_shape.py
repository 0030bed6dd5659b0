"""The shape of the mesh that the processes of a job form, and whether the processes fit it; without torch.

Ranks are numbered with the last dimension fastest (`pipeline` is the slowest: stages
exchange least): `tensor` or `expert` groups are neighbours, then `context` groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from anabatic.config.sections.common import Parallel
from anabatic.core.errors import ConfigError

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
"""Names of the mesh's dimensions, slowest first."""


@dataclass(frozen=True)
class MeshShape:
    """Number of ranks along each dimension.

    Attributes:
        pipeline: stages, ranks that share the layers, and the tokens.
        replicate: copies of the sharded weights, each on `shard x context x expert` ranks (HSDP).
        shard: ranks with different batches inside a copy.
        context: ranks that share the tokens of a batch.
        expert: ranks that share the experts of a layer, with different batches.
        tensor: ranks that share the matrices of a layer, and the tokens.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.pipeline * self.data_size * self.context * self.tensor

    @property
    def data_size(self) -> int:
        """Number of different batches at a time."""
        return self.replicate * self.shard * self.expert

    @property
    def gradient_size(self) -> int:
        """Number of ranks whose gradients of one parameter are added: all that compute with the same part of it."""
        return self.data_size * self.context

    def get_sizes(self) -> dict[str, int]:
        """Return the size of each dimension, slowest first."""
        return {name: getattr(self, name) for name in DIMENSIONS}


def get_mesh_multiple(settings: Parallel) -> int:
    """Return the number that the processes must be a multiple of."""
    return settings.pipeline * settings.replicate * settings.context * settings.expert * settings.tensor


def resolve_mesh_shape(settings: Parallel, world_size: int, is_planned: bool = False) -> MeshShape:
    """Return the mesh of `world_size` processes: the dimensions that are set, and `shard` from what is left.

    Args:
        is_planned: of devices that nothing has been started on: the hints are about the dimensions, not the number.

    Raises:
        ConfigError: the dimensions do not divide the processes, or leave nothing to shard.
    """
    given = {name: getattr(settings, name) for name in DIMENSIONS if name != "shard"}
    named = {name: size for name, size in given.items() if size > 1}
    product = get_mesh_multiple(settings)
    if world_size % product:
        parts = " x ".join(f"parallel.{name} {size}" for name, size in named.items())
        what = f"{parts} = {product}" if len(named) > 1 else f"parallel.{next(iter(named))} is {product}"
        divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
        hint = (
            f"use a size, or sizes with a product, of {', '.join(divisors[:-1])} or {world_size}"
            if is_planned and world_size > 1
            else f"start a multiple of {product}, for one machine by --device.nproc"
            f" {-(-world_size // product) * product}"
        )
        raise ConfigError(f"{what}, which does not divide {_count_units(world_size, is_planned)}", hint)
    shape = MeshShape(shard=world_size // product, **given)
    if shape.replicate > 1 and shape.shard * shape.context * shape.expert == 1:
        raise ConfigError(
            f"parallel.replicate is {shape.replicate}, and {_count_units(world_size, is_planned)} leave one in each"
            " copy: nothing is sharded",
            "use --parallel.strategy ddp, or a smaller parallel.replicate",
        )
    return shape


def _count_units(number: int, is_planned: bool) -> str:
    one, several = ("device", "devices") if is_planned else ("process", "processes")
    return f"{number} {one if number == 1 else several}"


def iter_layouts(settings: Parallel, world_size: int, limits: Mapping[str, int]) -> Iterator[Parallel]:
    """Yield every mesh of `world_size` processes: dimensions that are set stay, others are powers of two or three times
    one, up to a limit; `zero3` where there are copies of shards.

    Args:
        limits: dimension -> the largest size; dimensions without one stay as they are.
    """
    sizes = {
        name: [size for size in range(1, min(limit, world_size) + 1) if world_size % size == 0 and _is_usual(size)]
        for name, limit in limits.items()
        if getattr(settings, name) == 1
    }
    for chosen in itertools.product(*sizes.values()):
        layout = dict(zip(sizes, chosen, strict=True))
        strategy = "zero3" if layout.get("replicate", 1) > 1 else settings.strategy
        try:
            found = replace(settings, **layout, strategy=strategy)  # type: ignore[arg-type]
            resolve_mesh_shape(found, world_size)
        except ConfigError:  # dimensions that exclude each other, or do not divide the processes
            continue
        yield found


def _is_usual(size: int) -> bool:
    power = size // 3 if size % 3 == 0 else size
    return power & (power - 1) == 0
