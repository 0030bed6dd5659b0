"""One line of a report: what was looked at, how it is, what was found, what to type."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from anabatic.core.language import Language, LocalizedText

Status = Literal["OK", "WARN", "FAIL", "n/a"]


@dataclass(frozen=True)
class FindingType:
    """An entry of a YAML file of this folder: something that can be true of a machine."""

    id: str
    """`check_name.what`; the first word is the name of the line."""
    status: Status
    result_text: LocalizedText
    fix_text: LocalizedText | None = None

    @property
    def check_name(self) -> str:
        """The name of the line it stands in."""
        return self.id.partition(".")[0]


@dataclass(frozen=True)
class CheckResult:
    """A verdict with the values that this machine gave it."""

    finding_type: FindingType
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        """State."""
        return self.finding_type.status

    def describe_result(self, language: Language) -> str:
        """Observation."""
        return self.finding_type.result_text.render_in(language, self._localize_values(language))

    def describe_fix(self, language: Language) -> str:
        """Fix; empty if there is none."""
        return (
            self.finding_type.fix_text.render_in(language, self._localize_values(language))
            if self.finding_type.fix_text
            else ""
        )

    def _localize_values(self, language: Language) -> dict[str, Any]:
        """The values; a text among them is already whole."""
        return {
            name: getattr(value, language) if isinstance(value, LocalizedText) else value
            for name, value in self.values.items()
        }
