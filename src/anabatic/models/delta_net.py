"""Layers of linear attention by the gated delta rule (Qwen3-Next, Qwen3.5), with documents kept apart.

Transformers' own forward of such a layer runs its convolution and its state over the border of two packed documents.
The forward here computes the same from the module's parts, which checkpoints name; every such layer gets it.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabatic.core.errors import DataError
from anabatic.device.attention import PackedSegments, PackedTrees
from anabatic.device.delta_rule import (
    DeltaInputs,
    DeltaPlan,
    chunk_gated_delta_rule,
    convolve,
    convolve_step,
)
from anabatic.models.delta_states import LayerStates
from anabatic.models.kv_cache import KVCache

_COMMON_PARTS = {"conv1d", "norm", "out_proj"}
_JOINT_PARTS, _SEPARATE_PARTS = {"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
"""Projections of Qwen3-Next and of Qwen3.5."""
_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


def install_delta_layers(model: nn.Module) -> int:
    """Give every layer of the gated delta rule the forward that keeps documents apart; return how many there are."""
    count = 0
    for module in model.modules():
        if is_delta_layer(module):
            module.__dict__["forward"] = types.MethodType(_forward, module)
            count += 1
    model.__dict__["_anabatic_delta_layers"] = count
    return count


def has_delta_layers(model: nn.Module) -> bool:
    """True when `install_delta_layers` found some."""
    return bool(model.__dict__.get("_anabatic_delta_layers"))


def is_delta_layer(module: nn.Module) -> bool:
    """True for a layer whose parts, parameters and sizes are those of Qwen3-Next's or Qwen3.5's `linear_attn`."""
    parts = set(module._modules) - {"act"}  # of transformers before 5.20
    return (
        parts in (_COMMON_PARTS | _JOINT_PARTS, _COMMON_PARTS | _SEPARATE_PARTS)
        and set(module._parameters) == {"dt_bias", "A_log"}
        and all(isinstance(module.__dict__.get(name), int) for name in _SIZES)
        and module.__dict__.get("activation") in ("silu", "swish")
    )


def _forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`[1, T, H]` -> `[1, T, H]`; `segments` and `request_cache` are keyword arguments of the model."""
    segments: PackedSegments | None = kwargs.get("segments")
    cache: KVCache | None = kwargs.get("request_cache")
    if segments is None and cache is None:
        out: Tensor = type(self).forward(self, hidden_states, *args, **kwargs)
        return out
    parts = _project(self, hidden_states.squeeze(0))
    if cache is not None:
        core = cache.run_states(int(self.layer_idx), lambda states: _read_new_tokens(self, parts, states))
    else:
        assert segments is not None
        _require_supported(self, segments)
        segments.num_attended_layers += 1
        plan = get_plan(segments, hidden_states.device)
        mixed, _ = convolve(parts.mixed, *_read_convolution(self), plan)
        core, _ = chunk_gated_delta_rule(_split_inputs(self, F.silu(mixed), parts.write, parts.step), plan)
    return _finish(self, core, parts).unsqueeze(0)


def _read_convolution(module: Any) -> tuple[Tensor, Tensor | None]:
    return module.conv1d.weight.squeeze(1), module.conv1d.bias


def _read_new_tokens(module: Any, parts: _Parts, states: LayerStates) -> Tensor:
    """Return `[T, V, E]` of the new tokens of many requests, and move their states on."""
    plan, cores = states.plan, []
    pieces = [x.split([plan.chunk_tokens, len(x) - plan.chunk_tokens]) for x in (parts.mixed, parts.write, parts.step)]
    (mixed, single_mixed), (write, single_write), (step, single_step) = pieces
    weight, bias = _read_convolution(module)
    if plan.chunks is not None:
        past, before = states.read_chunks()
        mixed, tails = convolve(mixed, weight, bias, plan.chunks, past)
        inputs = _split_inputs(module, F.silu(mixed), write, step)
        core, after = states.kernels.run_chunks(inputs, plan.chunks, plan.lengths_in_int32, before)
        states.write_chunks(tails, after)
        cores.append(core)
    if len(single_mixed):
        mixed, tails = convolve_step(single_mixed, weight, bias, states.read_singles())
        inputs = _split_inputs(module, F.silu(mixed), single_write, single_step)
        cores.append(states.kernels.run_tokens(inputs, states.rule, plan.single_slots, plan.ones))
        states.write_singles(tails)
    return torch.cat(cores)


