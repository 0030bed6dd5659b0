"""The one shape in which tokens travel: flat, packed, nothing padded but the tail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

SegmentOrigin = tuple[int, int, int, int, int]
"""A piece of the data: number of its source, of the entry in it, of the pass over it, first input, inputs."""

IGNORE_INDEX = -100
"""Label of a token that is not learned (the value torch's cross_entropy ignores by default)."""


@dataclass
class Batch:
    """A packed micro-batch of `T` tokens in `n` segments that do not see each other.

    Attributes:
        input_ids: int64 `[T]`.
        labels: int64 `[T]`, the token that follows each input token, already shifted; `IGNORE_INDEX` where nothing is
            learned. The label of a segment's last token is the true next token of its document where there is one.
        position_ids: int64 `[T]`, from 0 in every segment.
        cu_seqlens: host list of `n + 1` segment borders, from 0 to `T` (no device sync to read it).
        num_targets: labels that are learned, counted on the host; of preference pairs, the pairs.
        num_tokens: tokens that came from the data (T less the padded tail).
        loader_state: where the loader stands after this batch, JSON-serialisable.
        extra: what else the data say of each segment, by name; first axis: segments that are no padding.
        segment_origins: the pieces, in order.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: list[int]
    num_targets: int
    num_tokens: int
    loader_state: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    segment_origins: list[SegmentOrigin] = field(default_factory=list)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; copies from pinned memory do not block."""
        return Batch(
            self.input_ids.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            self.position_ids.to(device, non_blocking=True),
            self.cu_seqlens,
            self.num_targets,
            self.num_tokens,
            self.loader_state,
            {name: value.to(device, non_blocking=True) for name, value in self.extra.items()},
            self.segment_origins,
        )
