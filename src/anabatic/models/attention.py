"""How Hugging Face models reach our attention: one function in transformers' attention interface.

The model's forward passes `segments=` (training, scoring, prefill) or `cache=` alone (decoding) down to here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from anabatic.core.errors import DataError
from anabatic.device.ops import for_device
from anabatic.device.segments import Segments

NAME = "anabatic"


class KVCache:
    """Keys and values of up to `slots` conversations, `max_len` tokens each, allocated once.

    `write` and `slots_now` say where the tokens of the running forward pass go; the caller sets them.
    """

    def __init__(self, config: Any, slots: int, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, slots, max_len, heads, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.slots = slots
        self.max_len = max_len
        self.lengths = [0] * slots
        self.write: tuple[Tensor, Tensor]
        self.read: Tensor
        self.mask: Tensor

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store `[T, K, D]` keys and values of the running tokens at their slots and positions."""
        self.keys[layer].index_put_(self.write, keys.to(self.keys.dtype))
        self.values[layer].index_put_(self.write, values.to(self.values.dtype))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: Segments | None = None,
    cache: KVCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface. query `[1, N, T, D]`, key and value `[1, K, T, D]` -> `[1, T, N, D]`.

    Raises:
        DataError: the model asks for something that packed attention does not do.
    """
    if module.__dict__.get("sliding_window") is not None:
        raise DataError(f"layer {module.layer_idx} uses a sliding window, which packed attention does not have yet")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if cache is not None:
        cache.put(int(module.layer_idx), k, v)  # type: ignore[arg-type]
    if segments is not None:
        return for_device(q.device.type).attention(q, k, v, segments, scale).unsqueeze(0), None
    if cache is None:
        raise DataError("the packed forward pass needs segments or a cache", "call models.forward, not the model")
    return _decode(int(module.layer_idx), q, cache, scale), None  # type: ignore[arg-type]


def _decode(layer: int, q: Tensor, cache: KVCache, scale: float) -> Tensor:
    """One new token for each of `B` conversations: q `[B, N, D]` against the cached `[B, L, K, D]`."""
    length = cache.mask.shape[-1]
    keys = cache.keys[layer, :, :length].index_select(0, cache.read).transpose(1, 2)
    values = cache.values[layer, :, :length].index_select(0, cache.read).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q.unsqueeze(2),
        keys.to(q.dtype),
        values.to(q.dtype),
        attn_mask=cache.mask,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out.squeeze(2).unsqueeze(0)


AttentionInterface.register(NAME, attention_forward)
