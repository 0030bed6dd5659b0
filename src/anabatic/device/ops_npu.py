"""Operators of torch_npu (op-plugin documentation, TorchNPU 26.2.0). Imported lazily: torch_npu is optional."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import Tensor

from anabatic.core.errors import ConfigError
from anabatic.device.attention import AttentionOptions, PackedSegments, PackedTrees, attention_reference
from anabatic.device.device import Device


@functools.cache
def _import_torch_npu() -> Any:
    import torch_npu

    return torch_npu


@functools.cache
def _causal_mask(device: torch.device) -> Tensor:
    """Return the compressed mask of sparse modes 2 to 4: bool `[2048, 2048]`, True above the diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu_(1)


@functools.cache
def _list_attention_arguments() -> frozenset[str]:
    """Return the names of npu_fusion_attention's arguments, which differ by version."""
    return frozenset(argument.name for argument in torch.ops.npu.npu_fusion_attention.default._schema.arguments)


_SINK_CANN = (8, 5)
"""The first CANN whose attention has sinks (op-plugin, npu_fusion_attention: TorchNPU 7.3.0, CANN 8.5.0)."""


@functools.cache
def explain_plain_sinks() -> str:
    """Return why attention with sinks is composed of plain operators; empty: npu_fusion_attention computes it.

    A CANN whose version cannot be read is taken for one that has them: the operator names what it lacks.
    """
    torch_npu = _import_torch_npu()
    if "sink" not in _list_attention_arguments():
        return f"npu_fusion_attention of torch_npu {torch_npu.__version__} takes no sink"
    numbers = re.findall(r"\d+", torch_npu.npu.utils.get_cann_version())
    if len(numbers) >= 2 and (int(numbers[0]), int(numbers[1])) < _SINK_CANN:
        return f"CANN {'.'.join(numbers[:2])} is older than {'.'.join(map(str, _SINK_CANN))}"
    return ""


def has_infinities() -> bool:
    """False on the first generation and the 310P, which saturate at the largest number."""
    return bool(_import_torch_npu().npu.utils.is_support_inf_nan())


def clear_overflow(buffer: Tensor) -> None:
    """npu_clear_float_status; buffer fp32 `[8]`."""
    _import_torch_npu().npu_clear_float_status(buffer)


def read_overflow(buffer: Tensor) -> Tensor:
    """npu_get_float_status: a scalar that is not 0 after an overflow; buffer fp32 `[8]`."""
    status: Tensor = _import_torch_npu().npu_get_float_status(buffer)
    return status[0]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """npu_rms_norm: one kernel instead of five. It accepts an fp32 weight with a half-precision input."""
    gamma = weight if weight.dtype in (x.dtype, torch.float32) else weight.to(x.dtype)
    out: Tensor = _import_torch_npu().npu_rms_norm(x, gamma, eps)[0]
    return out


def _rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """npu_rotary_mul; x `[B, N, S, D]`, cos and sin `[1, 1, S, D]`.

    Models transpose it from `[B, S, N, D]`: in that order the kernel reads and writes the layout that attention reads.
    """
    transposed = (y.transpose(1, 2) for y in (x, cos.to(x.dtype), sin.to(x.dtype)))
    out: Tensor = _import_torch_npu().npu_rotary_mul(*transposed, mode)
    return out.transpose(1, 2)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split layout."""
    return _rotary_mul(x, cos, sin, "half")


def apply_rotary_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, interleaved layout."""
    return _rotary_mul(x, cos, sin, "interleave")


def apply_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """npu_swiglu: silu(first half) * second half."""
    return apply_swiglu_joint(torch.cat((gate, up), dim=-1))


def apply_swiglu_joint(gate_up: Tensor) -> Tensor:
    """npu_swiglu over `[..., 2 I]`."""
    out: Tensor = _import_torch_npu().npu_swiglu(gate_up)
    return out


def fused_attention(q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments, options: AttentionOptions) -> Tensor:
    """npu_fusion_attention over packed tokens: layout TND, borders as a host list, inside each segment.

    Causal is sparse mode 3; bidirectional is mode 0 without a mask. A window is sparse mode 4: `pre_tockens` keys
    before a query's own, `next_tockens` after it. `sink` is fp32. The kernel supports no softcap, no values wider than
    keys, and in this layout no custom mask: those layers, and trees, use the reference, and so do sinks where
    `explain_plain_sinks` says why.
    """
    is_plain_sink = options.sinks is not None and explain_plain_sinks()
    if options.softcap is not None or is_plain_sink or v.shape[-1] > q.shape[-1] or isinstance(segments, PackedTrees):
        return attention_reference(q, k, v, segments, options)
    borders = segments.cu_seqlens[1:]
    arguments: dict[str, Any] = {"sparse_mode": 3, "atten_mask": _causal_mask(q.device)} if segments.is_causal else {}
    if options.window is not None:
        keys_before = options.window - 1
        arguments = {"sparse_mode": 4, "atten_mask": _causal_mask(q.device), "pre_tockens": keys_before}
        arguments["next_tockens"] = 0 if segments.is_causal else keys_before
    if options.sinks is not None:  # older versions have no such argument
        arguments["sink"] = options.sinks.float()
    out: Tensor = _import_torch_npu().npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "TND",
        scale=options.scale,
        actual_seq_qlen=borders,
        actual_seq_kvlen=borders,
        **arguments,
    )[0]
    return out


