"""How Hugging Face models reach our attention: one function in transformers' attention interface.

The model's forward passes `segments=` (training, scoring) or `cache=` (generating) down to here.
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
"""What layers hand down to their attention and what changes nothing in it."""


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
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface. query `[1, N, T, D]`, key `[1, K, T, D]`, value `[1, K, T, E]` ->
    `[1, T, N, E]`.

    Raises:
        DataError: the model asks for something that packed attention does not do.
    """
    window = _get_window(module, others)
    _require_supported(module, attention_mask, dropout, others)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    scores = AttentionOptions(scale, window, softcap, s_aux)
    kind = value.device.type
    # Norms and angles in fp32 make wide queries and keys; kernels want one type, autocast's where it is on.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
    q, k, v = _flatten_heads(query, dtype), _flatten_heads(key, dtype), _flatten_heads(value, dtype)
    if cache is not None:
        return cache.compute_attention(int(module.layer_idx), q, k, v, scores).unsqueeze(0), None  # type: ignore[arg-type]
    if segments is None:
        raise DataError("the packed forward pass needs segments or a cache", "call models.forward, not the model")
    segments.num_attended_layers += 1
    return get_device_ops(q.device.type).attention(q, k, v, segments, scores).unsqueeze(0), None


def _flatten_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`[1, N, T, D]` -> `[T, N, D]`."""
    if x.dtype != dtype:
        x = x.to(dtype)
    return x.squeeze(2) if x.shape[2] == 1 else x.squeeze(0).transpose(0, 1)


def _get_window(module: nn.Module, others: dict[str, Any]) -> int | None:
    """The layer's window: most models hand it down; where they do not, the layer's type in the configuration says."""
    if "sliding_window" in others:
        window: int | None = others.pop("sliding_window")
        return window
    config: Any = module.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None or kinds[int(module.layer_idx)] != "sliding_attention":  # type: ignore[arg-type]
        return None
    return int(config.sliding_window)


def _require_supported(module: nn.Module, mask: Any, dropout: float, others: dict[str, Any]) -> None:
    """Packed attention must not leave out what a model asks for."""
    name = type(module).__name__
    unknown = [key for key, given in others.items() if key not in _IGNORED_ARGUMENTS and given is not None]
    if dropout:
        raise DataError(
            f"{name} drops {dropout:g} of its attention weights, which packed attention does not do",
            "set attention_dropout to 0 in the model's config.json",
        )
    if module.__dict__.get("is_causal", True) is False or others.get("is_causal") is False:
        raise DataError(f"{name} looks forward and backward; packed attention is causal", "use a causal language model")
    if unknown or mask is not None:
        what = ", ".join(sorted(unknown)) or "an attention mask of its own"
        raise DataError(f"{name} needs {what}, which packed attention does not know", "use a model of another family")


AttentionInterface.register(ATTENTION_NAME, attention_forward)
