"""Context parallelism: the tokens of a packed batch are split over the ranks of a group, the documents stay whole.

Every rank runs the model on its tokens, with their positions, and computes the loss of its targets. Only attention
needs the tokens of the others (`parallel/context_exchange.py`), so it gets the borders of the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.config.sections.common import ContextMethod
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.models.kv_cache import get_head_sizes
from anabatic.models.linear_attention.delta_net import find_delta_layers
from anabatic.parallel.mesh import ContextGroup
from anabatic.parallel.tensor_linear import reduce_from_parallel_region
from anabatic.parallel.token_split import TokenSplit
from anabatic.parallel.world import World
from anabatic.plan import job_rules


def find_target_rows(batch: Batch, context: ContextGroup) -> Tensor:
    """Return the rows of this rank's targets in the whole batch, int64 `[n]`."""
    rows = TokenSplit(batch.cu_seqlens[-1], context).take(torch.arange(batch.cu_seqlens[-1]))
    return rows[batch.labels[rows] != IGNORE_INDEX]


def sum_over_context(x: Tensor, context: ContextGroup) -> Tensor:
    """Return the sum of `x` over the ranks, each of which uses it in the same way; each part gets its gradient."""
    return x if context.size == 1 else reduce_from_parallel_region(x, context)


def count_once(x: Tensor, context: ContextGroup) -> Tensor:
    """Return a value that is equal on all ranks of a group as this rank's part of a sum over them: zero on all but one,
    with the same gradient."""
    return x if context.rank == 0 else x - x.detach()


def require_divisible_heads(model: PreTrainedModel, world: World) -> None:
    """Check that each context rank gets the same number of query heads, and of value heads of linear attention.

    Raises:
        ConfigError: it does not; the message has the numbers, the hint the possible degrees.
    """
    context, tensor = world.context_group, world.tensor_group.size
    method: ContextMethod = "ring" if context.pieces > 1 else "ulysses"
    linear = [int(layer.num_v_heads) for layer in find_delta_layers(model)]
    heads = int(model.config.num_attention_heads)
    job_rules.raise_problems(job_rules.find_context_problems(heads, linear, tensor, context.size, method))


def describe_context_parallel(model: PreTrainedModel, world: World) -> str:
    """Return a line about what a rank has of a batch."""
    context, tensor = world.context_group.size, world.tensor_group.size
    if world.context_group.pieces > 1:
        return (
            f"context parallelism: {context} processes share the tokens of a batch; keys and values travel between them"
        )
    config: Any = model.config
    heads, key_heads = int(config.num_attention_heads) // tensor, get_head_sizes(config)[0] // tensor
    return (
        f"context parallelism: {context} processes share the tokens of a batch; in attention each has all tokens of"
        f" {heads // context} of {heads} query heads and {max(1, key_heads // context)} of {key_heads} key heads"
    )
