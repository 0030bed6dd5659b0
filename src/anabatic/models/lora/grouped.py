"""Adapters with few kernel launches: layers with the same input are computed in groups, all adapters are cast at once.

On a busy host every launch costs time. A single layer needs two casts and three products forward, seven more backward,
and two casts of gradients. Here the frozen weights of a group (queries, keys and values; gate and up) are contiguous in
memory and one product, their `A` another, their `B` a third with zeros between the blocks; one copy casts all adapters
of a step, another their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from anabatic.models.lora.linear import LoraLinear, add_product

SAME_INPUT_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one module with the same input, which is checked whenever they run."""


class _CastFunction(torch.autograd.Function):
    """fp32 parameters -> views of one tensor of another dtype; gradients are cast back likewise, times `scale`."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, scale: float, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.scale, ctx.like = scale, [(param.shape, param.numel()) for param in params]
        flat = torch.cat([param.detach().view(-1) for param in params]).to(dtype)
        return _split_like(flat, ctx.like)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        flat = torch.cat([grad.reshape(-1) for grad in grads]).float().mul_(ctx.scale)
        return None, None, *_split_like(flat, ctx.like)


def _split_like(flat: Tensor, shapes: Sequence[tuple[torch.Size, int]]) -> tuple[Tensor, ...]:
    parts = flat.split([numel for _, numel in shapes])
    return tuple(part.view(shape) for part, (shape, _) in zip(parts, shapes, strict=True))


def _view_as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a view of all tensors, `[sum of rows, ...]`, if they are contiguous in one storage; else None."""
    first = tensors[0]
    next_address = first.data_ptr()
    for tensor in tensors:
        same_storage = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or tensor.data_ptr() != next_address or not tensor.is_contiguous():
            return None
        next_address += tensor.numel() * tensor.element_size()
    shape = (sum(tensor.shape[0] for tensor in tensors), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride(), first.storage_offset())


def _store_contiguously(tensors: Sequence[Tensor]) -> None:
    """Move frozen parameters into one storage."""
    joined = torch.cat([tensor.detach() for tensor in tensors])
    for tensor, part in zip(tensors, joined.split([tensor.shape[0] for tensor in tensors]), strict=True):
        tensor.data = part


