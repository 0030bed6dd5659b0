"""Packed attention for Hugging Face models: one function in transformers' attention interface.

The model's forward passes `segments=` (training, scoring) or `cache=` (generation) down to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from anabatic.core.errors import DataError
from anabatic.device.attention import AttentionOptions
from anabatic.device.ops import get_device_ops
from anabatic.device.segments import PackedSegments
from anabatic.models.kv_cache import KVCache

ATTENTION_NAME = "anabatic"
_IGNORED_ARGUMENTS = {"position_ids", "use_cache", "output_attentions", "position_embeddings", "is_causal"}
"""Keyword arguments of layers that do not change their attention."""


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    segments: PackedSegments | None = None,
    cache: KVCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' interface. query `[1, N, T, D]`, key `[1, K, T, D]`, value `[1, K, T, E]` ->
    `[1, T, N, E]`.

    Raises:
        DataError: the model needs a feature that packed attention does not support.
    """
    window = _get_window(module, kwargs)
    _require_supported(module, attention_mask, dropout, kwargs)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    options = AttentionOptions(scale, window, softcap, s_aux)
    device_type = value.device.type
    # Norms and rotary angles in fp32 give fp32 queries and keys; kernels need one dtype, autocast's where it is on.
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else value.dtype
    q, k, v = _flatten_heads(query, dtype), _flatten_heads(key, dtype), _flatten_heads(value, dtype)
    if cache is not None:
        return cache.compute_attention(int(module.layer_idx), q, k, v, options).unsqueeze(0), None  # type: ignore[arg-type]
    if segments is None:
        raise DataError("the packed forward pass needs segments or a cache", "call models.forward, not the model")
    segments.num_attended_layers += 1
    return get_device_ops(q.device.type).attention(q, k, v, segments, options).unsqueeze(0), None


def _flatten_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[1, N, T, D]` -> `[T, N, D]`."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x.squeeze(2) if x.shape[2] == 1 else x.squeeze(0).transpose(0, 1)


def _get_window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the layer's window: most models pass it; otherwise it follows from the layer type in the configuration."""
    if "sliding_window" in kwargs:
        window: int | None = kwargs.pop("sliding_window")
        return window
    config: Any = module.config
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or layer_types[int(module.layer_idx)] != "sliding_attention":  # type: ignore[arg-type]
        return None
    return int(config.sliding_window)


def _require_supported(module: nn.Module, mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse features of a model that packed attention does not support."""
    name = type(module).__name__
    unknown = [key for key, value in kwargs.items() if key not in _IGNORED_ARGUMENTS and value is not None]
    if dropout:
        raise DataError(
            f"{name} drops {dropout:g} of its attention weights, which packed attention does not do",
            "set attention_dropout to 0 in the model's config.json",
        )
    if module.__dict__.get("is_causal", True) is False or kwargs.get("is_causal") is False:
        raise DataError(f"{name} looks forward and backward; packed attention is causal", "use a causal language model")
    if unknown or mask is not None:
        features = ", ".join(sorted(unknown)) or "an attention mask of its own"
        raise DataError(
            f"{name} needs {features}, which packed attention does not know", "use a model of another family"
        )


AttentionInterface.register(ATTENTION_NAME, attention_forward)
