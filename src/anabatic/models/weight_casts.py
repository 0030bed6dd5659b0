"""Weights of a block under autocast: cast together, joint products of layers with the same input, and no low-precision
copy kept for the backward pass.

Autocast casts each fp32 weight by itself when a product reads it, and the backward pass each gradient. Here two
launches do it for a whole block, in either direction, a block at a time, so that no more than a block's gradients wait
for it. Layers that read the same tensor (q, k and v; gate and up) are one product, whose input is cast and kept once.
The cast weights are dropped after the forward pass and made again in the backward pass.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.device.device import Device
from anabatic.models.lora.adapter import find_blocks
from anabatic.models.lora.grouped import SAME_INPUT_LAYERS

_INSTALLED = "_anabatic_casts_together"
GROUP = "_anabatic_joint_group"
"""Attribute of a layer of a group."""


class _CastTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: _BlockCasts, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.block, ctx.shapes, ctx.dtype = block, [weight.shape for weight in weights], weights[0].dtype
        return _split(block.get_flat(dtype), ctx.shapes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.block.drop_flat()  # the last node of the block
        found = [grad for grad in grads if grad is not None]
        shapes = [shape for shape, grad in zip(ctx.shapes, grads, strict=True) if grad is not None]
        cast = iter(_split(_join(found).to(ctx.dtype), shapes) if found else ())
        return None, None, *(None if grad is None else next(cast) for grad in grads)


def _join(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(flat: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
    pieces = flat.split([shape.numel() for shape in shapes])
    return tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))


class _JointProduct(torch.autograd.Function):
    """`x W^T + b` of a group: x `[T, in]` -> `[T, O]`; W is read from the block's cast weights in either direction.

    The inputs that follow x are the cast weights of each layer, then their biases: they lead the gradients.
    """

    @staticmethod
    def forward(ctx: Any, group: _JointGroup, x: Tensor, *parts: Tensor) -> Tensor:
        weight, bias = group.view_weight(x.dtype)
        ctx.save_for_backward(x)
        ctx.group, ctx.versions = group, group.block.versions
        return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (grad,), group = ctx.saved_tensors, grads, ctx.group
        weight, bias = group.view_unchanged_weight(x.dtype, ctx.versions)
        d_x = grad @ weight if ctx.needs_input_grad[1] else None
        d_weights = (grad.t() @ x).split(group.out_sizes)
        d_biases = () if bias is None else grad.sum(0).split(group.out_sizes)
        return None, d_x, *d_weights, *d_biases


class _GatedProduct(torch.autograd.Function):
    """`activation(u) W^T + b`, keeping u alone: gate and up in one tensor, `[T, 2 in]` -> `[T, out]`. The activation's
    result, half as large, is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, group: _JointGroup, activation: Callable[[Tensor], Tensor], gate_up: Tensor, *parts: Tensor
    ) -> Tensor:
        weight, bias = group.view_weight(gate_up.dtype)
        ctx.save_for_backward(gate_up)
        ctx.group, ctx.activation, ctx.versions = group, activation, group.block.versions
        inner = activation(gate_up)
        return inner @ weight.t() if bias is None else torch.addmm(bias, inner, weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,), (grad,), group = ctx.saved_tensors, grads, ctx.group
        weight, bias = group.view_unchanged_weight(gate_up.dtype, ctx.versions)
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            inner = ctx.activation(leaf)
        (d_gate_up,) = torch.autograd.grad(inner, leaf, grad @ weight)
        d_bias = () if bias is None else (grad.sum(0),)
        return None, None, d_gate_up, grad.t() @ inner.detach(), *d_bias