class _GroupedProduct(torch.autograd.Function):
    """`x W^T + bias + s (x A^T) B^T` of a group: x `[T, in]`, W `[O, in]`, A `[R, in]`, B `[O, R]` with a block for
    each layer. Gradients are computed for each layer's A and B, without the factor s."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, a: Tensor, b: Tensor, *adapters: Tensor
    ) -> Tensor:
        down = x @ a.t()
        out = x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())
        out = add_product(out, down, b.t(), scale)
        ctx.save_for_backward(x, weight, a, b, down)
        half = len(adapters) // 2
        ctx.scale = scale
        ctx.ranks, ctx.outs = (
            [adapter.shape[0] for adapter in adapters[:half]],
            [adapter.shape[0] for adapter in adapters[half:]],
        )
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, a, b, down = ctx.saved_tensors
        (grad,) = grads
        d_down = grad @ b
        d_x = (grad @ weight).addmm_(d_down, a, alpha=ctx.scale) if ctx.needs_input_grad[0] else None
        d_a = (d_down.t() @ x).split(ctx.ranks)
        blocks = zip(grad.split(ctx.outs, dim=1), down.split(ctx.ranks, dim=1), strict=True)
        d_b = [grad_block.t() @ down_block for grad_block, down_block in blocks]
        return d_x, None, None, None, None, None, *d_a, *d_b


class LoraGroup:
    """Layers that are computed together when they are called in turn with the same tensor."""

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
        """Return A of every layer, then B of every layer; sharding may replace them."""
        return [layer.lora_A for layer in self.layers] + [layer.lora_B for layer in self.layers]

    @torch.no_grad()
    def set_casts(self, casts: Sequence[Tensor]) -> None:
        """Use these low-precision adapters, A of every layer, then B of every layer, until the parameters change."""
        self._casts, self._versions = list(casts), [param._version for param in self.params]
        self._input, self._remaining = None, {}
        half = len(self.layers)
        if half == 1:
            return
        ranks = [cast.shape[0] for cast in casts[:half]]
        if self._block is None or self._block.dtype != casts[0].dtype or self._block.device != casts[0].device:
            self._block = casts[0].new_zeros(sum(self.out_sizes), sum(ranks))
        # `.data` keeps the version: backward passes of a pipeline's other micro-batches still read these same values.
        # Versions cannot tell whether to copy: an optimizer that updates a joint buffer does not count them up.
        rows = zip(self._block.data.split(self.out_sizes), casts[half:], range(half), strict=True)
        for row, b, index in rows:
            row.split(ranks, dim=1)[index].copy_(b)

    def compute_output(self, layer: LoraLinear, x: Tensor) -> Tensor | None:
        """Return the output of one layer; None if the adapters have changed since the cast: compute it separately."""
        if _is_disabled():
            return None
        index = self.layers.index(layer)
        if x is not self._input or index not in self._remaining:
            out = self.compute_all(x)
            if out is None:
                return None
            if len(self.layers) == 1:
                return out
            self._input, self._remaining = x, dict(enumerate(out.split(self.out_sizes, dim=-1)))
        output = self._remaining.pop(index)
        if not self._remaining:
            self._input = None
        return output

    def compute_all(self, x: Tensor) -> Tensor | None:
        """Return the concatenated outputs of all layers, `[..., in]` -> `[..., O]`; None as in `compute_output`."""
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
    """True outside of training, where adapters are not cast, and in a compiler, which cannot trace data pointers."""
    return torch.compiler.is_compiling() or not torch.is_grad_enabled()


def compute_joint_output(layers: Sequence[nn.Module], x: Tensor) -> Tensor | None:
    """Return the concatenated outputs of `layers` if they are a group, else None."""
    if _is_disabled():
        return None
    group = getattr(layers[0], "group", None)
    if not isinstance(group, LoraGroup) or len(group.layers) != len(layers):
        return None
    if any(expected is not layer for expected, layer in zip(group.layers, layers, strict=True)):
        return None
    return group.compute_all(x)


class AdapterBank:
    """All adapters of a model in groups. Call `cast_adapters` before every training forward pass."""

    def __init__(self, groups: Sequence[LoraGroup]) -> None:
        self.groups = list(groups)
        self.scale = groups[0].layers[0].scale
        self._groups_by_block: dict[nn.Module, list[LoraGroup]] = {}

    def cast_adapters(self, blocks: Sequence[nn.Module] | None = None) -> None:
        """Cast the adapters for this forward pass.

        Args:
            blocks: those that it computes; None: all.
        """
        groups = self.groups if blocks is None else [group for block in blocks for group in self._find_groups(block)]
        if not groups:
            return
        first = groups[0].layers[0]
        params = [param for group in groups for param in group.params]
        if not all(_is_plain(param) for param in params):  # sharded after grouping: compute each layer separately
            return
        dtype = first.get_compute_dtype(first.weight.device.type)
        casts = list(_CastFunction.apply(dtype, self.scale, *params))  # type: ignore[no-untyped-call]
        for group in groups:
            group.set_casts([casts.pop(0) for _ in group.params])

    def _find_groups(self, block: nn.Module) -> list[LoraGroup]:
        found = self._groups_by_block.get(block)
        if found is None:
            inside = set(block.modules())
            found = self._groups_by_block[block] = [group for group in self.groups if group.layers[0] in inside]
        return found


def group_adapters(model: nn.Module) -> AdapterBank | None:
    """Group a model's adapters; None if there are none, or one is sharded or has dropout or DoRA."""
    adapted = [module for module in model.modules() if _is_adapted(module)]
    if not adapted or not all(_is_groupable(layer, adapted[0]) for layer in adapted):
        return None
    groups: list[LoraGroup] = []
    for module in model.modules():
        children = module._modules
        grouped_names: set[str] = set()
        for names in SAME_INPUT_LAYERS:
            layers = [child for name in names if _is_adapted(child := children.get(name))]
            if len(layers) == len(names) and _is_alike(layers):
                groups.append(LoraGroup(layers))
                grouped_names.update(names)
        single_layers = [child for name, child in children.items() if _is_adapted(child) and name not in grouped_names]
        groups.extend(LoraGroup([layer]) for layer in single_layers)
    return AdapterBank(groups)


def _is_adapted(module: nn.Module | None) -> TypeGuard[LoraLinear]:
    """True for an adapter that is here, not on another stage of a pipeline."""
    return isinstance(module, LoraLinear) and "lora_A" in module._parameters


def _is_groupable(layer: LoraLinear, first: LoraLinear) -> bool:
    plain = _is_plain(layer.lora_A) and _is_plain(layer.lora_B) and layer.quantized is None
    trained = layer.lora_A.requires_grad and layer.lora_B.requires_grad and not layer.weight.requires_grad
    matches_first = layer.scale == first.scale and layer.weight.dtype == first.weight.dtype
    return plain and trained and matches_first and not layer.dropout and layer.lora_magnitude is None


def _is_plain(param: Tensor) -> bool:
    return type(param) is nn.Parameter and param.dtype == torch.float32


def _is_alike(layers: Sequence[LoraLinear]) -> bool:
    bias_flags = {layer.bias is not None for layer in layers}
    return len(bias_flags) == 1 and len({layer.in_features for layer in layers}) == 1
