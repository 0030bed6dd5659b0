"""Adapters with few operators: layers that read the same input are computed together, all adapters are cast at once.

An accelerator fed by a busy host feels every launch. A layer by itself takes two casts and three products forward,
seven more backward, and two casts of gradients. Here the frozen weights of a group (queries, keys and values; gate and
up) lie behind each other in memory and are one product, their `A` another, their `B` a third with zeros between the
blocks; and one copy makes the low-precision adapters of a whole step, another their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anabatic.models.lora.linear import LoraLinear, add_product

_GROUPED_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module that read the same input; that they do is checked whenever they run."""


class _CastFunction(torch.autograd.Function):
    """fp32 parameters -> views of one tensor of another type; gradients come back the same way, times `scale`."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, scale: float, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.scale, ctx.like = scale, [(param.shape, param.numel()) for param in params]
        flat = torch.cat([param.detach().view(-1) for param in params]).to(dtype)
        return _split_like(flat, ctx.like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.reshape(-1) for grad in grads]).float().mul_(ctx.scale)
        return None, None, *_split_like(flat, ctx.like)


def _split_like(flat: Tensor, like: Sequence[tuple[torch.Size, int]]) -> tuple[Tensor, ...]:
    parts = flat.split([numel for _, numel in like])
    return tuple(part.view(shape) for part, (shape, _) in zip(parts, like, strict=True))


def _view_as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensors as one, `[sum of rows, ...]`, if they lie behind each other in one memory; else None."""
    first = tensors[0]
    at = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or tensor.data_ptr() != at or not tensor.is_contiguous():
            return None
        at += tensor.numel() * tensor.element_size()
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _store_contiguously(tensors: Sequence[Tensor]) -> None:
    """Move frozen parameters into one memory."""
    whole = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, whole.split([tensor.shape[0] for tensor in tensors]), strict=True):
        tensor.data = part


class _GroupedProduct(torch.autograd.Function):
    """`x W^T + bias + s (x A^T) B^T` of a group: x `[T, in]`, W `[O, in]`, A `[R, in]`, B `[O, R]` with a block for
    each layer. Gradients are made for each layer's own A and B, without the factor s."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, a: Tensor, b: Tensor, *own: Tensor
    ) -> Tensor:
        down = x @ a.t()
        out = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        out = add_product(out, down, b.t(), scale)
        ctx.save_for_backward(x, weight, a, b, down)
        half = len(own) // 2
        ctx.scale = scale
        ctx.ranks, ctx.outs = [one.shape[0] for one in own[:half]], [one.shape[0] for one in own[half:]]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, a, b, down = ctx.saved_tensors
        (grad,) = grads
        d_down = grad @ b
        d_x = (grad @ weight).addmm_(d_down, a, alpha=ctx.scale) if ctx.needs_input_grad[0] else None
        d_a = (d_down.t() @ x).split(ctx.ranks)
        pieces = zip(grad.split(ctx.outs, dim=1), down.split(ctx.ranks, dim=1), strict=True)
        d_b = [out.t() @ inner for out, inner in pieces]
        return d_x, None, None, None, None, None, *d_a, *d_b


class LoraGroup:
    """Layers that are computed together as long as they are given the same tensor, one after the other."""

    def __init__(self, layers: Sequence[LoraLinear]) -> None:
        self.layers = list(layers)
        self.out_sizes = [layer.out_features for layer in layers]
        self._casts: list[Tensor] = []
        self._versions: list[int] = []
        self._block: Tensor | None = None
        self._input: Tensor | None = None
        self._remaining: dict[int, Tensor] = {}
        if len(layers) > 1:
            _store_contiguously([layer.weight for layer in layers])
            if layers[0].bias is not None:
                _store_contiguously([layer.bias for layer in layers])
        for layer in layers:
            layer.__dict__["group"] = self

    @property
    def params(self) -> list[nn.Parameter]:
        """A of every layer, then B of every layer; sharding may exchange them."""
        return [layer.lora_A for layer in self.layers] + [layer.lora_B for layer in self.layers]

    @torch.no_grad()
    def set_casts(self, casts: Sequence[Tensor]) -> None:
        """Use these low-precision adapters, A of every layer and then B of every layer, while the parameters stay."""
        self._casts, self._versions = list(casts), [param._version for param in self.params]
        self._input, self._remaining = None, {}
        half = len(self.layers)
        if half == 1:
            return
        ranks = [one.shape[0] for one in casts[:half]]
        if self._block is None or self._block.dtype != casts[0].dtype or self._block.device != casts[0].device:
            self._block = casts[0].new_zeros(sum(self.out_sizes), sum(ranks))
        rows = zip(self._block.split(self.out_sizes), casts[half:], range(half), strict=True)
        for row, b, number in rows:
            row.split(ranks, dim=1)[number].copy_(b)

    def compute_output(self, layer: LoraLinear, x: Tensor) -> Tensor | None:
        """The output of one layer; None: the adapters have changed since they were cast, compute it alone."""
        if _is_disabled():
            return None
        number = self.layers.index(layer)
        if x is not self._input or number not in self._remaining:
            out = self.compute_all(x)
            if out is None:
                return None
            if len(self.layers) == 1:
                return out
            self._input, self._remaining = x, dict(enumerate(out.split(self.out_sizes, dim=-1)))
        found = self._remaining.pop(number)
        if not self._remaining:
            self._input = None
        return found

    def compute_all(self, x: Tensor) -> Tensor | None:
        """`[..., in]` -> the outputs of all layers behind each other, `[..., O]`; None as for `compute_output`."""
        weights, half = [layer.weight for layer in self.layers], len(self.layers)
        if not self._casts or [param._version for param in self.params] != self._versions:
            return None
        dtype = self._casts[0].dtype
        weight = _view_as_one(weights)
        a = _view_as_one(self._casts[:half])
        if weight is None or a is None or weight.dtype != dtype or weight.device != x.device:
            return None
        bias = None
        if self.layers[0].bias is not None:
            bias = _view_as_one([layer.bias for layer in self.layers])
            if bias is None:
                return None
        b = self._casts[half].detach() if self._block is None else self._block
        flat = x.to(dtype).flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            out: Tensor = _GroupedProduct.apply(flat, weight, bias, self.layers[0].scale, a, b, *self._casts)  # type: ignore[no-untyped-call]
        return out.unflatten(0, x.shape[:-1])


def _is_disabled() -> bool:
    """Casts are made for training; and where a tensor is in memory cannot be traced by a compiler."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


