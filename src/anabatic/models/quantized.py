"""Frozen weights in 8 or 4 bits (QLoRA, arXiv 2305.14314), in plain operators that every device has.

`int8`: each row of a weight has a scale, its largest value / 127 (arXiv 2208.07339, section 2). `nf4`: each block of 64
values has a scale, its largest value, and each value is the nearest of 16 levels, quantiles of a normal distribution
(QLoRA, appendix E); two values share a byte, the first in the upper half, as in bitsandbytes. Scales are fp32: about 8,
or 4.5 bits per weight. Weights are dequantized for every product, one layer at a time.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

QuantizationKind = Literal["int8", "nf4"]

NF4_BLOCK_SIZE = 64
"""Number of values with a common scale in `nf4`."""
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of `nf4`; arXiv 2305.14314, appendix E."""
_CHUNK_VALUES = 1 << 22
"""Number of values quantized at a time, which limits the temporary memory."""


class ScratchMemory:
    """Memory shared by the dequantized weights of a model: separate allocations would fragment the memory between the
    activations of the layers."""

    def __init__(self) -> None:
        self._kept: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def get_buffer(self, like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer `[size]` on the device of `like`; the last buffer of the same dtype is overwritten."""
        buffer = self._kept.get((dtype, like.device))
        if buffer is None or len(buffer) < size:
            buffer = self._kept[dtype, like.device] = torch.empty(size, dtype=dtype, device=like.device)
        return buffer[:size]


class QuantizedWeight(nn.Module):
    """A quantized weight `[out, in]`; empty until `quantize_weight`.

    The buffers are not persistent: a checkpoint holds only trained parameters.
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
        """Quantize a weight on the device of this module."""
        quantize = _quantize_int8 if self.kind == "int8" else _quantize_nf4
        rows = max(1, _CHUNK_VALUES // self.shape[1])
        if self.kind == "nf4" and self.shape[1] % NF4_BLOCK_SIZE:  # blocks cross the ends of rows
            rows = self.shape[0]
        chunks = [quantize(chunk.to(self.codes.device, torch.float32)) for chunk in weight.split(rows)]
        self.codes, self.scales = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))

    def take_codes(self, codes: Tensor, scales: Tensor) -> None:
        """Take codes that someone else has made.

        Raises:
            ValueError: there are more or fewer of them than the weight has values.
        """
        values = self.shape.numel()
        wanted = (values, self.shape[0]) if self.kind == "int8" else ((values + 1) // 2, -(-values // NF4_BLOCK_SIZE))
        if (codes.numel(), scales.numel()) != wanted or codes.dtype != self.codes.dtype:
            raise ValueError(
                f"{codes.numel()} codes ({codes.dtype}) and {scales.numel()} scales for {list(self.shape)}"
            )
        shape = self.shape if self.kind == "int8" else (-1,)
        self.codes, self.scales = codes.to(self.codes.device).view(shape), scales.to(self.codes.device)

    @torch.no_grad()
    def dequantize_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[out, in]`, valid until the next call; products with scales are computed in fp32."""
        size = self.shape.numel()
        if self.kind == "int8":
            out = self.scratch.get_buffer(self.codes, size, dtype).view(self.shape)
            return torch.mul(self.codes, self.scales, out=out)
        indices = self.scratch.get_buffer(self.codes, len(self.codes), torch.int32).copy_(self.codes)
        levels = self.scratch.get_buffer(self.codes, 2 * len(self.codes), torch.float32)
        torch.index_select(self.pairs, 0, indices, out=levels.view(-1, 2))
        out = self.scratch.get_buffer(self.codes, len(levels), dtype).view(-1, NF4_BLOCK_SIZE)
        torch.mul(levels.view(-1, NF4_BLOCK_SIZE), self.scales, out=out)
        return out.view(-1)[:size].view(self.shape)

    def apply_linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., in]` -> `[..., out]`; nothing is saved for the backward pass."""
        out: Tensor = _QuantizedProduct.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out

    def extra_repr(self) -> str:
        """Return the description for printing."""
        return f"{list(self.shape)}, {self.kind}"


class _QuantizedProduct(torch.autograd.Function):
    """`x W^T + bias` with a quantized W and a frozen bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.packed = quantized
        return F.linear(x, quantized.dequantize_weight(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        return grad @ ctx.packed.dequantize_weight(grad.dtype), None, None


class QuantizedLinear(nn.Linear):
    """A linear layer with a frozen, quantized weight."""

    def __init__(self, base: nn.Linear, kind: QuantizationKind, scratch: ScratchMemory) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias
        replace_weight(self, base.weight, kind, scratch)

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        device_type = input.device.type
        dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else self.weight.dtype
        quantized: QuantizedWeight = self.quantized  # type: ignore[assignment]
        return quantized.apply_linear(input.to(dtype), None if self.bias is None else self.bias.to(dtype))


def replace_weight(layer: nn.Linear, weight: Tensor, kind: QuantizationKind, scratch: ScratchMemory) -> None:
    """Replace a layer's weight by a quantized one; a meta tensor keeps its shape and dtype."""
    layer._parameters.pop("weight", None)
    layer.__dict__["weight"] = weight.detach().to("meta")
    layer.quantized = QuantizedWeight(weight.shape, kind, scratch)


def _quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales.clamp_min(1e-30)).round_().to(torch.int8), scales


def _quantize_nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = weight.reshape(-1)
    blocks = F.pad(flat, (0, -len(flat) % NF4_BLOCK_SIZE)).view(-1, NF4_BLOCK_SIZE)
    scales = blocks.abs().amax(1, keepdim=True)
    normalized = blocks / scales.clamp_min(1e-30)
    codes = torch.zeros_like(normalized, dtype=torch.uint8)
    for low, high in zip(NF4_LEVELS, NF4_LEVELS[1:], strict=False):
        codes += normalized > (low + high) / 2
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], scales


def _make_level_pairs() -> Tensor:
    """Return the two levels of every byte, `[256, 2]`."""
    levels = torch.tensor(NF4_LEVELS)
    return torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1)
