"""Apply expert parallelism to a model: the stacked experts of every layer are divided among ranks.

Everything else is as with data parallelism: ranks of an expert group have batches of their own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count
from anabatic.device.ops import REFERENCE_OPS
from anabatic.models.experts.expert_layers import EXPERT_GROUP, choose_expert_forward, iter_expert_layers
from anabatic.parallel.tensor_linear import shard_parameter
from anabatic.parallel.world import World
from anabatic.plan import job_rules


def require_divisible_experts(model: PreTrainedModel, degree: int) -> None:
    """Check that the experts of every layer are divisible by `degree`.

    Raises:
        ConfigError: there are no experts, they are of an unknown structure, or not divisible.
    """
    if degree == 1:
        return
    layers = [layer for _, layer in iter_expert_layers(model)]
    unknown = next((layer for layer in layers if choose_expert_forward(layer, REFERENCE_OPS)[0] is None), None)
    if unknown is not None:
        raise ConfigError(
            f"parallel.expert is {degree}, and {type(unknown).__name__} computes its experts in an unknown way",
            f"leave parallel.expert at 1; {job_rules.ZERO3_HINT}",
        )
    counts = sorted({int(layer.num_experts) for layer in layers})
    job_rules.raise_problems(job_rules.find_expert_problems(counts, degree))


def apply_expert_parallel(model: PreTrainedModel, world: World) -> frozenset[str]:
    """Divide the experts of a model whose parameters are on the meta device; return the names of what is divided."""
    if world.expert_group.size == 1:
        return frozenset()
    require_divisible_experts(model, world.expert_group.size)
    names = set()
    for name, layer in iter_expert_layers(model):
        layer.__dict__[EXPERT_GROUP] = world.expert_group
        for path, owner in layer.named_modules(prefix=name):
            for own in owner._parameters:
                shard_parameter(owner, own, 0, _expert_mesh(world))
                names.add(f"{path}.{own}")
    return frozenset(names)


def _expert_mesh(world: World) -> Any:
    assert world.mesh is not None
    return world.mesh.get_submesh(("expert",))


def describe_expert_parallel(model: nn.Module, degree: int) -> str:
    """Return a line about the divided experts."""
    layers = [layer for _, layer in iter_expert_layers(model)]
    total = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return (
        f"expert parallelism: {degree} processes share the experts of {len(layers)} layers, {format_count(total)}"
        f" parameters; every process has batches of its own"
    )
