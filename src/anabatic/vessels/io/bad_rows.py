"""What is done with a row that cannot be read: it stops the job, or is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from anabatic.core.errors import DataError

SKIP_HINT = "or skip such rows with --tracks.on-bad-row skip"


@dataclass
class BadRowPolicy:
    """The policy and what it met.

    Attributes:
        should_skip: count instead of stopping.
        counts: everything that was left out or changed, by what it was.
        examples: of skipped rows, the first few messages.
    """

    should_skip: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def report_row(self, message: str, hint: str, kind: str = "rows that cannot be read") -> None:
        """Meet one bad row.

        Args:
            message: file, line and what is wrong.
            hint: how to fix it.
            kind: under which name it is counted.

        Raises:
            DataError: rows are not skipped.
        """
        if not self.should_skip:
            raise DataError(message, f"{hint}, {SKIP_HINT}")
        self.counts[kind] += 1
        if len(self.examples) < 5:
            self.examples.append(message)
