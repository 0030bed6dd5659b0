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
from anabatic.core.text import count
from anabatic.models.cache import head_sizes
from anabatic.models.fuse import GATED
from anabatic.models.lora import LoraLinear
from anabatic.parallel.sharded import divided_by
from anabatic.parallel.tensor import INPUTS, OUTPUTS, PartLinear, divide, enter
from anabatic.parallel.world import Group, World

_ATTENTION = (("q_proj", "k_proj", "v_proj", "o_proj"), ("q_proj", "k_proj", "v_proj", "dense"))
"""Names of queries, keys, values and output."""
_DIVIDED = {
    OUTPUTS: {"weight": 0, "bias": 0, "lora_B": 0, "lora_magnitude": 0},
    INPUTS: {"weight": 1, "lora_A": 1},
}
"""What of a layer is divided by its outputs or inputs -> dimension of each parameter that is divided with it."""


@dataclass(frozen=True)
class Block:
    """Layers that are divided together: all but the last by their outputs, the last by its inputs."""

    module: nn.Module
    names: Sequence[str]


def _is_block(module: nn.Module, names: Sequence[str]) -> bool:
    return all(type(module._modules.get(name)) in (nn.Linear, LoraLinear, PartLinear) for name in names)


def _own(block: Block) -> dict[str, Tensor]:
    """Parameters of a block that belong to none of its divided layers."""
    return {name: param for name, param in block.module.named_parameters() if name.split(".")[0] not in block.names}


def attention_blocks(model: PreTrainedModel) -> list[Block]:
    """The attention of every layer.

    Raises:
        ConfigError: a layer's attention is built in another way.
    """
    heads, wide, narrow = head_sizes(model.config)
    expected = (model.config.num_attention_heads * wide, heads * wide, heads * narrow)
    found = []
    for module in model.modules():
        names = next((names for names in _ATTENTION if _is_block(module, names)), None)
        if names is None:
            continue
        block = Block(module, names)
        sizes = tuple(int(module.get_submodule(name).out_features) for name in names[:3])  # type: ignore[arg-type]
        strange = [name for name, param in _own(block).items() if param.shape != (wide,)]
        if sizes != expected or strange:
            what = f"weights that are not a head's: {', '.join(strange)}" if strange else f"outputs {sizes}"
            raise _unknown(model, f"{type(module).__name__} has {what}")
        found.append(block)
    layers = model.config.num_hidden_layers
    if len(found) != layers:
        raise _unknown(
            model, f"{len(found)} of {layers} layers have separate projections of queries, keys, values and output"
        )
    return found


def _unknown(model: PreTrainedModel, what: str) -> ConfigError:
    return ConfigError(
        f"parallel.tensor cannot divide {type(model).__name__}: {what}",
        "leave parallel.tensor at 1; --parallel.strategy zero3 divides every model",
    )


def gated_blocks(model: nn.Module) -> list[Block]:
    """Gated blocks without weights of their own."""
    blocks = [Block(module, names) for module in model.modules() for names in GATED if _is_block(module, names)]
    return [block for block in blocks if not _own(block)]


def require_divisible(model: PreTrainedModel, parts: int) -> None:
    """Make sure that `parts` ranks can share the model's heads and inner neurons.

    Raises:
        ConfigError: they cannot; the message has the numbers, the hint the degrees that can.
    """
    if parts == 1:
        return
    attention_blocks(model)
    inner = sorted({_inner(block) for block in gated_blocks(model)})
    counts = {"attention heads": [model.config.num_attention_heads], "key/value heads": [head_sizes(model.config)[0]]}
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


def _inner(block: Block) -> int:
    return int(block.module.get_submodule(block.names[0]).out_features)  # type: ignore[arg-type]


def apply(model: PreTrainedModel, world: World) -> frozenset[str]:
    """Divide a model whose parameters are on the meta device, and make its layers compute their parts.

    Returns:
        Names of parameters that are whole on every rank and get a part of their gradient on each (`gradients.py`).
    """
    if world.tensor.size == 1:
        return frozenset()
    require_divisible(model, world.tensor.size)
    partial: set[int] = set()
    for block in [*attention_blocks(model), *gated_blocks(model)]:
        for name, layer in _layers(block):
            by = INPUTS if name == block.names[-1] else OUTPUTS
            part = layer if isinstance(layer, LoraLinear) else PartLinear(layer)
            part.by_inputs = world.tensor if by == INPUTS else None
            setattr(block.module, name, part)
            for parameter, dim in _DIVIDED[by].items():
                if parameter in part._parameters:
                    divide(part, parameter, dim, _mesh(world))
        block.module.register_forward_pre_hook(_entering(world.tensor), with_kwargs=True)
        partial |= {id(parameter) for parameter in block.module.parameters() if not divided_by(parameter, "tensor")}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in partial)


def _layers(block: Block) -> Iterator[tuple[str, Any]]:
    for name in block.names:
        yield name, block.module.get_submodule(name)


def _mesh(world: World) -> Any:
    assert world.mesh is not None
    return world.mesh["tensor"]


def _entering(group: Group) -> Callable[..., Any]:
    """Hooks outlive an exchange of the module's forward pass, which the fused operators are."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (enter(args[0], group), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], group)}

    return hook


def summary(model: PreTrainedModel, parts: int) -> str:
    """Return a line that tells what `parts` ranks share and what each of them holds whole."""
    params = [parameter for parameter in model.parameters() if not divided_by(parameter, "tensor")]
    alone, everything = (sum(parameter.numel() for parameter in some) for some in (params, model.parameters()))
    return (
        f"tensor parallelism: {parts} processes share {len(attention_blocks(model))} attention blocks"
        f" and {len(gated_blocks(model))} MLPs; {count(alone)} of {count(everything)} parameters are whole on each"
    )