class _BlockCasts:
    """The trained fp32 weights of one block and, while they are needed, their flat low-precision copy.

    Attributes:
        places: module and name of each parameter, those of a group next to each other.
        is_active: inside a forward pass of the block whose products are joint.
    """

    def __init__(self, places: Sequence[tuple[nn.Module, str]]) -> None:
        self.places = list(places)
        self._is_swapped = self.is_active = False
        self._params: list[Tensor] = []
        self._flat: Tensor | None = None
        self._flat_versions: list[int] = []

    @property
    def versions(self) -> list[int]:
        """Changes of the parameters so far."""
        return [param._version for param in self._params]

    def swap_in(self, dtype: torch.dtype, joint: bool) -> None:
        """Put the cast weights in the place of the parameters; `joint`: use the groups' products."""
        self._params = [module._parameters[name] for module, name in self.places]  # type: ignore[misc]
        cast = _CastTogether.apply(self, dtype, *self._params)  # type: ignore[no-untyped-call]
        for (module, name), narrow in zip(self.places, cast, strict=True):
            module._parameters[name] = narrow
        self._is_swapped = True
        self.is_active = joint

    def swap_out(self) -> None:
        """Put the parameters back."""
        if not self._is_swapped:
            return
        for (module, name), weight in zip(self.places, self._params, strict=True):
            module._parameters[name] = weight  # type: ignore[assignment]
        self._is_swapped = self.is_active = False
        self.drop_flat()

    def get_flat(self, dtype: torch.dtype) -> Tensor:
        """Return all weights in `dtype`, one behind the other."""
        if self._flat is None or self._flat.dtype != dtype or self._flat_versions != self.versions:
            with torch.no_grad():
                self._flat = _join([param.detach() for param in self._params]).to(dtype)
            self._flat_versions = self.versions
        return self._flat

    def drop_flat(self) -> None:
        """Free the copy."""
        self._flat = None