def _block_arguments(q: Tensor, k: Tensor, segments: PackedSegments | None) -> dict[str, Any]:
    """Return the arguments of a block of `block_attention.BlockOps`: causal segments, or all queries and all keys.

    Statistics of rows lie as the queries do: otherwise `[T, N, 8]` holds `[N, S, 8]` of one segment after the other.

    Raises:
        ConfigError: torch_npu is older.
    """
    if "softmax_layout" not in _list_attention_arguments():
        raise ConfigError(
            f"npu_fusion_attention of torch_npu {_import_torch_npu().__version__} takes no softmax_layout, which"
            " the ring of parallel.context needs",
            "use torch_npu 7.2.0 with CANN 8.3 or newer, or --parallel.context-method ulysses",
        )
    if segments is None:
        return {"actual_seq_qlen": [q.shape[0]], "actual_seq_kvlen": [k.shape[0]], "softmax_layout": "TND"}
    borders = segments.cu_seqlens[1:]
    mask = {"sparse_mode": 3, "atten_mask": _causal_mask(q.device)}
    return {"actual_seq_qlen": borders, "actual_seq_kvlen": borders, "softmax_layout": "TND", **mask}


def block_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: PackedSegments | None, scale: float
) -> tuple[Tensor, Tensor]:
    """npu_fusion_attention, and the log-sum-exp from its statistics, fp32 `[n, N, 8]`: maximum and sum of each row."""
    options = _block_arguments(q, k, segments)
    out, maximum, total, *_ = _import_torch_npu().npu_fusion_attention(
        q, k, v, q.shape[1], "TND", scale=scale, **options
    )
    return out, maximum[..., 0] + total[..., 0].log()


def block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: PackedSegments | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """npu_fusion_attention_grad with the statistics of the merged rows: as maximum the log-sum-exp, as sum one."""
    maximum = lse.unsqueeze(-1).expand(-1, -1, 8).contiguous()
    d_q, d_k, d_v, *_ = _import_torch_npu().npu_fusion_attention_grad(
        q,
        k,
        v,
        grad,
        q.shape[1],
        "TND",
        softmax_max=maximum,
        softmax_sum=torch.ones_like(maximum),
        attention_in=out,
        scale_value=scale,
        **_block_arguments(q, k, segments),
    )
    return d_q, d_k, d_v


def permute_tokens(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """npu_moe_token_permute: rows sorted by expert, and the position of each choice."""
    rows, positions = _import_torch_npu().npu_moe_token_permute(x, index)
    return rows, positions


def unpermute_tokens(rows: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    """npu_moe_token_unpermute: the weighted sum of each token's rows."""
    out: Tensor = _import_torch_npu().npu_moe_token_unpermute(rows, positions, probs=weights)
    return out


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """npu_chunk_gated_delta_rule: `[T, V, E]` in bf16, and the states after each text, `[n, V, E, D]`.

    Args:
        q, k, v, beta: bf16; log_decay: fp32; initial: `[n, V, E, D]`, fp32 on Ascend 950 alone; lengths: int32 `[n]`.
    """
    takes_fp32 = _import_torch_npu().npu.get_device_name().startswith("Ascend950")
    out, after = _import_torch_npu().npu_chunk_gated_delta_rule(
        q,
        k,
        v,
        beta=beta,
        initial_state=initial if takes_fp32 else initial.bfloat16(),
        actual_seq_lengths=lengths,
        scale=q.shape[-1] ** -0.5,
        g=log_decay,
    )
    return out, after.to(initial.dtype)


def step_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, slots: Tensor, each: Tensor
) -> Tensor:
    """npu_recurrent_gated_delta_rule: one token of each of `T` requests, `[T, V, E]`; the states are updated.

    Args:
        states: bf16 `[S, V, E, D]`; slots: int32 `[T]`, distinct; each: int32 `[T]`, ones, the tokens of a request.
    """
    out: Tensor = _import_torch_npu().npu_recurrent_gated_delta_rule(
        q,
        k,
        v,
        states,
        beta=beta,
        scale=q.shape[-1] ** -0.5,
        actual_seq_lengths=each,
        ssm_state_indices=slots,
        g=log_decay,
    )
    return out


def _npu_grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    """`group_type` 0: groups are rows of x; 2: they are its columns, and the products are stacked."""
    split = 2 if group_type == 0 else 3
    out: Tensor = _import_torch_npu().npu_grouped_matmul(
        [x], [weight], bias=None, group_list=ends, split_item=split, group_type=group_type, group_list_type=0
    )[0]
    return out


class _GroupedMatmul(torch.autograd.Function):
    """Adds the derivative that npu_grouped_matmul lacks (op-plugin, config/derivatives.yaml)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _npu_grouped_matmul(x, weight, ends, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = _npu_grouped_matmul(grad, weight.transpose(1, 2), ends, 0) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1] and weight.stride(-1) == 1:
            d_weight = _npu_grouped_matmul(x.t(), grad, ends, 2)
        elif ctx.needs_input_grad[1]:  # stored transposed: the gradient gets the same layout, without a copy
            d_weight = _npu_grouped_matmul(grad.t(), x, ends, 2).transpose(1, 2)
        return d_x, d_weight, None


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """npu_grouped_matmul: `x [S, in]`, `weight [E, in, out]`, ends of the groups `[E]` on the device -> `[S, out]`."""
    out: Tensor = _GroupedMatmul.apply(x.contiguous(), weight, ends)  # type: ignore[no-untyped-call]
    return out


class OverflowRegister:
    """The status register of a device that saturates."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(8, device=device)

    def clear_flag(self) -> None:
        """Clear the overflow flag."""
        clear_overflow(self._buffer)

    def read_flag(self) -> Tensor:
        """Return an fp32 scalar on the device, without synchronization: 1 after an overflow since `clear_flag`."""
        return read_overflow(self._buffer).ne(0).float()


def open_register(device: Device) -> OverflowRegister | None:
    """Return the register of a device that saturates; None for devices with infinities."""
    if device.type != "npu" or has_infinities():
        return None
    return OverflowRegister(device.torch_device)
