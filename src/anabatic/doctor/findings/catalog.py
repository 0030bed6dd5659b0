"""All findings, the names of the lines, and `make_result`, by which a check gives one.

Each YAML file of this folder is a group of the report: its title, its lines, and what each line can say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.core.language import LocalizedText
from anabatic.doctor.findings.check_result import CheckResult, FindingType

GROUP_NAMES = ("hardware", "cann", "python", "host")
"""Files of this folder, in the order of the report."""


def _parse_text(entry: dict[str, str] | str) -> LocalizedText:
    """Return a text; what is written once is the same in both languages."""
    return LocalizedText(entry, entry) if isinstance(entry, str) else LocalizedText(**entry)


_GROUPS = [yaml_reader.read_own_yaml(Path(__file__).with_name(f"{name}.yaml")) for name in GROUP_NAMES]

REPORT_GROUPS: tuple[tuple[LocalizedText, dict[str, LocalizedText]], ...] = tuple(
    (_parse_text(group["title"]), {line: _parse_text(entry["name"]) for line, entry in group["lines"].items()})
    for group in _GROUPS
)
"""Groups of the report: title, and the name of each line."""

FINDING_TYPES: dict[str, FindingType] = {
    identity: FindingType(
        identity, entry["status"], _parse_text(entry["text"]), _parse_text(entry["fix"]) if "fix" in entry else None
    )
    for group in _GROUPS
    for line in group["lines"].values()
    for identity, entry in line["findings"].items()
}


def make_result(identity: str, **values: Any) -> CheckResult:
    """Return the finding `identity` with the values of this machine."""
    return CheckResult(FINDING_TYPES[identity], values)