def compute_joint_output(layers: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """The outputs of `layers` behind each other, if they are a group; else None."""
    if _is_disabled():
        return None
    group = getattr(layers[0], "group", None)
    if not isinstance(group, LoraGroup) or len(group.layers) != len(layers):
        return None
    if any(one is not other for one, other in zip(group.layers, layers, strict=True)):
        return None
    return group.compute_all(x)


class AdapterBank:
    """All adapters of a model in groups. `cast_adapters` once before every forward pass that is trained."""

    def __init__(self, groups: Sequence[LoraGroup]) -> None:
        self.groups = list(groups)
        self.scale = groups[0].layers[0].scale

    def cast_adapters(self) -> None:
        """Make the low-precision adapters of this forward pass."""
        first = self.groups[0].layers[0]
        params = [param for group in self.groups for param in group.params]
        if not all(_is_plain(param) for param in params):  # sharded since they were gathered: each layer by itself
            return
        dtype = first.get_compute_dtype(first.weight.device.type)
        casts = list(_CastFunction.apply(dtype, self.scale, *params))  # type: ignore[no-untyped-call]
        for group in self.groups:
            group.set_casts([casts.pop(0) for _ in group.params])


def group_adapters(model: nn.Module) -> AdapterBank | None:
    """Group a model's adapters; None where there are none, or where one is sharded, dropped out or DoRA."""
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    if not adapted or not all(_is_groupable(layer, adapted[0]) for layer in adapted):
        return None
    groups: list[LoraGroup] = []
    for module in model.modules():
        children = module._modules
        taken: set[str] = set()
        for names in _GROUPED_LAYERS:
            layers = [child for name in names if isinstance(child := children.get(name), LoraLinear)]
            if len(layers) == len(names) and _is_alike(layers):
                groups.append(LoraGroup(layers))
                taken.update(names)
        alone = [child for name, child in children.items() if isinstance(child, LoraLinear) and name not in taken]
        groups.extend(LoraGroup([layer]) for layer in alone)
    return AdapterBank(groups)


def _is_groupable(layer: LoraLinear, first: LoraLinear) -> bool:
    plain = _is_plain(layer.lora_A) and _is_plain(layer.lora_B) and layer.quantized is None
    trained = layer.lora_A.requires_grad and layer.lora_B.requires_grad and not layer.weight.requires_grad
    same = layer.scale == first.scale and layer.weight.dtype == first.weight.dtype
    return plain and trained and same and not layer.dropout and layer.lora_magnitude is None


def _is_plain(param: Tensor) -> bool:
    return type(param) is nn.Parameter and param.dtype == torch.float32


def _is_alike(layers: Sequence[LoraLinear]) -> bool:
    biased = {layer.bias is not None for layer in layers}
    return len(biased) == 1 and len({layer.in_features for layer in layers}) == 1
