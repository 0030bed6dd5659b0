"""Which tokens of a packed batch belong to which rank of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabatic.core.errors import DataError
from anabatic.parallel.mesh import ContextGroup


class TokenSplit:
    """The runs of tokens of each rank: pieces of the batch, as equal as possible.

    With two pieces for each rank, rank `r` of `C` has the pieces `r` and `2 C - 1 - r`: under a causal mask the last
    piece is the most work and the first the least, so every rank has as much (zig-zag, as in ring attention of
    Megatron-LM and Llama 3, arXiv 2407.21783, section 3.3.2).

    Args:
        tokens: `T`.
        group: ranks that share the batch, and pieces of each.

    Raises:
        DataError: there are fewer tokens than pieces.

    Attributes:
        borders: of the pieces, `C x pieces + 1`.
    """

    def __init__(self, tokens: int, group: ContextGroup) -> None:
        self.group, self.pieces = group, group.pieces
        count = group.size * group.pieces
        if tokens < count:
            raise DataError(
                f"a batch of {tokens} tokens is too short for {group.size} ranks of parallel.context",
                "use longer batches (batch.micro_batch_tokens), or a smaller parallel.context",
            )
        self.borders = [tokens * piece // count for piece in range(count + 1)]

    def list_pieces(self, rank: int) -> list[int]:
        """Return the numbers of a rank's pieces, in ascending order."""
        return [rank] if self.pieces == 1 else [rank, 2 * self.group.size - 1 - rank]

    def find_owner(self, piece: int) -> int:
        """Return the rank that has a piece."""
        return min(piece, 2 * self.group.size - 1 - piece) if self.pieces == 2 else piece

    def list_runs(self, rank: int) -> list[tuple[int, int]]:
        """Return first row and end of each run of a rank."""
        return [(self.borders[piece], self.borders[piece + 1]) for piece in self.list_pieces(rank)]

    @property
    def counts(self) -> list[int]:
        """Tokens of each rank."""
        return [sum(end - start for start, end in self.list_runs(rank)) for rank in range(self.group.size)]

    def take(self, x: Tensor) -> Tensor:
        """Return this rank's rows of `[T, ...]`."""
        parts = [x[start:end] for start, end in self.list_runs(self.group.rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def list_rows(self) -> Tensor:
        """Return the rows of the batch in the order of the ranks, int64 `[T]`."""
        return torch.cat([torch.arange(*run) for rank in range(self.group.size) for run in self.list_runs(rank)])

    def find_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the given rows of the batch this rank has, and their numbers among its own.

        Args:
            rows: int64 `[n]`, on the host.

        Returns:
            int64 `[m]` indices into `rows`, and int64 `[m]`.
        """
        places = torch.full((self.borders[-1],), -1)
        own = self.take(torch.arange(self.borders[-1]))
        places[own] = torch.arange(len(own))
        found = places[rows]
        is_here = (found >= 0).nonzero().squeeze(1)
        return is_here, found[is_here]

    def count_own(self, cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
        """Return length and number of tokens of each run of a segment on this rank, in the order of its tokens.

        Args:
            cu_seqlens: borders of the segments.
        """
        found = []
        for first, end in self.list_runs(self.group.rank):
            for start, stop in zip(cu_seqlens, cu_seqlens[1:], strict=False):
                own = min(stop, end) - max(start, first)
                if own > 0:
                    found.append((stop - start, own))
        return found
