"""The rules of `variables.yaml`: what may stand in the environment variables of the Ascend stack."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.core.language import LocalizedText


@dataclass(frozen=True)
class ValueRule:
    """Rule for the values of a variable."""

    is_valid: Callable[[str], bool]
    expected: LocalizedText


def match_integer(low: int, high: int) -> ValueRule:
    """Whole numbers from `low` to `high`."""
    text = LocalizedText(f"a whole number from {low} to {high} is expected", f"应为 {low} 到 {high} 的整数")
    return ValueRule(lambda value: re.fullmatch(r"\d{1,12}", value) is not None and low <= int(value) <= high, text)


def match_one_of(*words: str) -> ValueRule:
    """One of a few words."""
    listed = ", ".join(words)
    return ValueRule(lambda value: value in words, LocalizedText(f"one of {listed} is expected", f"应为 {listed} 之一"))


def match_pattern(pattern: str, en: str, zh: str) -> ValueRule:
    """Text of a form."""
    return ValueRule(lambda value: re.fullmatch(pattern, value) is not None, LocalizedText(en, zh))


ANY_VALUE = ValueRule(lambda value: True, LocalizedText("", ""))


@dataclass(frozen=True)
class HarmfulValue:
    """A value that is allowed and still wrong for training."""

    pattern: str
    """A regular expression for the whole value."""
    reason: LocalizedText
    replacement: str = ""
    """The value to set; empty: unset it."""


@dataclass(frozen=True)
class VariableRule:
    """One row."""

    name: str
    value_rule: ValueRule = ANY_VALUE
    raises_on_invalid: bool = False
    """torch_npu throws when the value does not fit."""
    harmful_values: tuple[HarmfulValue, ...] = ()
    replacement: str = ""
    """Value to set instead of an invalid one; empty: unset it."""


def _parse_values(entry: dict[str, Any]) -> ValueRule:
    if "values" in entry:
        return match_one_of(*entry["values"])
    if "range" in entry:
        return match_integer(*entry["range"])
    return match_pattern(**entry["form"]) if "form" in entry else ANY_VALUE


def _parse_rule(name: str, entry: dict[str, Any]) -> VariableRule:
    harmful = tuple(
        HarmfulValue(one["pattern"], LocalizedText(one["en"], one["zh"]), one.get("replacement", ""))
        for one in entry.get("harmful", ())
    )
    return VariableRule(name, _parse_values(entry), entry.get("raises", False), harmful, entry.get("replacement", ""))


VARIABLE_RULES = tuple(
    _parse_rule(name, entry)
    for name, entry in yaml_reader.read_own_yaml(Path(__file__).with_name("variables.yaml")).items()
)

STACK_PREFIX = re.compile(
    r"(ASCEND|HCCL|P2P_HCCL|TORCH|PYTORCH|ACL|NPU|NCCL|OMP|ATB|CANN|RANK_TABLE|HCCN|GLOO|TP_SOCKET)"
)
"""Start of the names that belong to this stack."""
