"""Divide a model among the ranks of a mesh: its layers, attention heads and experts, and the tokens of a batch."""

from __future__ import annotations

from transformers import PreTrainedModel

from anabatic.models import context_parallel, tensor_parallel
from anabatic.models.experts import expert_parallel
from anabatic.models.pipeline import stages as pipeline_stages
from anabatic.parallel.world import World


def require_divisible(model: PreTrainedModel, world: World) -> None:
    """Check that the groups of a mesh can share a model, perhaps on the meta device.

    Raises:
        ConfigError: they cannot: its structure is not known, or its sizes are not divisible.
    """
    if world.tensor_group.size > 1:
        tensor_parallel.require_divisible(model, world.tensor_group.size)
    if world.context_group.size > 1:
        context_parallel.require_divisible_heads(model, world)
    if world.expert_group.size > 1:
        expert_parallel.require_divisible_experts(model, world.expert_group.size)
    if world.pipeline_group.size > 1:
        pipeline_stages.require_stages(model, world)


def divide_model(model: PreTrainedModel, world: World) -> tuple[frozenset[str], frozenset[str]]:
    """Leave a model on the meta device this rank's parts.

    Returns:
        Names of replicated parameters with partial gradients on each tensor rank, and of divided experts.
    """
    if world.pipeline_group.size > 1:
        pipeline_stages.apply_pipeline(model, world)
    is_divided = world.tensor_group.size > 1
    partial = tensor_parallel.apply_tensor_parallel(model, world) if is_divided else frozenset()
    has_parts = world.expert_group.size > 1
    return partial, expert_parallel.apply_expert_parallel(model, world) if has_parts else frozenset()


def describe_division(model: PreTrainedModel, world: World, micro_steps: int) -> list[str]:
    """Return a line about each group that shares a model.

    Args:
        micro_steps: micro-batches of a step, which pass through a pipeline.
    """
    lines = []
    if world.context_group.size > 1:
        lines.append(context_parallel.describe_context_parallel(model, world))
    if world.expert_group.size > 1:
        lines.append(expert_parallel.describe_expert_parallel(model, world.expert_group.size))
    if world.pipeline_group.size > 1:
        lines.append(pipeline_stages.describe_pipeline(model, world, micro_steps))
    if world.tensor_group.size > 1:
        lines.append(tensor_parallel.describe_tensor_parallel(model, world.tensor_group.size))
    return lines
