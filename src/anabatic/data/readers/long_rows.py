"""Rows that are too long for a job: skipped and counted; more of them than a stated share are an error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabatic.core import log
from anabatic.core.errors import DataError


@dataclass
class LongRowCounter:
    """Counts the rows of one source that do not fit.

    Attributes:
        source_name: the source, for messages.
        max_tokens: most tokens that a row may have.
        max_fraction: most rows that may be skipped, as a share of all; one row is never too many.
        option: how that share is set.
        count: rows that were skipped; longest_tokens: tokens of the longest of them; first_location: its file and
        row.
    """

    source_name: str
    max_tokens: int
    max_fraction: float
    option: str = "--data.long-share"
    count: int = 0
    longest_tokens: int = 0
    first_location: str = ""

    def count_row(self, tokens: int, place: str = "") -> None:
        """Count one."""
        self.first_location = self.first_location or place
        self.count += 1
        self.longest_tokens = max(self.longest_tokens, tokens)

    def exceeds_limit(self, rows: int) -> bool:
        """Return True if more than the stated share of `rows`, and more than one, are skipped."""
        return self.count > max(1.0, self.max_fraction * rows)

    def check_fraction(self, rows: int, other: str = "") -> None:
        """Warn of what is skipped of `rows` rows.

        Args:
            other: what else can be done about it, as a hint.

        Raises:
            DataError: they are more than the stated share.
        """
        if not self.count:
            return
        description = self._describe_long_rows(rows)
        if self.exceeds_limit(rows):
            limit_text = f"more than {self.option.removeprefix('--').replace('-', '_')} {self.max_fraction:g} allows"
            raise DataError(f"{description}: {limit_text}", self._build_hint(rows, other))
        log.warn(f"{description}; skipped")

    def _describe_long_rows(self, rows: int) -> str:
        first = f", first {self.first_location}" if self.first_location else ""
        return (
            f"{self.source_name}: {self.count:,} of {rows:,} rows ({self.count / max(1, rows):.2%}) are longer than"
            f" {self.max_tokens:,} tokens (the longest has {self.longest_tokens:,}{first})"
        )

    def _build_hint(self, rows: int, other: str) -> str:
        enough = min(1.0, math.ceil(100 * self.count / max(1, rows)) / 100)
        return f"{other + ', or ' if other else ''}pass over all of them with {self.option} {enough:g}"
