"""Fused operators: each has a plain-torch reference and at most one implementation per device; those of CPUs are here.

`get_device_ops` selects by the device table. Every implementation has a parity test against the reference, forward
and gradient. Shapes: `T` tokens, `H` hidden size, `N` query heads, `K` key/value heads, `D` head size, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.core.cpu_info import find_speedup
from anabatic.device import ops_npu
from anabatic.device.attention import AttentionOptions, PackedSegments, attend_in_fp32, attention_reference
from anabatic.device.block_attention import REFERENCE_BLOCKS, BlockOps
from anabatic.device.experts import grouped_reference, permute_reference, unpermute_reference
from anabatic.device.table import DEVICES, KernelSet

_SMALL_ELEMENTS = 2**14
"""Elements up to which the call overhead dominates: fewer calls are then faster, though they copy more."""


def _normalize_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normalized rows, and the inverse RMS of every row."""
    upcast = x.float()
    inverse_rms = torch.linalg.vector_norm(upcast, dim=-1, keepdim=True)
    inverse_rms = inverse_rms.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    normed = (upcast * inverse_rms).to(x.dtype)
    return normed.mul_(weight) if weight.dtype == normed.dtype else normed * weight, inverse_rms


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse_rms = _normalize_rows(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        grad = grads[0].float()
        upcast = x.float()
        normed = upcast * inverse_rms
        d_weight = None
        product = grad * normed
        if ctx.needs_input_grad[1]:
            d_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        projection = (product @ weight.float()).unsqueeze(-1).mul_(-1 / x.shape[-1])
        d_x = (grad * weight).addcmul_(normed, projection).mul_(inverse_rms)
        return d_x.to(x.dtype), d_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with an explicit gradient; 1.7x to 2x the speed of the composed form on a CPU (docs/dev)."""
    if not torch.is_grad_enabled():  # for a generated token the overhead of autograd dominates
        if x.numel() <= _SMALL_ELEMENTS and x.dtype == weight.dtype == torch.float32:
            return torch.rms_norm(x, weight.shape, weight, eps)
        return _normalize_rows(x, weight, eps)[0]
    out: Tensor = _RmsNormFunction.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


class _RotaryFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = cos.shape[-1] // 2
        # The transposed map takes each half's sine from the other half.
        swapped = torch.cat((sin[..., half:], sin[..., :half]), dim=-1)
        return _rotate_halves(grads[0], cos, swapped, -1.0), None, None


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding without the concatenated copy; the gradient is the inverse rotation."""
    if not torch.is_grad_enabled():
        if x.numel() <= _SMALL_ELEMENTS:
            first, second = x.chunk(2, dim=-1)
            return (x * cos).addcmul_(torch.cat((second.neg(), first), dim=-1), sin)
        return _rotate_halves(x, cos, sin, 1.0)
    out: Tensor = _RotaryFunction.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467): `x / rms(x) * weight` over the last axis, statistics in fp32."""
    upcast = x.float()
    upcast = upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + eps)
    return weight * upcast.to(x.dtype)


def rotary_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), half-split layout: `x * cos + rotate_half(x) * sin`."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rotary_neighbours_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), interleaved layout of the paper: 2i and 2i + 1 form a pair."""
    rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + rotated * sin


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU (arXiv 2002.05202): `silu(gate) * up`."""
    return F.silu(gate) * up


def swiglu_joint_reference(gate_up: Tensor) -> Tensor:
    """SwiGLU of a joint tensor: `[..., 2 I]`, the gate in the first half -> `[..., I]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


_FP16_DIVISOR = 64
"""Divisor of fp16 states before many are summed; a power of two, so it is exact."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradient in the forward pass, chunk by chunk, so that no logits are kept or computed twice."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int, softcap: float | None
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        cast_weight = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_rows):
            chunk = hidden[start : start + chunk_rows]
            index = labels[start : start + chunk_rows].unsqueeze(1)
            logits, slope = _apply_softcap((chunk @ cast_weight.t()).float(), softcap)
            max_logits = logits.amax(dim=1, keepdim=True)
            target = logits.gather(1, index)
            probs = logits.sub_(max_logits).exp_()
            prob_sums = probs.sum(dim=1, keepdim=True)
            total += (prob_sums.log() + max_logits - target).sum()
            if not need_hidden and not need_weight:
                continue
            probs.div_(prob_sums).scatter_add_(1, index, probs.new_full((1, 1), -1.0).expand_as(index))
            if slope is not None:
                probs.mul_(slope)
            grad_logits = probs.to(hidden.dtype)
            del logits, probs  # frees the chunk in fp32 before anything else is allocated
            if d_hidden is not None:
                torch.mm(grad_logits, cast_weight, out=d_hidden[start : start + chunk_rows])
            if need_weight:
                d_weight = _allocate_gradient(weight, hidden) if d_weight is None else d_weight
                _add_product(d_weight, grad_logits, chunk, overwrite=start == 0)
            del grad_logits
        if need_weight and d_weight is None:
            d_weight = _allocate_gradient(weight, hidden)
        ctx.gradients = (d_hidden, d_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("linear_cross_entropy: the gradient was given away by an earlier backward pass")
        (d_hidden, d_weight), ctx.gradients = (
            ctx.gradients,
            None,
        )  # in place: a second tensor of the head's size is gigabytes
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
    """Allocate the gradient of the weight in fp32; the first chunk overwrites it, without chunks it is zero."""
    allocate = torch.empty_like if len(hidden) else torch.zeros_like
    return allocate(weight, dtype=torch.float32)


def _add_product(d_weight: Tensor, grad_logits: Tensor, hidden: Tensor, overwrite: bool) -> None:
    """`d_weight += grad_logits^T hidden`, `d_weight` always in fp32; `overwrite`: replace its content.

    In fp16 the sum over hundreds of rows of a frequent target exceeds 65,504, so states are divided first.
    """
    if grad_logits.dtype == d_weight.dtype:
        d_weight.addmm_(grad_logits.t(), hidden, beta=0.0 if overwrite else 1.0)
        return
    divisor = _FP16_DIVISOR if hidden.dtype == torch.float16 else 1
    product = grad_logits.t() @ (hidden / divisor if divisor > 1 else hidden)
    if overwrite:
        d_weight.copy_(product).mul_(divisor)
    else:
        d_weight.add_(product, alpha=divisor)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int, softcap: float | None = None
) -> Tensor:
    """Return the summed cross-entropy of `softmax(hidden weight^T)` against `labels`, a scalar in fp32.

    Args:
        hidden: `[T, H]`; weight: `[V, H]`; labels: int64 `[T]`, every one a target (no ignored rows).
        chunk_bytes: size of the fp32 logits in memory at a time.
        softcap: logits are `cap * tanh(logits / cap)`.
    """
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    hidden = _cast_for_matmul(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, rows, softcap)  # type: ignore[no-untyped-call]
    return loss


def _cast_for_matmul(hidden: Tensor) -> Tensor:
    """Cast to the dtype of matrix products.

    Autocast is not used: it skips products with an `out` tensor, copies the head for every chunk, and ends before the
    backward pass, whose products must have the same dtype.
    """
    device_type = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else hidden


class _LinearLogProbs(torch.autograd.Function):
    """Recomputes the logits in the backward pass, chunk by chunk: the gradient of each token is known only then."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_rows: int, softcap: float | None
    ) -> Tensor:
        cast_weight = weight.to(hidden.dtype)
        log_probs = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        norms = torch.empty_like(log_probs)
        for start in range(0, hidden.shape[0], chunk_rows):
            chunk = slice(start, start + chunk_rows)
            logits, _ = _apply_softcap((hidden[chunk] @ cast_weight.t()).float(), softcap)
            norms[chunk] = torch.logsumexp(logits, dim=1)
            log_probs[chunk] = logits.gather(1, labels[chunk].unsqueeze(1)).squeeze(1) - norms[chunk]
        ctx.save_for_backward(hidden, weight, labels, norms)
        ctx.rows, ctx.softcap = chunk_rows, softcap
        return log_probs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, norms = ctx.saved_tensors
        (grad,) = grads
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        cast_weight = weight.to(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if need_hidden else None
        d_weight = _allocate_gradient(weight, hidden) if need_weight else None
        for start in range(0, hidden.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            hidden_chunk, grad_chunk = hidden[chunk], grad[chunk].unsqueeze(1)
            logits, slope = _apply_softcap((hidden_chunk @ cast_weight.t()).float(), ctx.softcap)
            probs = logits.sub_(norms[chunk].unsqueeze(1)).exp_().mul_(-grad_chunk)
            probs.scatter_add_(1, labels[chunk].unsqueeze(1), grad_chunk)
            if slope is not None:
                probs.mul_(slope)
            grad_logits = probs.to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(grad_logits, cast_weight, out=d_hidden[chunk])
            if d_weight is not None:
                _add_product(d_weight, grad_logits, hidden_chunk, overwrite=start == 0)
            del logits, probs, grad_logits
        return d_hidden, d_weight if d_weight is None else d_weight.to(weight.dtype), None, None, None


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int, softcap: float | None = None
) -> Tensor:
    """Return the log-probability of every label under `softmax(hidden weight^T)`, fp32 `[T]`, with gradient.

    Args:
        hidden: `[T, H]`; weight: `[V, H]`; labels: int64 `[T]`.
        chunk_bytes: size of the fp32 logits in memory at a time, in both passes.
        softcap: logits are `cap * tanh(logits / cap)`.
    """
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    hidden = _cast_for_matmul(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        logps: Tensor = _LinearLogProbs.apply(hidden, weight, labels, rows, softcap)  # type: ignore[no-untyped-call]
    return logps


@torch.no_grad()
def token_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy, fp32 `[T]`, and whether it is the most likely one, bool `[T]`; no gradient."""
    chunk_rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    hidden = _cast_for_matmul(hidden)
    cast_weight = weight.to(hidden.dtype)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    hits = torch.empty(labels.shape, dtype=torch.bool, device=hidden.device)
    for start in range(0, hidden.shape[0], chunk_rows):
        chunk = slice(start, start + chunk_rows)
        logits, _ = _apply_softcap((hidden[chunk] @ cast_weight.t()).float(), softcap)
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
    "cpu": REFERENCE_OPS._replace(rms_norm=rms_norm, rotary=apply_rotary, attention=attend_in_fp32),
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
    """Return matrix products and attention, whose results selective recomputation keeps because they are expensive."""
    aten = torch.ops.aten
    packets = [aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._scaled_dot_product_flash_attention_for_cpu]
    packets += [aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention]
    operators = [packet.default for packet in packets]
    fused = getattr(torch.ops, "npu", None)
    for name in ("npu_fusion_attention", "npu_fusion_attention_v3"):
        if hasattr(torch, "npu") and hasattr(fused, name):
            operators.append(getattr(fused, name).default)
    return operators


_NPU_BLOCKS = BlockOps(ops_npu.block_forward, ops_npu.block_backward)


def get_block_ops(device_type: str) -> BlockOps:
    """Return attention of some queries to some keys for tensors on `device_type`."""
    kernels = DEVICES[device_type].kernels
    if kernels == "npu":
        return _NPU_BLOCKS
    fast: BlockOps | None = find_speedup("cpu_blocks", "CPU_BLOCKS") if kernels == "cpu" else None
    return fast or REFERENCE_BLOCKS


def get_device_ops(device_type: str) -> DeviceOps:
    """Return the operators of the device table for tensors on `device_type`."""
    return OPS_BY_KERNEL[DEVICES[device_type].kernels]


def get_plain_sinks_reason(device_type: str) -> str:
    """Return why attention with sinks is composed of plain operators on a device; empty: it is one fused operator."""
    if DEVICES[device_type].kernels == "npu":
        return ops_npu.explain_plain_sinks()
    return f"no fused operator on {device_type}"
