"""The decoder of common families as plain function calls on its weights, for generation.

transformers' modules cost more than the products of a small step: calls of modules, keyword arguments, the attention
interface. A model whose parts have the known structure (Llama, Mistral, Qwen2, Qwen3) runs here instead, with queries,
keys and values, and gate and up, as one product each. A probe compares both on the model's own weights; whatever
differs keeps its modules.

Shapes: `T` tokens, `H` hidden size, `N` query heads, `K` key/value heads, `D` head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.cpu_speed.decoder_layer import LINEAR_NAMES, NORM_NAMES
from anabatic.cpu_speed.fused_layers import NormParts, find_norm, find_unknown_part, read_norm, read_parts
from anabatic.cpu_speed.inference_products import InferenceProduct
from anabatic.device.attention import AttentionOptions
from anabatic.device.device import get_free_host_memory
from anabatic.device.ops import DeviceOps, get_device_ops
from anabatic.models import rope_scaling
from anabatic.models.forward import get_body
from anabatic.models.kv_cache import CacheRow, ForwardPlan, KVCache, get_head_sizes
from anabatic.models.lora import multi_adapter
from anabatic.models.lora.multi_adapter import MultiAdapterLinear

_BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_ATTENTION_NAMES = {
    *LINEAR_NAMES[:4], *NORM_NAMES[2:], "shape", "head_dim", "view", "transpose", "apply_rotary_pos_emb", "update",
    "layer_idx", "ALL_ATTENTION_FUNCTIONS", "get_interface", "config", "_attn_implementation",
    "eager_attention_forward", "training", "attention_dropout", "scaling", "sliding_window", "getattr", "reshape",
    "contiguous",
}  # fmt: skip
"""Names in the code of an attention module that does what is done here."""
_LAYER_NAMES = {"self_attn", "mlp", *NORM_NAMES[:2]}
_MAX_TABLE_POSITIONS = 65536
"""Positions whose angles are kept; beyond, they are computed in every step."""
_MAX_COPIED_SHARE = 0.25
"""Of the free memory, that copies of weights may take."""
_PROBE_TOKENS = 5
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.05

Projection = Callable[[Tensor], Tensor]


class _AdaptedProduct:
    """Layers with adapters of requests: their base weights in one product, then the slices of each adapter."""

    def __init__(self, layers: Sequence[MultiAdapterLinear], base: InferenceProduct) -> None:
        self._layers, self._base = list(layers), base

    def multiply(self, x: Tensor) -> Tensor:
        out = self._base.multiply(x)
        offset = 0
        for layer in self._layers:
            end = offset + layer.weight.shape[0]
            layer.add_adapters(x, out[:, offset:end])
            offset = end
        return out


class _ModuleProduct:
    """Layers of other kinds, such as quantized ones, by their own forward."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)

    def multiply(self, x: Tensor) -> Tensor:
        parts = [layer(x) for layer in self._layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class _ProductFactory:
    """Makes the products of a model; `pack`: weights may be copied into a faster layout."""

    def __init__(self, pack: bool) -> None:
        self.pack = pack

    def make_product(self, layers: Sequence[nn.Module]) -> Projection:
        """Return the joint product of layers with the same input."""
        bases: list[Any] = [layer.base if type(layer) is MultiAdapterLinear else layer for layer in layers]
        if not all(type(base) is nn.Linear for base in bases):
            return _ModuleProduct(layers).multiply
        product = InferenceProduct([base.weight for base in bases], [base.bias for base in bases], self.pack)
        if bases == list(layers):
            return product.multiply
        wrapped = [
            layer if isinstance(layer, MultiAdapterLinear) else MultiAdapterLinear(layer, []) for layer in layers
        ]
        return _AdaptedProduct(wrapped, product).multiply


@dataclass(frozen=True)
class _DirectLayer:
    """One decoder layer: its weights and the options of its attention."""

    index: int
    input_norm: NormParts
    qkv: Projection
    head_norms: tuple[NormParts, NormParts] | None
    output: Projection
    inner_norm: NormParts
    gate_up: Projection
    down: Projection
    options: AttentionOptions


class DirectForward:
    """The body and the head of one model; build with `build_direct_forward`."""

    def __init__(
        self, model: PreTrainedModel, layers: list[_DirectLayer], factory: _ProductFactory, table: Any
    ) -> None:
        body: Any = get_body(model)
        self._embed, self._rotary, self._table = body.embed_tokens, body.rotary_emb, table
        self._norm = read_norm(body.norm)
        self._layers = layers
        self._ops: DeviceOps = get_device_ops(model.device.type)
        self._kv_heads, self._head_size, _ = get_head_sizes(model.config.get_text_config())
        self.head = InferenceProduct([model.get_output_embeddings().weight], [None], factory.pack)

    def compute_states(self, plan: ForwardPlan, cache: KVCache) -> Tensor:
        """Return the last hidden states `[T, H]` of the new tokens, and write them to the cache."""
        rms_norm, swiglu = self._ops.rms_norm, self._ops.swiglu_joint
        x = self._embed(plan.input_ids[0])
        cos, sin = self._get_angles(plan, x)
        for layer in self._layers:
            heads = layer.qkv(rms_norm(x, layer.input_norm.weight, layer.input_norm.eps))
            x = x + layer.output(self._attend(layer, heads, cos, sin, cache))
            inner = layer.gate_up(rms_norm(x, layer.inner_norm.weight, layer.inner_norm.eps))
            x += layer.down(swiglu(inner))
        return rms_norm(x, self._norm.weight, self._norm.eps)

    def _attend(self, layer: _DirectLayer, heads: Tensor, cos: Tensor, sin: Tensor, cache: KVCache) -> Tensor:
        """`[T, (N + 2 K) D]` -> `[T, N D]`."""
        heads = heads.unflatten(-1, (-1, self._head_size))
        n, k = heads.shape[1] - 2 * self._kv_heads, self._kv_heads
        turned = heads[:, : n + k]
        if layer.head_norms is not None:
            (q_norm, k_norm), rms_norm = layer.head_norms, self._ops.rms_norm
            q, keys = turned.split_with_sizes((n, k), dim=1)
            turned = torch.cat(
                (rms_norm(q, q_norm.weight, q_norm.eps), rms_norm(keys, k_norm.weight, k_norm.eps)), dim=1
            )
        turned = self._ops.rotary(turned, cos, sin)
        q, keys = turned.split_with_sizes((n, k), dim=1)
        return cache.compute_attention(layer.index, q, keys, heads[:, n + k :], layer.options).flatten(1)

    def _get_angles(self, plan: ForwardPlan, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines `[T, 1, D]`."""
        if self._table is not None:
            rows = self._table.index_select(0, plan.position_ids[0])
            return rows[:, :1], rows[:, 1:]
        cos, sin = self._rotary(x[None], plan.position_ids)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


class _RecordingCache(KVCache):
    """A cache that records the options of each layer's attention."""

    options: dict[int, AttentionOptions]

    def compute_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self.options[layer] = options
        return super().compute_attention(layer, q, k, v, options)


@torch.no_grad()
def build_direct_forward(
    model: PreTrainedModel, run_modules: Callable[[PreTrainedModel, ForwardPlan, KVCache], Tensor], max_len: int
) -> DirectForward | str:
    """Return the direct forward of a model, or why it has none.

    Args:
        run_modules: returns the last hidden states `[T, H]` by the model's own modules.
        max_len: positions at most.
    """
    reason = _find_difference(model)
    if reason:
        return reason
    config = model.config.get_text_config()
    tokens = min(_PROBE_TOKENS, config.vocab_size)
    cache = _RecordingCache(config, 1, _PROBE_TOKENS, model.device, model.dtype)
    cache.options = {}
    first = (config.vocab_size - tokens) // 2  # the first and last entries may be padding, whose states are zero
    row = CacheRow(list(range(first, first + tokens)), 0, [0], [(0, 1)])
    multi_adapter.select_adapters(model, [])
    expected = run_modules(model, _set_plan(cache, row), cache)
    factory = _ProductFactory(_has_room_for_copies(model))
    body: Any = get_body(model)
    layers = [_make_layer(index, layer, factory, cache.options[index]) for index, layer in enumerate(body.layers)]
    table = _make_angle_table(model, max_len)
    direct = DirectForward(model, layers, factory, table)
    for count in (tokens, 1):  # several rows and one have kernels of their own
        part = CacheRow(row.tokens[:count], 0, [0], [(0, 1)])
        out = direct.compute_states(_set_plan(cache, part), cache)
        error = float((out - expected[:count]).norm() / expected[:count].norm().clamp_min(1e-9))
        if not error <= _TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
            return f"its states differ by {error:.2g}"
    return direct


def _has_room_for_copies(model: PreTrainedModel) -> bool:
    size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return size <= _MAX_COPIED_SHARE * get_free_host_memory()


def _set_plan(cache: KVCache, row: CacheRow) -> ForwardPlan:
    cache.forward_plan = ForwardPlan([row], cache)
    return cache.forward_plan


def _find_difference(model: PreTrainedModel) -> str:
    """Return what is unknown about a model's structure; empty: nothing."""
    body: Any = get_body(model)
    if set(body._modules) != _BODY_PARTS:
        return f"{type(model).__name__} has a body of other parts"
    if any(type(weight.data) is not Tensor for weight in model.parameters()):
        return "its weights are divided"
    if any(module._forward_pre_hooks or module._forward_hooks for module in model.modules()):
        return "its modules have hooks"
    if find_norm(body.norm) is None:
        return f"{type(model).__name__} has another last norm"
    for layer in body.layers:
        if unknown_part := find_unknown_part(layer):
            return unknown_part
        unknown = _get_names(layer.self_attn) - _ATTENTION_NAMES | _get_names(layer) - _LAYER_NAMES
        if unknown:
            return f"{type(layer).__name__} computes something else ({', '.join(sorted(unknown))})"
    return ""


def _get_names(module: nn.Module) -> set[str]:
    return set(inspect.unwrap(type(module).forward).__code__.co_names)


def _make_layer(index: int, layer: Any, factory: _ProductFactory, options: AttentionOptions) -> _DirectLayer:
    parts = read_parts(layer)
    input_norm, inner_norm, *head_norms = (None if norm is None else read_norm(norm) for norm in parts.norms)
    q_norm, k_norm = head_norms
    assert input_norm is not None and inner_norm is not None
    return _DirectLayer(
        index,
        input_norm,
        factory.make_product(parts.linears[:3]),
        None if q_norm is None or k_norm is None else (q_norm, k_norm),
        factory.make_product(parts.linears[3:4]),
        inner_norm,
        factory.make_product(parts.linears[4:6]),
        factory.make_product(parts.linears[6:]),
        options,
    )


def _make_angle_table(model: Any, max_len: int) -> Tensor | None:
    """Return cosines and sines of all positions, `[positions, 2, D]`; None: they depend on the length, or are many."""
    if rope_scaling.get_length_limit(model.config.get_text_config()) is not None or max_len > _MAX_TABLE_POSITIONS:
        return None
    positions = torch.arange(max_len, device=model.device)[None]
    like = torch.empty(1, max_len, 1, device=model.device, dtype=model.dtype)
    cos, sin = get_body(model).rotary_emb(like, positions)
    return torch.stack((cos[0], sin[0]), dim=1)
