"""Apply tensor parallelism to a model: attention is sharded by heads, gated blocks by inner neurons.

They are matched by their structure: separate projections of queries, keys, values and the output; gate, up and down.
Layers of the gated delta rule are sharded by key heads, each with its value heads (`delta_heads.py`).
Every other part (embeddings, norms, head, experts, blocks with other layers) is replicated on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count
from anabatic.models.fused_ops import GATED_LAYER_NAMES
from anabatic.models.kv_cache import get_head_sizes
from anabatic.models.linear_attention import delta_heads, delta_net
from anabatic.models.lora.linear import LoraLinear
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import is_sharded_along
from anabatic.parallel.tensor_linear import (
    SHARD_INPUTS,
    SHARD_OUTPUTS,
    ShardedLinear,
    copy_to_parallel_region,
    shard_parameter,
)
from anabatic.parallel.world import World
from anabatic.plan import job_rules

_ATTENTION_NAMES = (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "k_proj", "v_proj", "dense"))
"""Names of the query, key, value and output projections."""
_SHARDED_DIMS = {
    SHARD_OUTPUTS: {"weight": 0, "bias": 0, "lora_B": 0, "lora_magnitude": 0},
    SHARD_INPUTS: {"weight": 1, "lora_A": 1},
}
"""Sharding by outputs or inputs -> sharded dimension of each parameter."""


@dataclass(frozen=True)
class TensorBlock:
    """Layers that are sharded together: all but the last by their outputs, the last by its inputs."""

    module: nn.Module
    names: Sequence[str]


def _is_block(module: nn.Module, names: Sequence[str]) -> bool:
    return all(type(module._modules.get(name)) in (nn.Linear, LoraLinear, ShardedLinear) for name in names)


def _own_params(block: TensorBlock) -> dict[str, Tensor]:
    """Return the parameters of a block outside its sharded layers."""
    return {name: param for name, param in block.module.named_parameters() if name.split(".")[0] not in block.names}


def find_attention_blocks(model: PreTrainedModel) -> list[TensorBlock]:
    """Return the attention block of every layer.

    Raises:
        ConfigError: a layer's attention has another structure.
    """
    heads, key_size, value_size = get_head_sizes(model.config)
    linear = len(delta_net.find_delta_layers(model))
    # Attention beside the delta rule has a gate of each head behind the head's query.
    query_size = 2 * key_size if linear else key_size
    expected = (model.config.num_attention_heads * query_size, heads * key_size, heads * value_size)
    blocks = []
    for module in model.modules():
        names = next((names for names in _ATTENTION_NAMES if _is_block(module, names)), None)
        if names is None:
            continue
        block = TensorBlock(module, names)
        sizes = tuple(int(module.get_submodule(name).out_features) for name in names[:3])  # type: ignore[arg-type]
        unexpected = [name for name, param in _own_params(block).items() if param.shape != (key_size,)]
        if sizes != expected or unexpected:
            problem = f"weights that are not a head's: {', '.join(unexpected)}" if unexpected else f"outputs {sizes}"
            raise _unsupported_error(model, f"{type(module).__name__} has {problem}")
        blocks.append(block)
    layers = model.config.num_hidden_layers - linear
    if len(blocks) != layers:
        raise _unsupported_error(
            model, f"{len(blocks)} of {layers} layers have separate projections of queries, keys, values and output"
        )
    return blocks


def _unsupported_error(model: PreTrainedModel, problem: str) -> ConfigError:
    return ConfigError(
        f"parallel.tensor cannot divide {type(model).__name__}: {problem}",
        f"leave parallel.tensor at 1; {job_rules.ZERO3_HINT}",
    )


def find_delta_blocks(model: PreTrainedModel) -> list[TensorBlock]:
    """Return the layers of the gated delta rule.

    Raises:
        ConfigError: one of their projections is of another kind.
    """
    layers = delta_net.find_delta_layers(model)
    blocks = [TensorBlock(module, delta_net.list_projections(module)) for module in layers]
    for block in blocks:
        if not _is_block(block.module, block.names):
            raise _unsupported_error(model, f"{type(block.module).__name__} has projections of another kind")
    return blocks


def find_gated_blocks(model: nn.Module) -> list[TensorBlock]:
    """Return the gated blocks without further weights."""
    blocks = [
        TensorBlock(module, names)
        for module in model.modules()
        for names in GATED_LAYER_NAMES
        if _is_block(module, names)
    ]
    return [block for block in blocks if not _own_params(block)]


def require_divisible(model: PreTrainedModel, degree: int) -> None:
    """Check that the model's heads and inner neurons are divisible by `degree`.

    Raises:
        ConfigError: they are not; the message has the numbers, the hint the possible degrees.
    """
    if degree == 1:
        return
    find_attention_blocks(model)
    counts = {
        "attention heads": [int(model.config.num_attention_heads)],
        "key/value heads": [get_head_sizes(model.config)[0]],
        "key heads of linear attention": [int(block.module.num_k_heads) for block in find_delta_blocks(model)],  # type: ignore[arg-type]
        "inner neurons of MLPs": [_inner_size(block) for block in find_gated_blocks(model)],
    }
    job_rules.raise_problems(job_rules.find_tensor_problems(counts, degree))


def _inner_size(block: TensorBlock) -> int:
    return int(block.module.get_submodule(block.names[0]).out_features)  # type: ignore[arg-type]


def apply_tensor_parallel(model: PreTrainedModel, world: World) -> frozenset[str]:
    """Shard a model whose parameters are on the meta device, and replace its layers by sharded ones.

    Returns:
        Names of replicated parameters with partial gradients on each rank (`reduce_tensor_gradients`).
    """
    if world.tensor_group.size == 1:
        return frozenset()
    require_divisible(model, world.tensor_group.size)
    partial: set[int] = set()
    delta_blocks = find_delta_blocks(model)
    for block in delta_blocks:
        delta_heads.divide_heads(block.module, world.tensor_group)
    for block in [*find_attention_blocks(model), *delta_blocks, *find_gated_blocks(model)]:
        if next(block.module.parameters(), None) is None:  # of another stage of a pipeline
            continue
        for name, layer in _iter_layers(block):
            sharded_dim = SHARD_INPUTS if name == block.names[-1] else SHARD_OUTPUTS
            sharded = layer if isinstance(layer, LoraLinear) else ShardedLinear(layer)
            sharded.input_group = world.tensor_group if sharded_dim == SHARD_INPUTS else None
            setattr(block.module, name, sharded)
            for parameter, dim in _SHARDED_DIMS[sharded_dim].items():
                if parameter in sharded._parameters:
                    shard_parameter(sharded, parameter, dim, _tensor_mesh(world))
        block.module.register_forward_pre_hook(_make_entry_hook(world.tensor_group), with_kwargs=True)
        partial |= {
            id(parameter) for parameter in block.module.parameters() if not is_sharded_along(parameter, "tensor")
        }
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in partial)


def _iter_layers(block: TensorBlock) -> Iterator[tuple[str, Any]]:
    for name in block.names:
        yield name, block.module.get_submodule(name)


def _tensor_mesh(world: World) -> Any:
    assert world.mesh is not None
    return world.mesh.get_submesh(("tensor",))


def _make_entry_hook(group: RankGroup) -> Callable[..., Any]:
    """Return a forward pre-hook: hooks stay when fused operators replace the module's forward."""

    def enter_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (copy_to_parallel_region(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_parallel_region(kwargs["hidden_states"], group)}

    return enter_block


def describe_tensor_parallel(model: PreTrainedModel, degree: int) -> str:
    """Return a line about the sharded blocks and the replicated parameters."""
    replicated_params = [parameter for parameter in model.parameters() if not is_sharded_along(parameter, "tensor")]
    replicated, total = (
        sum(parameter.numel() for parameter in parameters) for parameters in (replicated_params, model.parameters())
    )
    attention = len(find_attention_blocks(model)) + len(find_delta_blocks(model))
    return (
        f"tensor parallelism: {degree} processes share {attention} attention blocks"
        f" and {len(find_gated_blocks(model))} MLPs; {format_count(replicated)} of {format_count(total)} parameters "
        f"are whole on each"
    )
