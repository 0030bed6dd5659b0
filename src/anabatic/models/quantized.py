"""Frozen weights in 8 or 4 bits (QLoRA, arXiv 2305.14314), in plain operators that every device has.

`int8`: each row of a weight has a scale, its largest value / 127 (arXiv 2208.07339, section 2). `nf4`: each block of 64
values has a scale, its largest value, and each value is the nearest of 16 levels that halve a normal distribution
evenly (QLoRA, appendix E); two values share a byte, the first the upper half, as bitsandbytes lays them. Scales are
fp32: 8 bits and a little, or 4.5 bits a weight. What is packed is read again for every product: one layer is wide at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

QuantizationKind = Literal["int8", "nf4"]

NF4_BLOCK_SIZE = 64
"""Values that share a scale in `nf4`."""
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Of `nf4`; arXiv 2305.14314, appendix E."""
_CHUNK_VALUES = 1 << 22
"""Values that are packed at a time: what that needs beside the weight stays small."""


class ScratchMemory:
    """Memory that the weights of a model take turns in: fresh memory for each would leave holes between the results of
    the layers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def get_buffer(self, like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return `[size]` of a type, on the device of `like`; what was in the same type before is lost."""
        kept = self._kept.get((dtype, like.device))
        if kept is None or len(kept) < size:
            kept = self._kept[dtype, like.device] = torch.empty(size, dtype=dtype, device=like.device)
        return kept[:size]


class QuantizedWeight(nn.Module):
    """A weight `[out, in]` in few bits; empty until `quantize_weight`.

    The buffers are no part of the model's state: a checkpoint holds what is trained.
    """

    codes: Tensor
    scales: Tensor
    pairs: Tensor

    def __init__(self, shape: torch.Size, kind: QuantizationKind, scratch: ScratchMemory) -> None:
        super().__init__()
        self.shape, self.kind, self.scratch = shape, kind, scratch
        self.register_buffer("codes", torch.empty(0, dtype=torch.int8 if kind == "int8" else torch.uint8), False)
        self.register_buffer("scales", torch.empty(0), False)
        self.register_buffer("pairs", _make_level_pairs() if kind == "nf4" else None, False)

    @torch.no_grad()
    def quantize_weight(self, weight: Tensor) -> None:
        """Pack a weight, on the device where this module is."""
        pack = _quantize_int8 if self.kind == "int8" else _quantize_nf4
        rows = max(1, _CHUNK_VALUES // self.shape[1])
        if self.kind == "nf4" and self.shape[1] % NF4_BLOCK_SIZE:  # blocks go on over the ends of rows
            rows = self.shape[0]
        parts = [pack(part.to(self.codes.device, torch.float32)) for part in weight.split(rows)]
        self.codes, self.scales = (torch.cat(each) for each in zip(*parts, strict=True))

    @torch.no_grad()
    def dequantize_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight, `[out, in]`, until the next one is read; products with scales are made in fp32."""
        size = self.shape.numel()
        if self.kind == "int8":
            out = self.scratch.get_buffer(self.codes, size, dtype).view(self.shape)
            return torch.mul(self.codes, self.scales, out=out)
        numbers = self.scratch.get_buffer(self.codes, len(self.codes), torch.int32).copy_(self.codes)
        wide = self.scratch.get_buffer(self.codes, 2 * len(self.codes), torch.float32)
        torch.index_select(self.pairs, 0, numbers, out=wide.view(-1, 2))
        out = self.scratch.get_buffer(self.codes, len(wide), dtype).view(-1, NF4_BLOCK_SIZE)
        torch.mul(wide.view(-1, NF4_BLOCK_SIZE), self.scales, out=out)
        return out.view(-1)[:size].view(self.shape)

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., in]` -> `[..., out]`; nothing is saved for the backward pass."""
        out: Tensor = _QuantizedProduct.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """For printing."""
        return f"{list(self.shape)}, {self.kind}"


class _QuantizedProduct(torch.autograd.Function):
    """`x W^T + bias` with a packed W and a bias that is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.packed = packed
        return F.linear(x, packed.dequantize_weight(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad @ ctx.packed.dequantize_weight(grad.dtype), None, None


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is packed and stays as it is."""

    def __init__(self, base: nn.Linear, kind: QuantizationKind, scratch: ScratchMemory) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        replace_weight(self, base.weight, kind, scratch)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        quantized: QuantizedWeight = self.quantized  # type: ignore[assignment]
        return quantized.apply_linear(input.to(dtype), None if self.bias is None else self.bias.to(dtype))


def replace_weight(layer: nn.Linear, weight: Tensor, kind: QuantizationKind, scratch: ScratchMemory) -> None:
    """Give a layer a packed weight in place of its own; of that shape and format are left, for those who ask."""
    layer._parameters.pop("weight", None)
    layer.__dict__["weight"] = weight.detach().to("meta")
    layer.quantized = QuantizedWeight(weight.shape, kind, scratch)


def iter_quantized_weights(model: nn.Module) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yield the packed weights by the names that they had."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedWeight):
            yield f"{name.rpartition('.')[0]}.weight", module


def _quantize_int8(part: Tensor) -> tuple[Tensor, Tensor]:
    scales = part.abs().amax(1, keepdim=True) / 127
    return (part / scales.clamp_min(1e-30)).round_().to(torch.int8), scales


def _quantize_nf4(part: Tensor) -> tuple[Tensor, Tensor]:
    flat = part.reshape(-1)
    blocks = F.pad(flat, (0, -len(flat) % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
    scales = blocks.abs().amax(1, keepdim=True)
    shares = blocks / scales.clamp_min(1e-30)
    codes = torch.zeros_like(shares, dtype=torch.uint8)
    for low, high in zip(NF4_LEVELS, NF4_LEVELS[1:], strict=False):
        codes += shares > (low + high) / 2
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], scales


def _make_level_pairs() -> Tensor:
    """The two levels of every byte, `[256, 2]`."""
    levels = torch.tensor(NF4_LEVELS)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1)
