"""One line of a report: what was looked at, how it is, what was found, what to type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from anabatic.doctor.language import Language

Status = Literal["OK", "WARN", "FAIL", "n/a"]


@dataclass(frozen=True)
class Text:
    """The same sentence in two languages; `{name}` stands for a value of the line."""

    en: str
    zh: str

    def render(self, language: Language, values: dict[str, Any]) -> str:
        """Return the sentence with its values."""
        return (self.zh if language == "zh" else self.en).format(**values)


@dataclass(frozen=True)
class Verdict:
    """A row of the tables `verdicts_*.py`: something that can be true of a machine."""

    id: str
    """`check.what`; the first word is the name of the line."""
    status: Status
    found: Text
    fix: Text | None = None

    @property
    def check(self) -> str:
        """The name of the line it stands in."""
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class Line:
    """A verdict with the values that this machine gave it."""

    verdict: Verdict
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """How it is."""
        return self.verdict.status

    def found(self, language: Language) -> str:
        """What was seen."""
        return self.verdict.found.render(language, self._in(language))

    def fix(self, language: Language) -> str:
        """What to do; empty when there is nothing."""
        return self.verdict.fix.render(language, self._in(language)) if self.verdict.fix else ""

    def _in(self, language: Language) -> dict[str, Any]:
        """The values; a text among them is already whole."""
        return {
            name: getattr(value, language) if isinstance(value, Text) else value for name, value in self.values.items()
        }


def table(*rows: tuple[str, ...]) -> dict[str, Verdict]:
    """Return the verdicts of rows (id, status, found en, found zh[, fix en[, fix zh]]); a command needs no second."""
    verdicts = {}
    for row in rows:
        identity, status, en, zh, *fix = row
        remedy = Text(fix[0], fix[-1]) if fix else None
        verdicts[identity] = Verdict(identity, _STATUS[status], Text(en, zh), remedy)
    return verdicts


_STATUS: dict[str, Status] = {"OK": "OK", "WARN": "WARN", "FAIL": "FAIL", "n/a": "n/a"}
