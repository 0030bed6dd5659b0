"""States of running requests in layers of the gated delta rule: one of a fixed size for each request and layer.

Shapes: `S` slots, one of each running request; `D` size of a key, `E` of a value, `V` value heads, `width` of the
convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anabatic.device.delta_kernels import DeltaKernels, RuleShape, choose_delta_kernels
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
    rule: RuleShape


def _read_sizes(config: Any, ranks: int = 1) -> _Sizes:
    """Return the shapes on one of the ranks that divide the heads."""
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    key_heads, value_heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
    channels = 2 * key_heads * key + value_heads * value
    return _Sizes((config.linear_conv_kernel_dim - 1, channels), RuleShape(key_heads, value_heads, key, value))


def choose_kernels(config: Any, device: torch.device, dtype: torch.dtype, ranks: int = 1) -> DeltaKernels:
    """Return what runs the rule of a model's layers in generation, on one of the ranks that divide the heads."""
    return choose_delta_kernels(
        _read_sizes(config, ranks).rule, dtype, device, getattr(config, "mamba_ssm_dtype", None)
    )


def bytes_per_request(config: Any, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes of the states of a request, whatever its length."""
    layers = len(list_delta_layers(config))
    if not layers:
        return 0
    (rows, channels), rule = _read_sizes(config)
    width = choose_kernels(config, device, dtype).state_dtype.itemsize
    elements = rule.value_heads * rule.key_size * rule.value_size
    return int(layers * (rows * channels * dtype.itemsize + width * elements))


class StatePlan:
    """Which states the new tokens of a forward pass read and write.

    Args:
        slots: of the rows, in token order.
        starts: tokens of each request before its new ones.
        counts: new tokens of each row; rows of one token that continue a request come last.

    Attributes:
        chunks: plan of the rows before those; None: there are none.
        chunk_tokens: their tokens; chunk_lengths: int64 `[n]`, on the device.
    """

    def __init__(
        self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device
    ) -> None:
        pieces = list(zip(starts, counts, strict=True))
        rows = next((row for row, (start, count) in enumerate(pieces) if start > 0 and count == 1), len(pieces))
        borders = [sum(counts[:row]) for row in range(rows + 1)]
        self.chunk_tokens = borders[-1]
        self.chunks = DeltaPlan(borders, device) if rows else None
        told = [*slots, *(int(start > 0) for start in starts[:rows]), *counts[:rows]]
        self.chunk_slots, self.single_slots, self.continues, self.chunk_lengths = send_to_device(
            torch.tensor(told), device
        ).split([rows, len(slots) - rows, rows, rows])

    @functools.cached_property
    def lengths_in_int32(self) -> Tensor:
        """`chunk_lengths` as operators take them; all layers share it."""
        return self.chunk_lengths.int()

    @functools.cached_property
    def ones(self) -> Tensor:
        """One for each row of one token, int32."""
        return torch.ones_like(self.single_slots, dtype=torch.int32)


class LayerStates:
    """The states of one layer.

    Attributes:
        convolution: `[S, width - 1, channels]`; rule: of `kernels`, which run the rule.
        plan: of the running forward pass.

    Args:
        ranks: that divide the heads.
    """

    def __init__(self, config: Any, slots: int, device: torch.device, dtype: torch.dtype, ranks: int = 1) -> None:
        sizes = _read_sizes(config, ranks)
        self.convolution = torch.zeros(slots, *sizes.convolution, device=device, dtype=dtype)
        self.kernels = choose_kernels(config, device, dtype, ranks)
        self.rule = self.kernels.allocate_states(slots, sizes.rule, device)
        self.plan: StatePlan

    def read_chunks(self) -> tuple[Tensor, Tensor]:
        """Return both states of each row of the chunks, zero where a request begins."""
        slots, kept = self.plan.chunk_slots, self.plan.continues
        past, before = self.convolution.index_select(0, slots), self.rule.index_select(0, slots)
        # Not a product: what an ended request has left may be NaN.
        return past.where(kept[:, None, None] > 0, 0), before.where(kept[:, None, None, None] > 0, 0)

    def write_chunks(self, convolution: Tensor, rule: Tensor) -> None:
        """Keep the states after the chunks."""
        self._write_convolution(self.plan.chunk_slots, convolution)
        self.rule.index_copy_(0, self.plan.chunk_slots, rule.to(self.rule.dtype))

    def read_singles(self) -> Tensor:
        """Return the convolution's state of each row of one token."""
        return self.convolution.index_select(0, self.plan.single_slots)

    def write_singles(self, convolution: Tensor) -> None:
        """Keep the convolution's state after these tokens; `kernels` keep the rule's."""
        self._write_convolution(self.plan.single_slots, convolution)

    def _write_convolution(self, slots: Tensor, convolution: Tensor) -> None:
        self.convolution.index_copy_(0, slots, convolution.to(self.convolution.dtype))
