"""Policy for rows that cannot be read: stop the job, or count and skip them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anabatic.core.errors import DataError

SKIP_HINT = "or skip such rows with --tracks.on-bad-row skip"


@dataclass
class BadRowPolicy:
    """The policy, with counts of skipped and changed rows.

    Attributes:
        should_skip: count instead of stopping.
        counts: number of skipped or changed items, by reason.
        examples: messages of the first skipped rows.
    """

    should_skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def report_row(self, message: str, hint: str, kind: str = "rows that cannot be read") -> None:
        """Report one bad row.

        Args:
            message: file, line and error.
            hint: how to fix it.
            kind: reason under which it is counted.

        Raises:
            DataError: rows are not skipped.
        """
        if not self.should_skip:
            raise DataError(message, f"{hint}, {SKIP_HINT}")
        self.counts[kind] += 1
        if len(self.examples) < 5:
            self.examples.append(message)