def get_plan(segments: PackedSegments, device: torch.device) -> DeltaPlan:
    """Return the plan of a batch, which all its layers share."""
    plan: DeltaPlan | None = segments.__dict__.get("delta_plan")
    if plan is None:
        plan = segments.__dict__["delta_plan"] = DeltaPlan(segments.cu_seqlens, device)
    return plan


def _require_supported(module: nn.Module, segments: PackedSegments) -> None:
    name = type(module).__name__
    if segments.exchange is not None:
        raise DataError(
            f"{name} carries a state from token to token, which context parallelism does not pass on yet",
            "set parallel.context to 1",
        )
    if not segments.is_causal:
        raise DataError(f"{name} reads from left to right only", "use a model whose layers are all attention")
    if isinstance(segments, PackedTrees):
        raise DataError(
            f"{name} cannot read texts that share a beginning as one tree", "give each text a row of its own"
        )


class _Parts(NamedTuple):
    """Projections of the tokens.

    Attributes:
        mixed: queries, keys and values before the convolution, `[T, 2 K D + V E]`.
        gate: `[T, V, E]`; write: `[T, V]`, beta before its sigmoid; step: `[T, V]`, before the time step's bias.
    """

    mixed: Tensor
    gate: Tensor
    write: Tensor
    step: Tensor


def _project(module: Any, x: Tensor) -> _Parts:
    """`x`: `[T, H]`."""
    keys, key_size, value_size = module.num_k_heads, module.head_k_dim, module.head_v_dim
    ratio = module.num_v_heads // keys
    if "in_proj_qkv" in module._modules:
        gate = module.in_proj_z(x).unflatten(-1, (-1, value_size))
        return _Parts(module.in_proj_qkv(x), gate, module.in_proj_b(x), module.in_proj_a(x))
    # Qwen3-Next's rows are grouped by key head: its query, its key, its values, its gates.
    sizes = [key_size, key_size, ratio * value_size, ratio * value_size]
    q, k, v, gate = module.in_proj_qkvz(x).unflatten(-1, (keys, -1)).split(sizes, dim=-1)
    write, step = module.in_proj_ba(x).unflatten(-1, (keys, -1)).split([ratio, ratio], dim=-1)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    return _Parts(mixed, gate.reshape(len(x), -1, value_size), write.flatten(1), step.flatten(1))


def _split_inputs(module: Any, mixed: Tensor, write: Tensor, step: Tensor) -> DeltaInputs:
    """`mixed`: `[T, 2 K D + V E]`, after the convolution; `write`, `step`: as of `_Parts`."""
    keys, key_size = module.num_k_heads, module.head_k_dim
    q, k, v = mixed.split([keys * key_size, keys * key_size, module.num_v_heads * module.head_v_dim], dim=-1)
    log_decay = -module.A_log.float().exp() * F.softplus(step.float() + module.dt_bias.float())
    return DeltaInputs(
        q.unflatten(-1, (keys, key_size)),
        k.unflatten(-1, (keys, key_size)),
        v.unflatten(-1, (-1, module.head_v_dim)),
        log_decay,
        write.float().sigmoid(),
    )


def _finish(module: Any, core: Tensor, parts: _Parts) -> Tensor:
    """`core`: `[T, V, E]` -> `[T, H]`."""
    size = core.shape[-1]
    normed = module.norm(core.to(parts.mixed.dtype).reshape(-1, size), parts.gate.reshape(-1, size))
    out: Tensor = module.out_proj(normed.reshape(len(core), -1))
    return out
