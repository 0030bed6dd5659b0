"""Casts a block's weights for autocast together: two launches in place of one for each weight, in either direction.

Autocast casts each fp32 weight by itself when a product reads it, and the backward pass each gradient. The numbers are
the same here; what is joined is the launch. A block at a time, so that no more than a block's gradients wait for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.device.device import Device
from anabatic.models.lora.adapter import find_blocks

_INSTALLED = "_anabatic_casts_together"


class _CastTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shapes, ctx.dtype = [weight.shape for weight in weights], weights[0].dtype
        return _split_cast(list(weights), dtype, ctx.shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [grad for grad in grads if grad is not None]
        shapes = [shape for shape, grad in zip(ctx.shapes, grads, strict=True) if grad is not None]
        cast = iter(_split_cast(found, ctx.dtype, shapes))
        return None, *(None if grad is None else next(cast) for grad in grads)


def _split_cast(tensors: list[Tensor], dtype: torch.dtype, shapes: list[torch.Size]) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(dtype)
    pieces = flat.split([shape.numel() for shape in shapes])
    return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


def install_block_casts(model: PreTrainedModel, device: Device) -> int:
    """Make every block cast its linear layers' trained fp32 weights together; return the number of weights.

    Only for plain tensors: FSDP2 casts what it gathers by itself, and layers divided among ranks read local parts.
    """
    if device.dtype == torch.float32 or not device.device_row.cast_weights_together:
        return 0
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        return 0  # a compiled block has its casts inside
    return sum(_install_in_block(model.get_submodule(name), device) for name in find_blocks(model))


def _install_in_block(block: nn.Module, device: Device) -> int:
    places = [
        (module, name)
        for module in block.modules()
        if isinstance(module, nn.Linear)
        for name, weight in ((name, module._parameters.get(name)) for name in ("weight", "bias"))  # no adapters
        if type(weight) is nn.Parameter and weight.requires_grad and weight.dtype == torch.float32
    ]
    if len(places) < 3 or block.__dict__.get(_INSTALLED):  # two launches join them
        return 0
    block.__dict__[_INSTALLED] = True

    kept: list[Tensor | None] = []

    def swap(*_: Any) -> None:
        if not torch.is_grad_enabled() or not torch.is_autocast_enabled(device.type):
            return
        kept[:] = [module._parameters[name] for module, name in places]
        cast = _CastTogether.apply(torch.get_autocast_dtype(device.type), *kept)  # type: ignore[no-untyped-call]
        for (module, name), narrow in zip(places, cast, strict=True):
            module._parameters[name] = narrow

    def restore(*_: Any) -> None:
        for (module, name), weight in zip(places, kept, strict=False):
            module._parameters[name] = weight  # type: ignore[assignment]
        kept.clear()

    block.register_forward_pre_hook(swap)
    block.register_forward_hook(restore, always_call=True)
    return len(places)
