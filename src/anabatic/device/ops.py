"""Fused operators: each has a plain-torch reference and at most one implementation per device.

`get_device_ops` picks by the device table. Every implementation has a parity test against the reference, forward and
gradient. Shapes: `T` tokens, `H` hidden size, `N` query heads, `K` key/value heads, `D` head size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device import ops_cpu, ops_npu
from anabatic.device.attention import AttentionOptions, attention_reference
from anabatic.device.experts import grouped_reference, permute_reference, unpermute_reference
from anabatic.device.segments import PackedSegments
from anabatic.device.table import DEVICES, KernelSet


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467): `x / rms(x) * weight` over the last axis, statistics in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), half-split layout: `x * cos + rotate_half(x) * sin`."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rotary_neighbours_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) as the paper has it: numbers 2i and 2i + 1 turn together."""
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + rotated * sin


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): `silu(gate) * up`."""
    return F.silu(gate) * up


def swiglu_joint_reference(both: Tensor) -> Tensor:
    """SwiGLU of `[..., 2 I]` that holds the gate in its first half: `[..., I]`."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


_FP16_DIVISOR = 64
"""What states in fp16 are divided by where many are summed; a power of two, so no digit is lost."""


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient is made in the forward pass, chunk by chunk, so no chunk's logits are kept or made twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, softcap: float | None) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        small = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = _allocate_gradient(weight, hidden) if need_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = hidden[start : start + rows]
            index = labels[start : start + rows].unsqueeze(1)
            logits, slope = _apply_softcap((part @ small.t()).float(), softcap)
            top = logits.amax(dim=1, keepdim=True)
            target = logits.gather(1, index)
            weights = logits.sub_(top).exp_()
            mass = weights.sum(dim=1, keepdim=True)
            total += (mass.log() + top - target).sum()
            if d_hidden is None and d_weight is None:
                continue
            weights.div_(mass).scatter_add_(1, index, weights.new_full((1, 1), -1.0).expand_as(index))
            if slope is not None:
                weights.mul_(slope)
            delta = weights.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(delta, small, out=d_hidden[start : start + rows])
            if d_weight is not None:
                _add_product(d_weight, delta, part, first=start == 0)
            del logits, weights, delta  # or the next chunk would be made beside this one
        ctx.found = (d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.found is None:
            raise RuntimeError("linear_cross_entropy: the gradient was given away by an earlier backward pass")
        (d_hidden, d_weight), ctx.found = ctx.found, None  # in place: a second one of the head's size is gigabytes
        (grad,) = grads
        if d_hidden is not None:
            d_hidden.mul_(grad.to(d_hidden.dtype))
        if d_weight is not None:
            d_weight.mul_(grad)
        return d_hidden, d_weight, None, None, None


def _apply_softcap(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Cap logits in place (Gemma 2, arXiv 2408.00118, section 2); return them and the slope of the cap."""
    if softcap is None:
        return logits, None
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square()
    return logits.mul_(softcap), slope


def _allocate_gradient(weight: Tensor, hidden: Tensor) -> Tensor:
    """Memory for the gradient of the weight, in fp32; the first chunk writes it, without one it is zero."""
    make = torch.empty_like if len(hidden) else torch.zeros_like
    return make(weight, dtype=torch.float32)


def _add_product(total: Tensor, delta: Tensor, part: Tensor, first: bool) -> None:
    """`total += delta^T part`, `total` in fp32 whatever the factors are; `first`: what it holds is overwritten.

    In fp16 a frequent target sums up hundreds of rows of states, beyond 65,504: they are made smaller first.
    """
    if delta.dtype == total.dtype:
        total.addmm_(delta.t(), part, beta=0.0 if first else 1.0)
        return
    shrunk = _FP16_DIVISOR if part.dtype == torch.float16 else 1
    product = delta.t() @ (part / shrunk if shrunk > 1 else part)
    if first:
        total.copy_(product).mul_(shrunk)
    else:
        total.add_(product, alpha=shrunk)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int, softcap: float | None = None
) -> Tensor:
    """Return the summed cross-entropy of `softmax(hidden weight^T)` against `labels`, a scalar in fp32.

    Args:
        hidden: `[T, H]`; weight: `[V, H]`; labels: int64 `[T]`, every one a target (no ignored rows).
        chunk_bytes: size of the fp32 logits that exist at once.
        softcap: logits are `cap * tanh(logits / cap)`.
    """
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    hidden = _cast_for_matmul(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        total: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, rows, softcap)  # type: ignore[no-untyped-call]
    return total


def _cast_for_matmul(hidden: Tensor) -> Tensor:
    """Cast to the format of matrix products.

    Autocast would not: it passes over products that are written into given memory, makes a copy of the head for every
    chunk, and ends before a backward pass, whose products must be the same ones.
    """
    kind = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden


class _LinearLogProbs(torch.autograd.Function):
    """The backward pass makes the logits again, chunk by chunk: what a token's gradient is worth is known only then."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, softcap: float | None) -> Tensor:
        small = weight.to(hidden.dtype)
        found = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        norms = torch.empty_like(found)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            logits, _ = _apply_softcap((hidden[chunk] @ small.t()).float(), softcap)
            norms[chunk] = torch.logsumexp(logits, dim=1)
            found[chunk] = logits.gather(1, labels[chunk].unsqueeze(1)).squeeze(1) - norms[chunk]
        ctx.save_for_backward(hidden, weight, labels, norms)
        ctx.rows, ctx.softcap = rows, softcap
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, norms = ctx.saved_tensors
        (grad,) = grads
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        small = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = _allocate_gradient(weight, hidden) if need_weight else None
        for start in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            part, worth = hidden[chunk], grad[chunk].unsqueeze(1)
            logits, slope = _apply_softcap((part @ small.t()).float(), ctx.softcap)
            weights = logits.sub_(norms[chunk].unsqueeze(1)).exp_().mul_(-worth)
            weights.scatter_add_(1, labels[chunk].unsqueeze(1), worth)
            if slope is not None:
                weights.mul_(slope)
            delta = weights.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(delta, small, out=d_hidden[chunk])
            if d_weight is not None:
                _add_product(d_weight, delta, part, first=start == 0)
            del logits, weights, delta
        return d_hidden, d_weight if d_weight is None else d_weight.to(weight.dtype), None, None, None


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int, softcap: float | None = None
) -> Tensor:
    """Return the log-probability of every label under `softmax(hidden weight^T)`, fp32 `[T]`, with gradient.

    Args:
        hidden: `[T, H]`; weight: `[V, H]`; labels: int64 `[T]`.
        chunk_bytes: size of the fp32 logits that exist at once, in both passes.
        softcap: logits are `cap * tanh(logits / cap)`.
    """
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    hidden = _cast_for_matmul(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        found: Tensor = _LinearLogProbs.apply(hidden, weight, labels, rows, softcap)  # type: ignore[no-untyped-call]
    return found


@torch.no_grad()
def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy, fp32 `[T]`, and whether it is the likeliest one, bool `[T]`; no gradient."""
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    hidden = _cast_for_matmul(hidden)
    small = weight.to(hidden.dtype)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    hits = torch.empty(labels.shape, dtype=torch.bool, device=hidden.device)
    for start in range(0, hidden.shape[0], rows):
        chunk = slice(start, start + rows)
        logits, _ = _apply_softcap((hidden[chunk] @ small.t()).float(), softcap)
        losses[chunk] = F.cross_entropy(logits, labels[chunk], reduction="none")
        hits[chunk] = logits.argmax(dim=1) == labels[chunk]
    return losses, hits


class DeviceOps(NamedTuple):
    """The operators of one device."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    rotary_neighbours: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    swiglu_joint: Callable[[Tensor], Tensor]
    attention: Callable[[Tensor, Tensor, Tensor, PackedSegments, AttentionOptions], Tensor]
    permute: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]


REFERENCE_OPS = DeviceOps(
    rms_norm_reference,
    rotary_reference,
    rotary_neighbours_reference,
    swiglu_reference,
    swiglu_joint_reference,
    attention_reference,
    permute_reference,
    unpermute_reference,
    grouped_reference,
)

OPS_BY_KERNEL: dict[KernelSet, DeviceOps] = {
    "reference": REFERENCE_OPS,
    "cpu": REFERENCE_OPS._replace(rms_norm=ops_cpu.rms_norm, rotary=ops_cpu.apply_rotary),
    "npu": DeviceOps(
        ops_npu.rms_norm,
        ops_npu.apply_rotary,
        ops_npu.apply_rotary_neighbours,
        ops_npu.apply_swiglu,
        ops_npu.apply_swiglu_joint,
        ops_npu.fused_attention,
        ops_npu.permute_tokens,
        ops_npu.unpermute_tokens,
        ops_npu.grouped_matmul,
    ),
}


def list_expensive_operators() -> list[Any]:
    """Return matrix products and attention: what selective recomputation keeps, because it is dear to make anew."""
    aten = torch.ops.aten
    dear = [aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_dot_product_flash_attention_for_cpu]
    dear += [aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention]
    found = [packet.default for packet in dear]
    fused = getattr(torch.ops, "npu", None)
    for name in ("npu_fusion_attention", "npu_fusion_attention_v3"):
        if hasattr(torch, "npu") and hasattr(fused, name):
            found.append(getattr(fused, name).default)
    return found


def get_device_ops(device_type: str) -> DeviceOps:
    """Return the operators that the device table chooses for tensors on `device_type`."""
    return OPS_BY_KERNEL[DEVICES[device_type].kernels]
