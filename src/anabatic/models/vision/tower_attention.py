"""Attention of towers: all pictures of a micro-batch are one sequence of segments, as the decoder's rows are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from anabatic.device.attention import AttentionOptions, PackedSegments
from anabatic.device.ops import get_device_ops

TOWER_ATTENTION = "anabatic_flash_segments"
"""Towers give borders of segments only to implementations with `flash` in their name (transformers, utils/generic.py,
is_flash_attention_requested); to others they give one picture after the other."""


class TowerSegments:
    """Plans of a tower's segments, by the borders that its layers are called with.

    Args:
        plans: borders as a tensor, and on the host.
    """

    def __init__(self, plans: list[tuple[Tensor, list[int]]], device: torch.device) -> None:
        self._plans = [(borders, PackedSegments(listed, device, causal=False)) for borders, listed in plans]
        self._device = device

    def find_plan(self, borders: Tensor) -> PackedSegments:
        """Return the plan for the borders of a layer."""
        for known, plan in self._plans:
            if known is borders:
                return plan
        plan = PackedSegments(borders.tolist(), self._device, causal=False)  # waits for the device, once
        self._plans.append((borders, plan))
        return plan


def attend_in_tower(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    tower_segments: TowerSegments | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' interface: query, key and value `[1, N, T, D]` -> `[1, T, N, D]`."""
    assert tower_segments is not None and cu_seq_lens_q is not None and attention_mask is None
    device_type = value.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else value.dtype
    q, k, v = (x.to(dtype).squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    plan = tower_segments.find_plan(cu_seq_lens_q)
    out = get_device_ops(device_type).attention(q, k, v, plan, AttentionOptions(scale, None, None, None))
    return out.unsqueeze(0), None


AttentionInterface.register(TOWER_ATTENTION, attend_in_tower)
