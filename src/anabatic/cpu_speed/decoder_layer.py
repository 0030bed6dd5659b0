"""A whole decoder layer as one autograd function: few nodes, few passes over memory, adapters of one input joined.

For processors, where between products a step's time goes to single passes over a few hundred rows and to autograd's own
work (docs/dev). `x + o(attention(norm x))`, then `x + down(silu(gate) * up)` of its norm: Llama's layer, with or
without biases, norms of query and key heads (Qwen3) and adapters.

Shapes: `T` tokens, `H` hidden size, `N` query heads, `K` key/value heads (N a multiple of K), `D` head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.device.attention import PackedSegments, get_head_exchange

_ops = torch.ops.aten
NORM_NAMES = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
LINEAR_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_QKV, _OUT, _GATE_UP, _DOWN = slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)


class LinearParts(NamedTuple):
    """Tensors of a linear layer: weight `[out, in]`, bias `[out]`, adapter A `[r, in]` and B `[out, r]`."""

    weight: Tensor
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None


@dataclass(frozen=True)
class LayerPlan:
    """What is not a tensor.

    Attributes:
        eps: of `NORM_NAMES`; 0 for a norm that the layer does not have.
        scales: of the adapters of `LINEAR_NAMES`.
        scale: factor on attention scores.
        dtype: of the products.
        rows: int64 `[n]`, the only rows that the layer returns, in order; None: all.
    """

    eps: tuple[float, ...]
    scales: tuple[float, ...]
    head_dim: int
    scale: float
    dtype: torch.dtype
    segments: PackedSegments
    rows: Tensor | None = None


def run_decoder_layer(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: Sequence[Tensor | None],
    linears: Sequence[LinearParts],
    plan: LayerPlan,
) -> Tensor:
    """Return the layer's output, `[T, H]` or `plan.rows` of it, with gradient for `x` and all parameters.

    Args:
        x: `[T, H]`; cos, sin: `[T, D]`, fp32, the halves of a head alike.
        norms: weights of `NORM_NAMES`; linears: of `LINEAR_NAMES`.
    """
    parts = [tensor for linear in linears for tensor in linear]
    with torch.autocast(x.device.type, enabled=False):
        out: Tensor = _DecoderLayer.apply(plan, x, cos, sin, *norms, *parts)  # type: ignore[no-untyped-call]
    return out


class _Linears:
    """Linear layers of one input: their products, and those of their adapters joined where the input is the same.

    Its tensors are handed to autograd between the passes (`give_tensors`, `take_tensors`).
    """

    def __init__(self, linears: Sequence[LinearParts], scales: Sequence[float], dtype: torch.dtype) -> None:
        self.dtypes = [[None if part is None else part.dtype for part in linear] for linear in linears]
        self.scales, self.dtype = scales, dtype
        self.ranks = [0 if linear.a is None else linear.a.shape[0] for linear in linears]
        self.adapted = [index for index, rank in enumerate(self.ranks) if rank]
        self.weights = [linear.weight.to(dtype) for linear in linears]
        self.biases = [None if linear.bias is None else linear.bias.to(dtype) for linear in linears]
        a = [linear.a for linear in linears if linear.a is not None]
        self.a = [(a[0] if len(a) == 1 else torch.cat(a)).to(dtype)] if a else []
        self.scaled_b = [
            (linear.b * scale).to(dtype) for linear, scale in zip(linears, scales, strict=True) if linear.b is not None
        ]

    def give_tensors(self) -> list[Tensor]:
        """What the backward pass needs; the object keeps none of it."""
        tensors = [*self.weights, *self.a, *self.scaled_b]
        self.weights, self.a, self.scaled_b, self.biases = [], [], [], []
        return tensors

    def take_tensors(self, saved: Iterator[Tensor]) -> None:
        """Take back what `give_tensors` returned."""
        self.weights = [next(saved) for _ in self.ranks]
        self.a = [next(saved)] if self.adapted else []
        self.scaled_b = [next(saved) for _ in self.adapted]

    def project_down(self, x: Tensor) -> list[Tensor]:
        """All adapters' `x A^T`, `[T, sum of ranks]`; nothing without adapters."""
        return [x @ a.t() for a in self.a]

    def _split(self, joint: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Index, scaled B and columns of each adapted layer."""
        columns = joint.split([self.ranks[index] for index in self.adapted], dim=1)
        return zip(self.adapted, self.scaled_b, columns, strict=True)

    def forward(self, x: Tensor, down: list[Tensor], outs: Sequence[Tensor]) -> None:
        """Write the layers' outputs."""
        for weight, bias, out in zip(self.weights, self.biases, outs, strict=True):
            if bias is None:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.addmm(bias, x, weight.t(), out=out)
        for joint in down:
            for index, b, columns in self._split(joint):
                outs[index].addmm_(columns, b.t())

    def add_to(self, residual: Tensor, x: Tensor, down: list[Tensor]) -> Tensor:
        """`residual` plus the output of the only layer."""
        (weight,), (bias,) = self.weights, self.biases
        if residual.dtype != self.dtype:
            out = x.new_empty(x.shape[0], weight.shape[0])
            self.forward(x, down, [out])
            return residual + out
        out = torch.addmm(residual, x, weight.t())
        if down:
            out.addmm_(down[0], self.scaled_b[0].t())
        return out if bias is None else out.add_(bias)

    def input_gradient(self, grads: Sequence[Tensor]) -> Tensor:
        """Of the weights; `backward` adds the adapters'."""
        total = grads[0] @ self.weights[0]
        for grad, weight in zip(grads[1:], self.weights[1:], strict=True):
            total.addmm_(grad, weight)
        return total

    def backward(
        self, x: Tensor, down: list[Tensor], grads: Sequence[Tensor], needs: Sequence[bool], d_x: Tensor | None
    ) -> list[Tensor | None]:
        """Gradients of all layers' parts, by `needs`; what passes through the adapters is added to `d_x`."""
        found: list[Tensor | None] = [None] * len(needs)
        for index, (grad, dtypes) in enumerate(zip(grads, self.dtypes, strict=True)):
            if needs[4 * index]:
                found[4 * index] = (grad.t() @ x).to(dtypes[0])
            if dtypes[1] is not None and needs[4 * index + 1]:
                found[4 * index + 1] = grad.sum(0).to(dtypes[1])
        for joint in down:
            d_down = torch.empty_like(joint)
            for (index, b, columns), (_, _, own) in zip(self._split(joint), self._split(d_down), strict=True):
                torch.mm(grads[index], b, out=own)
                d_b = columns.t() @ grads[index]  # the transposed product is slower
                found[4 * index + 3] = (d_b.t() * self.scales[index]).to(self.dtypes[index][3])
            d_a = (d_down.t() @ x).split([self.ranks[index] for index in self.adapted])
            for index, own in zip(self.adapted, d_a, strict=True):
                found[4 * index + 2] = own.to(self.dtypes[index][2])
            if d_x is not None:
                d_x.addmm_(d_down, self.a[0])
        return found


def _normalize(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """RMSNorm of the last axis in `dtype`, and the inverse RMS."""
    wide = x.float()
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    inverse = inverse.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).mul_(weight).to(dtype), inverse


def _normalize_backward(
    grad: Tensor, x: Tensor, inverse: Tensor, weight: Tensor, residual: Tensor | None, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `x`, with `residual` added, and of the weight; `grad` is used up if it is fp32.

    With `P = grad * x`, summed over the last axis with the weight, and over rows with the inverse RMS.
    """
    grad, wide = grad.float(), x.float()
    product = (grad * wide).view(-1, x.shape[-1])
    d_weight = torch.mv(product.t(), inverse.reshape(-1)).to(weight.dtype) if needs[1] else None
    if not needs[0]:
        return None, d_weight
    dots = torch.mv(product, weight.float()).view(inverse.shape)
    factor = dots.mul_(inverse).mul_(inverse).mul_(inverse).mul_(-1 / x.shape[-1])
    d_x = wide * factor if residual is None else torch.addcmul(residual.float(), wide, factor)
    return d_x.addcmul_(grad.mul_(weight), inverse).to(x.dtype), d_weight


def _take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _take_backward(grad: Tensor, rows: Tensor | None, count: int) -> Tensor:
    """The gradient of all `count` rows: zero for those that were not taken."""
    return grad if rows is None else grad.new_zeros(count, *grad.shape[1:]).index_copy_(0, rows, grad)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`[T, heads, D]`, angles `[T, 1, D]`, the halves of `sin` with their signs."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _DecoderLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: LayerPlan, x: Tensor, cos: Tensor, sin: Tensor, *tensors: Any) -> Tensor:
        norms, parts = tensors[:4], [LinearParts(*tensors[at : at + 4]) for at in range(4, 32, 4)]
        groups = [_Linears(parts[each], plan.scales[each], plan.dtype) for each in (_QKV, _OUT, _GATE_UP, _DOWN)]
        angles = (
            cos.unsqueeze(1),
            torch.cat((-sin[:, : sin.shape[1] // 2], sin[:, sin.shape[1] // 2 :]), 1).unsqueeze(1),
        )
        hidden, kept_attention = _attention_forward(plan, x, angles, norms, groups)
        out, kept_mlp = _mlp_forward(plan, hidden, norms[1], groups)
        ctx.plan, ctx.groups = plan, groups
        ctx.counts = (len(kept_attention), len(kept_mlp))
        own = [tensor for group in groups for tensor in group.give_tensors()]
        ctx.save_for_backward(x, *angles, *norms, *kept_attention, *kept_mlp, *own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        x, cos, sin, *norms = (next(saved) for _ in range(7))
        kept_attention, kept_mlp = ([next(saved) for _ in range(count)] for count in ctx.counts)
        for group in ctx.groups:
            group.take_tensors(saved)
        needs = ctx.needs_input_grad
        grad, d_norm, d_mlp = _mlp_backward(ctx.plan, grads[0], norms[1], ctx.groups, kept_mlp, needs)
        d_x, d_norms, d_attention = _attention_backward(
            ctx.plan, grad, x, (cos, sin), norms, ctx.groups, kept_attention, needs
        )
        for group in ctx.groups:
            group.give_tensors()
        return None, d_x, None, None, d_norms[0], d_norm, *d_norms[1:], *d_attention, *d_mlp


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the attention `[T, N, D]`, and what `attend_backward` needs of each group of segments.

    Args:
        q: `[T, N, D]`; k, v: `[T, K, D]`.
        segments: causal ones.
    """
    inputs = [segments.spread_groups(x) for x in (q, k, v)]
    out, kept = torch.empty(inputs[0].shape), list[Tensor]()
    for start, rows, length in segments.groups:
        of_group = [_heads_first(x, start, rows, length) for x in inputs]
        found = _ops._scaled_dot_product_flash_attention_for_cpu(*of_group, 0.0, True, scale=scale)
        _heads_first(out, start, rows, length).copy_(found[0])
        kept += found
    return segments.gather_packed(out), kept


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, scale: float, kept: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries and keys, `[T, N + K, D]`, and of values, `[T, K, D]`.

    Args:
        grad: `[T, N, D]`; kept: from `attend_forward` with the same arguments.
    """
    heads = q.shape[1]
    inputs = [segments.spread_gradient(grad), *(segments.spread_groups(x) for x in (q, k, v))]
    joint, d_v = torch.empty(len(inputs[0]), heads + k.shape[1], q.shape[2]), torch.empty(inputs[3].shape)
    rest = iter(kept)
    for start, rows, length in segments.groups:
        of_group = [_heads_first(x, start, rows, length) for x in inputs]
        found = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            *of_group, next(rest), next(rest), 0.0, True, scale=scale
        )
        for total, part in zip((joint[:, :heads], joint[:, heads:], d_v), found, strict=True):
            _heads_first(total, start, rows, length).copy_(part)
    return segments.gather_packed(joint), segments.gather_packed(d_v)


def _heads_first(x: Tensor, start: int, rows: int, length: int) -> Tensor:
    """The rows of a group of `[T, heads, D]` as a view `[rows, heads, length, D]`."""
    return x[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2)


def _attention_forward(
    plan: LayerPlan, x: Tensor, angles: tuple[Tensor, Tensor], norms: Sequence[Any], groups: list[_Linears]
) -> tuple[Tensor, list[Tensor]]:
    """`x + o(attention(norm x))`, and what the backward pass needs."""
    qkv, out = groups[:2]
    normed, inverse = _normalize(x, norms[0], plan.eps[0], plan.dtype)
    down = qkv.project_down(normed)
    tokens, dim = x.shape[0], plan.head_dim
    width, narrow = (weight.shape[0] for weight in qkv.weights[:2])
    heads = width // dim
    raw, values = normed.new_empty(tokens, width + narrow), normed.new_empty(tokens, narrow)
    qkv.forward(normed, down, [raw[:, :width], raw[:, width:], values])
    raw = raw.float().view(tokens, -1, dim)
    values = values.float().view(tokens, -1, dim)
    of_heads: list[Tensor] = []
    rotated = raw
    if norms[2] is not None:
        q, q_inverse = _normalize(raw[:, :heads], norms[2], plan.eps[2], torch.float32)
        k, k_inverse = _normalize(raw[:, heads:], norms[3], plan.eps[3], torch.float32)
        rotated, of_heads = torch.cat((q, k), 1), [raw, q_inverse, k_inverse]
    rotated = _rotate(rotated, *angles)
    queries, keys, exchange = rotated[:, :heads], rotated[:, heads:], get_head_exchange(plan.segments)
    if exchange is not None:
        queries, keys, values = exchange.gather(queries, keys, values)
    attended, probs = attend_forward(queries, keys, values, plan.segments, plan.scale)
    if exchange is not None:
        attended = exchange.scatter(attended)
    attended = _take(attended.view(tokens, width).to(plan.dtype), plan.rows)
    down_out = out.project_down(attended)
    hidden = out.add_to(_take(x, plan.rows), attended, down_out)
    return hidden, [normed, inverse, queries, keys, values, attended, *of_heads, *down, *down_out, *probs]


def _attention_backward(
    plan: LayerPlan,
    grad: Tensor,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    norms: Sequence[Any],
    groups: list[_Linears],
    kept: list[Tensor],
    needs: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:
    """Gradients of `x`, of the norms but the second, and of the linear layers' parts."""
    qkv, out = groups[:2]
    saved = iter(kept)
    normed, inverse, queries, keys, values, attended = (next(saved) for _ in range(6))
    of_heads = [next(saved) for _ in range(3)] if norms[2] is not None else []
    down, down_out = ([next(saved) for _ in group.a] for group in (qkv, out))
    tokens, dim = x.shape[0], plan.head_dim
    heads = attended.shape[1] // dim
    narrow = grad.to(plan.dtype)
    d_attended = out.input_gradient([narrow])
    d_out = out.backward(attended, down_out, [narrow], needs[20:24], d_attended)
    grad, d_attended = (_take_backward(each, plan.rows, tokens) for each in (grad, d_attended))
    d_heads, exchange = d_attended.float().view(tokens, heads, dim), get_head_exchange(plan.segments)
    if exchange is not None:
        d_heads = exchange.gather_gradient(d_heads)
    d_rotated, d_values = attend_backward(d_heads, queries, keys, values, plan.segments, plan.scale, list(saved))
    if exchange is not None:
        d_rotated, d_values = exchange.scatter_gradients(d_rotated, d_values, qkv.weights[1].shape[0] // dim)
    d_raw = _rotate(d_rotated, angles[0], -angles[1])  # the inverse rotation
    d_norms: list[Tensor | None] = [None, None, None]
    if of_heads:
        raw, *inverses = of_heads
        for at, (part, head_inverse) in enumerate(zip((slice(0, heads), slice(heads, None)), inverses, strict=True)):
            found, d_norms[at + 1] = _normalize_backward(
                d_raw[:, part].contiguous(),
                raw[:, part].contiguous(),
                head_inverse,
                norms[2 + at],
                None,
                (True, needs[6 + at]),
            )
            assert found is not None
            d_raw[:, part] = found
    d_joint = d_raw.view(tokens, -1).to(plan.dtype)
    width = heads * dim
    parts = [d_joint[:, :width], d_joint[:, width:], d_values.view(tokens, -1).to(plan.dtype)]
    need_x = needs[1]
    d_normed = qkv.input_gradient(parts) if need_x or needs[4] else None
    d_qkv = qkv.backward(normed, down, parts, needs[8:20], d_normed)
    d_x = None
    if d_normed is not None:
        d_x, d_norms[0] = _normalize_backward(d_normed, x, inverse, norms[0], grad, (need_x, needs[4]))
    return d_x, d_norms, d_qkv + d_out


def _mlp_forward(plan: LayerPlan, x: Tensor, norm: Tensor, groups: list[_Linears]) -> tuple[Tensor, list[Tensor]]:
    """`x + down(silu(gate) * up)` of `norm x`, and what the backward pass needs."""
    gate_up, last = groups[2:]
    normed, inverse = _normalize(x, norm, plan.eps[1], plan.dtype)
    down = gate_up.project_down(normed)
    gate, up = (normed.new_empty(x.shape[0], weight.shape[0]) for weight in gate_up.weights)
    gate_up.forward(normed, down, [gate, up])
    activated = F.silu(gate)
    inner = activated * up
    down_last = last.project_down(inner)
    out = last.add_to(x, inner, down_last)
    return out, [x, normed, inverse, gate, up, activated, inner, *down, *down_last]


def _mlp_backward(
    plan: LayerPlan, grad: Tensor, norm: Tensor, groups: list[_Linears], kept: list[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Gradients of the block's input, of the norm and of the linear layers' parts."""
    gate_up, last = groups[2:]
    x, normed, inverse, gate, up, activated, inner, *downs = kept
    down, down_last = downs[: len(gate_up.a)], downs[len(gate_up.a) :]
    narrow = grad.to(plan.dtype)
    d_inner = last.input_gradient([narrow])
    d_last = last.backward(inner, down_last, [narrow], needs[32:36], d_inner)
    d_gate = torch.ops.aten.silu_backward(d_inner * up, gate)
    d_up = d_inner.mul_(activated)
    d_normed = gate_up.input_gradient([d_gate, d_up])
    d_gate_up = gate_up.backward(normed, down, [d_gate, d_up], needs[24:32], d_normed)
    d_x, d_norm = _normalize_backward(d_normed, x, inverse, norm, grad, (True, needs[5]))
    assert d_x is not None
    return d_x, d_norm, d_gate_up + d_last