class _JointGroup:
    """Layers of a block that are one product when they are called in turn with the same tensor."""

    def __init__(self, block: _BlockCasts, layers: Sequence[nn.Linear]) -> None:
        self.block, self.layers = block, list(layers)
        self.out_sizes = [layer.out_features for layer in layers]
        self._names = ["weight"] if layers[0].bias is None else ["weight", "bias"]
        before = next(index for index, (module, _) in enumerate(block.places) if module is layers[0])
        self._start = sum(getattr(module, name).numel() for module, name in block.places[:before])
        self._input: Tensor | None = None
        self._remaining: dict[int, Tensor] = {}

    def view_weight(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the cast weights of all layers as one matrix `[O, in]`, and the biases as one vector."""
        flat, rows, columns = self.block.get_flat(dtype), sum(self.out_sizes), self.layers[0].in_features
        end = self._start + rows * columns
        bias = flat[end : end + rows] if len(self._names) == 2 else None
        return flat[self._start : end].view(rows, columns), bias

    def view_unchanged_weight(self, dtype: torch.dtype, versions: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """As `view_weight`, in a backward pass; `versions`: those of the forward pass.

        Raises:
            RuntimeError: a weight was changed since.
        """
        if versions != self.block.versions:
            raise RuntimeError("a weight of the block was changed between the forward and the backward pass")
        return self.view_weight(dtype)

    def compute_all(self, x: Tensor) -> Tensor:
        """Return the concatenated outputs of all layers, `[..., in]` -> `[..., O]`."""
        parts = self._get_parts()
        out: Tensor = _JointProduct.apply(self, x.to(parts[0].dtype).flatten(0, -2), *parts)  # type: ignore[no-untyped-call]
        return out.unflatten(0, x.shape[:-1])

    def compute_gated(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the output of the one layer after `activation(gate_up)`."""
        flat = gate_up.flatten(0, -2)
        out: Tensor = _GatedProduct.apply(self, activation, flat, *self._get_parts())  # type: ignore[no-untyped-call]
        return out.unflatten(0, gate_up.shape[:-1])

    def _get_parts(self) -> list[Tensor]:
        """The cast weights of each layer, then their biases."""
        return [layer._parameters[name] for name in self._names for layer in self.layers]  # type: ignore[misc]

    def compute_output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the output of one layer."""
        if len(self.layers) == 1:
            return self.compute_all(x)
        index = self.layers.index(layer)
        if x is not self._input or index not in self._remaining:
            outputs = self.compute_all(x).split(self.out_sizes, dim=-1)
            self._input, self._remaining = x, dict(enumerate(outputs))
        output = self._remaining.pop(index)
        if not self._remaining:
            self._input = None
        return output

    def forget(self) -> None:
        """Drop outputs that nobody has asked for."""
        self._input, self._remaining = None, {}


def compute_gated_mlp(
    gate: nn.Module, up: nn.Module, down: nn.Module, x: Tensor, activation: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return `down(activation([gate(x), up(x)]))` if gate and up are a group whose block casts its weights, else None.

    Args:
        activation: of gate and up in one tensor, `[..., 2 I]` -> `[..., I]`.
    """
    if torch.compiler.is_compiling():  # blocks that cast their weights are not compiled
        return None
    group, last = gate.__dict__.get(GROUP), down.__dict__.get(GROUP)
    if group is None or last is None or not group.block.is_active:
        return None
    if len(group.layers) != 2 or group.layers[0] is not gate or group.layers[1] is not up:
        return None
    out: Tensor = last.compute_gated(group.compute_all(x), activation)
    return out


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
    layers = _find_groups(block)
    places = [
        (layer, name)
        for group in layers
        for name in ("weight", "bias")
        for layer in group
        if _is_trained_fp32(layer._parameters.get(name))
    ]
    if len(places) < 3 or block.__dict__.get(_INSTALLED):  # two launches join them
        return 0
    block.__dict__[_INSTALLED] = True
    casts = _BlockCasts(places)
    groups = [_JointGroup(casts, group) for group in layers if all(map(_is_plain_linear, group))]
    for group in groups:
        for layer in group.layers:
            layer.__dict__[GROUP] = group
            layer.forward = types.MethodType(_compute_layer, layer)  # type: ignore[method-assign]

    def swap_in(*_: Any) -> None:
        # Hooks stay outside of transformers' checkpoints: what is recomputed is cast layer by layer. A selective one
        # must launch the same operators both times (torch 2.13, torch/utils/checkpoint.py).
        if torch.is_grad_enabled() and torch.is_autocast_enabled(device.type) and not _is_selective(block):
            joint = not getattr(block, "gradient_checkpointing", False)
            casts.swap_in(torch.get_autocast_dtype(device.type), joint)

    def swap_out(*_: Any) -> None:
        casts.swap_out()
        for group in groups:
            group.forget()

    block.register_forward_pre_hook(swap_in)
    block.register_forward_hook(swap_out, always_call=True)
    return len(places)


def _is_selective(block: nn.Module) -> bool:
    """Return whether a block's checkpoint keeps the results of some operators (`enable_activation_checkpointing`)."""
    if not getattr(block, "gradient_checkpointing", False):
        return False
    checkpoint = getattr(block, "_gradient_checkpointing_func", None)
    return "context_fn" in getattr(checkpoint, "keywords", {})


def _find_groups(block: nn.Module) -> list[list[nn.Linear]]:
    """Return the linear layers of a block; those that read the same tensor together."""
    found: list[list[nn.Linear]] = []
    for module in block.modules():
        rest = {name: child for name, child in module._modules.items() if isinstance(child, nn.Linear)}
        for names in SAME_INPUT_LAYERS:
            layers = [rest[name] for name in names if name in rest]
            alike = {(layer.in_features, layer.bias is None) for layer in layers}
            if len(layers) == len(names) and len(alike) == 1 and all(map(_is_plain_linear, layers)):
                found.append([rest.pop(name) for name in names])
        found.extend([layer] for layer in rest.values())
    return found


def _is_trained_fp32(weight: Tensor | None) -> bool:
    return type(weight) is nn.Parameter and weight.requires_grad and weight.dtype == torch.float32


def _is_plain_linear(layer: nn.Linear) -> bool:
    """True for a layer that only multiplies, all of whose parameters are trained in fp32."""
    if (
        type(layer).forward is not nn.Linear.forward
        or "forward" in layer.__dict__
        or set(layer._parameters) - {"weight", "bias"}
    ):
        return False
    return all(weight is None or _is_trained_fp32(weight) for weight in layer._parameters.values())


def _compute_layer(self: nn.Linear, input: Tensor) -> Tensor:
    group: _JointGroup = self.__dict__[GROUP]
    return group.compute_output(self, input) if group.block.is_active else nn.Linear.forward(self, input)
