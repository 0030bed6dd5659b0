"""States of running requests in layers of the gated delta rule: one of a fixed size for each request and layer.

Shapes: `S` slots, one of each running request; `D` size of a key, `E` of a value, `V` value heads, `width` of the
convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabatic.device.delta_rule import DeltaPlan
from anabatic.device.device import send_to_device

LAYER_KIND = "linear_attention"
"""Name of such a layer in `layer_types` of a configuration."""


def list_attention_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that keep keys and values."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [number for number, kind in enumerate(kinds) if kind != LAYER_KIND]


def list_delta_layers(config: Any) -> list[int]:
    """Return the numbers of the layers that keep a state."""
    kinds = getattr(config, "layer_types", None) or ()
    return [number for number, kind in enumerate(kinds) if kind == LAYER_KIND]


class _Sizes(NamedTuple):
    """Shapes of a request's state in one layer."""

    convolution: tuple[int, int]
    """`[width - 1, channels]`, the last inputs of the convolution."""
    rule: tuple[int, int, int]
    """`[V, D, E]`, fp32."""


def _read_sizes(config: Any, ranks: int = 1) -> _Sizes:
    """Return the shapes on one of the ranks that divide the heads."""
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    key_heads, value_heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
    channels = 2 * key_heads * key + value_heads * value
    return _Sizes((config.linear_conv_kernel_dim - 1, channels), (value_heads, key, value))


def bytes_per_request(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the states of a request, whatever its length."""
    layers = len(list_delta_layers(config))
    if not layers:
        return 0
    (rows, channels), (heads, key, value) = _read_sizes(config)
    return layers * (rows * channels * dtype.itemsize + 4 * heads * key * value)


class StatePlan:
    """Which states the new tokens of a forward pass read and write.

    Args:
        slots: of the rows, in token order.
        starts: tokens of each request before its new ones.
        counts: new tokens of each row; rows of one token that continue a request come last.

    Attributes:
        chunks: plan of the rows before those; None: there are none.
        chunk_tokens: their tokens.
    """

    def __init__(
        self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        pieces = list(zip(starts, counts, strict=True))
        rows = next((row for row, (start, count) in enumerate(pieces) if start > 0 and count == 1), len(pieces))
        borders = [sum(counts[:row]) for row in range(rows + 1)]
        self.chunk_tokens = borders[-1]
        self.chunks = DeltaPlan(borders, device) if rows else None
        on_device = send_to_device(torch.tensor([*slots, *(int(start > 0) for start in starts[:rows])]), device)
        self.chunk_slots, self.single_slots, self.continues = on_device.split([rows, len(slots) - rows, rows])


class LayerStates:
    """The states of one layer.

    Attributes:
        convolution: `[S, width - 1, channels]`; rule: fp32 `[S, V, D, E]`.
        plan: of the running forward pass.

    Args:
        ranks: that divide the heads.
    """

    def __init__(self, config: Any, slots: int, device: torch.device, dtype: torch.dtype, ranks: int = 1) -> None:
        sizes = _read_sizes(config, ranks)
        self.convolution = torch.zeros(slots, *sizes.convolution, device=device, dtype=dtype)
        self.rule = torch.zeros(slots, *sizes.rule, device=device)
        self.plan: StatePlan

    def read_chunks(self) -> tuple[Tensor, Tensor]:
        """Return both states of each row of the chunks, zero where a request begins."""
        slots, kept = self.plan.chunk_slots, self.plan.continues
        past, before = self.convolution.index_select(0, slots), self.rule.index_select(0, slots)
        # Not a product: what an ended request has left may be NaN.
        return past.where(kept[:, None, None] > 0, 0), before.where(kept[:, None, None, None] > 0, 0)

    def write_chunks(self, convolution: Tensor, rule: Tensor) -> None:
        """Keep the states after the chunks."""
        self._write(self.plan.chunk_slots, convolution, rule)

    def read_singles(self) -> tuple[Tensor, Tensor]:
        """Return both states of each row of one token."""
        slots = self.plan.single_slots
        return self.convolution.index_select(0, slots), self.rule.index_select(0, slots)

    def write_singles(self, convolution: Tensor, rule: Tensor) -> None:
        """Keep the states after these tokens."""
        self._write(self.plan.single_slots, convolution, rule)

    def _write(self, slots: Tensor, convolution: Tensor, rule: Tensor) -> None:
        self.convolution.index_copy_(0, slots, convolution.to(self.convolution.dtype))
        self.rule.index_copy_(0, slots, rule)
