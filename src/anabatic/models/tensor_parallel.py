"""Which layers of a model tensor parallelism divides: attention by heads, gated blocks by inner neurons.

They are recognised by their structure: separate projections of queries, keys, values and the output; gate, up and down.
Whatever else a model has (embeddings, norms, head, experts, blocks with other layers) every rank holds whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_count
from anabatic.models.fused.installer import GATED_LAYER_NAMES
from anabatic.models.kv_cache import get_head_sizes
from anabatic.models.lora.linear import LoraLinear
from anabatic.parallel.dtensors import is_sharded_along
from anabatic.parallel.process_groups import RankGroup, World
from anabatic.parallel.tensor_linear import (
    SHARD_INPUTS,
    SHARD_OUTPUTS,
    ShardedLinear,
    copy_to_parallel_region,
    shard_parameter,
)

_ATTENTION_NAMES = (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "k_proj", "v_proj", "dense"))
"""Names of queries, keys, values and output."""
_SHARDED_DIMS = {
    SHARD_OUTPUTS: {"weight": 0, "bias": 0, "lora_B": 0, "lora_magnitude": 0},
    SHARD_INPUTS: {"weight": 1, "lora_A": 1},
}
"""What of a layer is divided by its outputs or inputs -> dimension of each parameter that is divided with it."""


@dataclass(frozen=True)
class TensorBlock:
    """Layers that are divided together: all but the last by their outputs, the last by its inputs."""

    module: nn.Module
    names: Sequence[str]


def _is_block(module: nn.Module, names: Sequence[str]) -> bool:
    return all(type(module._modules.get(name)) in (nn.Linear, LoraLinear, ShardedLinear) for name in names)


def _own_params(block: TensorBlock) -> dict[str, Tensor]:
    """Parameters of a block that belong to none of its divided layers."""
    return {name: param for name, param in block.module.named_parameters() if name.split(".")[0] not in block.names}


def find_attention_blocks(model: PreTrainedModel) -> list[TensorBlock]:
    """The attention of every layer.

    Raises:
        ConfigError: a layer's attention is built in another way.
    """
    heads, wide, narrow = get_head_sizes(model.config)
    expected = (model.config.num_attention_heads * wide, heads * wide, heads * narrow)
    found = []
    for module in model.modules():
        names = next((names for names in _ATTENTION_NAMES if _is_block(module, names)), None)
        if names is None:
            continue
        block = TensorBlock(module, names)
        sizes = tuple(int(module.get_submodule(name).out_features) for name in names[:3])  # type: ignore[arg-type]
        strange = [name for name, param in _own_params(block).items() if param.shape != (wide,)]
        if sizes != expected or strange:
            what = f"weights that are not a head's: {', '.join(strange)}" if strange else f"outputs {sizes}"
            raise _unsupported_error(model, f"{type(module).__name__} has {what}")
        found.append(block)
    layers = model.config.num_hidden_layers
    if len(found) != layers:
        raise _unsupported_error(
            model, f"{len(found)} of {layers} layers have separate projections of queries, keys, values and output"
        )
    return found


def _unsupported_error(model: PreTrainedModel, what: str) -> ConfigError:
    return ConfigError(
        f"parallel.tensor cannot divide {type(model).__name__}: {what}",
        "leave parallel.tensor at 1; --parallel.strategy zero3 divides every model",
    )


def find_gated_blocks(model: nn.Module) -> list[TensorBlock]:
    """Gated blocks without weights of their own."""
    blocks = [
        TensorBlock(module, names)
        for module in model.modules()
        for names in GATED_LAYER_NAMES
        if _is_block(module, names)
    ]
    return [block for block in blocks if not _own_params(block)]


def require_divisible(model: PreTrainedModel, parts: int) -> None:
    """Make sure that `parts` ranks can share the model's heads and inner neurons.

    Raises:
        ConfigError: they cannot; the message has the numbers, the hint the degrees that can.
    """
    if parts == 1:
        return
    find_attention_blocks(model)
    inner = sorted({_inner_size(block) for block in find_gated_blocks(model)})
    counts = {
        "attention heads": [model.config.num_attention_heads],
        "key/value heads": [get_head_sizes(model.config)[0]],
    }
    counts["inner neurons of MLPs"] = inner
    sizes = [size for found in counts.values() for size in found]
    if any(size % parts for size in sizes):
        told = ", ".join(f"{' and '.join(map(str, found))} {name}" for name, found in counts.items() if found)
        most = math.gcd(*sizes)
        good = [str(degree) for degree in range(1, most + 1) if most % degree == 0]
        raise ConfigError(
            f"parallel.tensor is {parts}, which does not divide all of the model's {told}",
            f"use {' or '.join(good)}" if most > 1 else "leave it at 1; --parallel.strategy zero3 divides every model",
        )


def _inner_size(block: TensorBlock) -> int:
    return int(block.module.get_submodule(block.names[0]).out_features)  # type: ignore[arg-type]


def apply_tensor_parallel(model: PreTrainedModel, world: World) -> frozenset[str]:
    """Divide a model whose parameters are on the meta device, and make its layers compute their parts.

    Returns:
        Names of parameters that are whole on every rank and get a part of their gradient on each (`gradients.py`).
    """
    if world.tensor_group.size == 1:
        return frozenset()
    require_divisible(model, world.tensor_group.size)
    partial: set[int] = set()
    for block in [*find_attention_blocks(model), *find_gated_blocks(model)]:
        for name, layer in _iter_layers(block):
            by = SHARD_INPUTS if name == block.names[-1] else SHARD_OUTPUTS
            part = layer if isinstance(layer, LoraLinear) else ShardedLinear(layer)
            part.input_group = world.tensor_group if by == SHARD_INPUTS else None
            setattr(block.module, name, part)
            for parameter, dim in _SHARDED_DIMS[by].items():
                if parameter in part._parameters:
                    shard_parameter(part, parameter, dim, _tensor_mesh(world))
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
    return world.mesh["tensor"]


def _make_entry_hook(group: RankGroup) -> Callable[..., Any]:
    """Hooks outlive an exchange of the module's forward pass, which the fused operators are."""

    def enter_block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (copy_to_parallel_region(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": copy_to_parallel_region(kwargs["hidden_states"], group)}

    return enter_block


def describe_tensor_parallel(model: PreTrainedModel, parts: int) -> str:
    """Return a line that tells what `parts` ranks share and what each of them holds whole."""
    params = [parameter for parameter in model.parameters() if not is_sharded_along(parameter, "tensor")]
    alone, everything = (sum(parameter.numel() for parameter in some) for some in (params, model.parameters()))
    return (
        f"tensor parallelism: {parts} processes share {len(find_attention_blocks(model))} attention blocks"
        f" and {len(find_gated_blocks(model))} MLPs; {format_count(alone)} of {format_count(everything)} parameters "
        f"are whole on each"
    )
