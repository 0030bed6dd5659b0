"""What runs the gated delta rule in generation: torch_npu's operators where they can, else plain torch and why.

The operators compute the rule of `delta_rule.py` and have no gradient (op-plugin, npu_chunk_gated_delta_rule and
npu_recurrent_gated_delta_rule): queries, keys and values in bf16 and normalised, a state as `[E, D]`. Letters as in
`delta_rule.py`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from anabatic.device import ops_npu
from anabatic.device.delta_rule import (
    DeltaInputs,
    DeltaPlan,
    chunk_gated_delta_rule,
    normalise_keys,
    step_gated_delta_rule,
)
from anabatic.device.table import DEVICES

_LIMITS = {"prompts": (64, 128), "tokens": (256, 512)}
"""Most heads and largest size of a head of the two operators (their documentation)."""


class RuleShape(NamedTuple):
    """`K`, `V`, `D` and `E` of a model."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int


class DeltaKernels(NamedTuple):
    """What runs the rule.

    Attributes:
        plain_prompts: why prompts are read by plain torch; empty: npu_chunk_gated_delta_rule reads them.
        plain_tokens: why single tokens are; empty: npu_recurrent_gated_delta_rule reads them, which updates states in
            bf16 where they lie.
    """

    plain_prompts: str
    plain_tokens: str

    @property
    def state_dtype(self) -> torch.dtype:
        """In which states are kept between the steps."""
        return torch.float32 if self.plain_tokens else torch.bfloat16

    def allocate_states(self, slots: int, shape: RuleShape, device: torch.device) -> Tensor:
        """Return zero states: `[slots, V, D, E]`, or `[slots, V, E, D]` as the operator of single tokens takes them."""
        sizes = (shape.key_size, shape.value_size)
        sizes = sizes if self.plain_tokens else sizes[::-1]
        return torch.zeros(slots, shape.value_heads, *sizes, dtype=self.state_dtype, device=device)

    def run_chunks(
        self, inputs: DeltaInputs, plan: DeltaPlan, lengths: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the rule over new tokens of requests.

        Args:
            lengths: int32 `[n]`, on the device, new tokens of each request; before: their states, as they are kept.

        Returns:
            `[T, V, E]`, and the states after the tokens, as they are kept.
        """
        if self.plain_prompts:
            out, after = chunk_gated_delta_rule(inputs, plan, before if self.plain_tokens else before.mT)
            return out, after if self.plain_tokens else after.mT
        initial = before.mT.contiguous() if self.plain_tokens else before
        out, after = ops_npu.chunk_delta_rule(*_prepare(inputs), initial, lengths)
        return out, after.mT if self.plain_tokens else after

    def run_tokens(self, inputs: DeltaInputs, states: Tensor, slots: Tensor, each: Tensor) -> Tensor:
        """Run the rule over one token of each of `T` requests and update their states; return `[T, V, E]`.

        Args:
            states: of all requests, as they are kept; slots: int64 `[T]`, of these; each: int32 `[T]`, ones.
        """
        if not self.plain_tokens:
            return ops_npu.step_delta_rule(*_prepare(inputs), states, slots.int(), each)
        out, after = step_gated_delta_rule(inputs, states.index_select(0, slots))
        states.index_copy_(0, slots, after)
        return out

    def __str__(self) -> str:
        prompts, tokens = (
            f"plain torch ({reason})" if reason else name
            for name, reason in (
                ("npu_chunk_gated_delta_rule", self.plain_prompts),
                ("npu_recurrent_gated_delta_rule, states in bf16", self.plain_tokens),
            )
        )
        if prompts == tokens:
            return f"linear attention: {prompts}"
        return f"linear attention: prompts by {prompts}; tokens by {tokens}"


def _prepare(inputs: DeltaInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k = (normalise_keys(x.float()).bfloat16() for x in (inputs.q, inputs.k))
    return q, k, inputs.v.bfloat16().contiguous(), inputs.log_decay.float().contiguous(), inputs.beta.bfloat16()


def choose_delta_kernels(
    shape: RuleShape, dtype: torch.dtype, device: torch.device, state_dtype: str | None
) -> DeltaKernels:
    """Choose for a model.

    Args:
        dtype: of the model; state_dtype: that its configuration names for states (`mamba_ssm_dtype`; vLLM, too, takes
            the model's own where there is none).
    """
    if DEVICES[device.type].kernels != "npu":
        reason = f"no fused operator on {device.type}"
        return DeltaKernels(reason, reason)
    if dtype != torch.bfloat16:
        reason = f"the operators take bfloat16, and the model is in {str(dtype).removeprefix('torch.')}"
        return DeltaKernels(reason, reason)
    reasons = []
    for kind, (most_heads, largest) in _LIMITS.items():
        reason = ""
        if max(shape.key_heads, shape.value_heads) > most_heads or max(shape.key_size, shape.value_size) > largest:
            heads = f"{shape.key_heads} and {shape.value_heads} of {shape.key_size} and {shape.value_size}"
            reason = f"the operator takes {most_heads} heads of {largest} elements, the model has {heads}"
        elif kind == "tokens" and state_dtype not in (None, "bfloat16"):
            reason = f"config.json asks for states in {state_dtype}, and the operator keeps bfloat16"
        reasons.append(reason or _try_operator(kind, shape, device))
    return DeltaKernels(*reasons)


@functools.cache
def _try_operator(kind: str, shape: RuleShape, device: torch.device) -> str:
    """Return why an operator does not run on one token of a model's shape here; empty: it does.

    Old versions lack it, and some versions of CANN lack it for a chip.
    """
    q = torch.zeros(1, shape.key_heads, shape.key_size, dtype=torch.bfloat16, device=device)
    v = torch.zeros(1, shape.value_heads, shape.value_size, dtype=torch.bfloat16, device=device)
    beta = torch.zeros(1, shape.value_heads, dtype=torch.bfloat16, device=device)
    states = v.new_zeros(1, shape.value_heads, shape.value_size, shape.key_size)
    one = torch.ones(1, dtype=torch.int32, device=device)
    try:
        if kind == "prompts":
            ops_npu.chunk_delta_rule(q, q, v, beta.float(), beta, states, one)
        else:
            ops_npu.step_delta_rule(q, q, v, beta.float(), beta, states, one - 1, one)
        torch.accelerator.synchronize(device)
    except (AttributeError, RuntimeError) as error:
        return str(error).strip().partition("\n")[0]
    return ""
