"""Layers of linear attention by the gated delta rule (Qwen3-Next, Qwen3.5), with documents kept apart.

Transformers' own forward of such a layer runs its convolution and its state over the border of two packed documents.
The forward here computes the same from the module's parts, which checkpoints name; every such layer gets it.
"""

from __future__ import annotations

import types
from typing import Any

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
from anabatic.models.kv_cache import KVCache
from anabatic.models.linear_attention.delta_heads import (
    HeadWeights,
    TokenInputs,
    gather_channels,
    gather_tokens,
    get_tensor_group,
    read_weights,
)
from anabatic.models.linear_attention.delta_states import LayerStates

CONVOLUTION = "conv1d"
"""Part that every layer of the delta rule has."""
_COMMON_PARTS = {CONVOLUTION, "norm", "out_proj"}
_JOINT_PARTS, _SEPARATE_PARTS = {"in_proj_qkvz", "in_proj_ba"}, {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
"""Projections of Qwen3-Next and of Qwen3.5."""
_PARAMETERS = {"dt_bias", "A_log"}
_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


def list_projections(module: nn.Module) -> list[str]:
    """Return the names of a layer's linear layers; that of the output is the last."""
    return [name for name in module._modules if name in _JOINT_PARTS | _SEPARATE_PARTS] + ["out_proj"]


def install_delta_layers(model: nn.Module) -> int:
    """Give every layer of the gated delta rule the forward that keeps documents apart; return how many there are, with
    those of other stages of a pipeline, whose parameters are not here."""
    count = 0
    for module in model.modules():
        if _is_alike(module) and set(module._parameters) <= _PARAMETERS:
            module.__dict__["forward"] = types.MethodType(_forward, module)
            count += 1
    model.__dict__["_anabatic_delta_layers"] = count
    return count


def has_delta_layers(model: nn.Module) -> bool:
    """True when `install_delta_layers` found some."""
    return bool(model.__dict__.get("_anabatic_delta_layers"))


def find_delta_layers(model: nn.Module) -> list[Any]:
    """Return the layers of the gated delta rule."""
    return [module for module in model.modules() if is_delta_layer(module)]


def is_delta_layer(module: nn.Module) -> bool:
    """True for a layer whose parts, parameters and sizes are those of Qwen3-Next's or Qwen3.5's `linear_attn`."""
    return _is_alike(module) and set(module._parameters) == _PARAMETERS


def _is_alike(module: nn.Module) -> bool:
    parts = set(module._modules) - {"act"}  # of transformers before 5.20
    return (
        parts in (_COMMON_PARTS | _JOINT_PARTS, _COMMON_PARTS | _SEPARATE_PARTS)
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
    inputs, gate = _project(self, hidden_states.squeeze(0))
    if cache is not None:
        core = cache.run_states(int(self.layer_idx), lambda states: _read_new_tokens(self, inputs, states))
    else:
        assert segments is not None
        _require_supported(self, segments)
        segments.num_attended_layers += 1
        core = _read_segments(self, inputs, segments)
    return _finish(self, core.to(inputs.mixed.dtype), gate).unsqueeze(0)


def _read_segments(module: Any, inputs: TokenInputs, segments: PackedSegments) -> Tensor:
    """Return `[T, V, E]` of the tokens of a packed batch; where ranks share it, of those of this rank."""
    weights, exchange, plan = read_weights(module), segments.exchange, get_plan(segments, inputs.mixed.device)
    dtype = inputs.mixed.dtype
    if exchange is not None:
        inputs, weights = gather_tokens(inputs, weights, exchange)
    mixed, _ = convolve(inputs.mixed, weights.convolution, weights.bias, plan)
    core, _ = chunk_gated_delta_rule(_prepare_inputs(weights, mixed, inputs.write, inputs.step), plan)
    return core if exchange is None else exchange.scatter_heads(core.to(dtype))


def _read_new_tokens(module: Any, inputs: TokenInputs, states: LayerStates) -> Tensor:
    """Return `[T, V, E]` of the new tokens of many requests, and move their states on."""
    plan, cores, weights = states.plan, [], read_weights(module)
    pieces = [x.split([plan.chunk_tokens, len(x) - plan.chunk_tokens]) for x in inputs]
    (mixed, single_mixed), (write, single_write), (step, single_step) = pieces
    if plan.chunks is not None:
        past, before = states.read_chunks()
        mixed, tails = convolve(mixed, weights.convolution, weights.bias, plan.chunks, past)
        chunk_inputs = _prepare_inputs(weights, mixed, write, step)
        core, after = states.kernels.run_chunks(chunk_inputs, plan.chunks, plan.lengths_in_int32, before)
        states.write_chunks(tails, after)
        cores.append(core)
    if len(single_mixed):
        mixed, tails = convolve_step(single_mixed, weights.convolution, weights.bias, states.read_singles())
        single_inputs = _prepare_inputs(weights, mixed, single_write, single_step)
        cores.append(states.kernels.run_tokens(single_inputs, states.rule, plan.single_slots, plan.ones))
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
    if not segments.is_causal:
        raise DataError(f"{name} reads from left to right only", "use a model whose layers are all attention")
    if isinstance(segments, PackedTrees):
        raise DataError(
            f"{name} cannot read texts that share a beginning as one tree", "give each text a row of its own"
        )


def _project(module: Any, x: Tensor) -> tuple[TokenInputs, Tensor]:
    """Return what the rule reads of the tokens, and the gates of its outputs: `[T, H]` -> `[T, V, E]`."""
    group, key_size, value_size = get_tensor_group(module), module.head_k_dim, module.head_v_dim
    ratio = module.num_v_heads // module.num_k_heads
    if "in_proj_qkv" in module._modules:
        gate, mixed = module.in_proj_z(x).unflatten(-1, (-1, value_size)), module.in_proj_qkv(x)
        if group.size > 1:
            widths = [module.num_k_heads * key_size] * 2 + [module.num_v_heads * value_size]
            mixed = gather_channels(mixed, widths, group)
        return TokenInputs(mixed, module.in_proj_b(x), module.in_proj_a(x)), gate
    keys = module.num_k_heads // group.size
    # Qwen3-Next's rows are grouped by key head: its query, its key, its values, its gates.
    sizes = [key_size, key_size, ratio * value_size, ratio * value_size]
    q, k, v, gate = module.in_proj_qkvz(x).unflatten(-1, (keys, -1)).split(sizes, dim=-1)
    write, step = module.in_proj_ba(x).unflatten(-1, (keys, -1)).split([ratio, ratio], dim=-1)
    mixed = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
    return TokenInputs(mixed, write.flatten(1), step.flatten(1)), gate.reshape(len(x), -1, value_size)


def _prepare_inputs(weights: HeadWeights, mixed: Tensor, write: Tensor, step: Tensor) -> DeltaInputs:
    """`mixed`: `[T, 2 K D + V E]`, after the convolution; `write`, `step`: as of `TokenInputs`."""
    q, k, v = weights.split_heads(F.silu(mixed), 1)
    log_decay = -weights.decay.float().exp() * F.softplus(step.float() + weights.step_bias.float())
    return DeltaInputs(q, k, v, log_decay, write.float().sigmoid())


def _finish(module: Any, core: Tensor, gate: Tensor) -> Tensor:
    """`core`, `gate`: `[T, V, E]` -> `[T, H]`."""
    size = core.shape[-1]
    normed = module.norm(core.reshape(-1, size), gate.reshape(-1, size))
    out: Tensor = module.out_proj(normed.reshape(len(core), -1))
    return out
