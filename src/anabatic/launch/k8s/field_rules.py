"""Rules for the fields of a manifest: what is no text, number, list or known key is reported with its path."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class FieldRule(Protocol):
    """Rule for one value."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        """Yield one line about each fault of the value at `path`."""
        ...


@dataclass(frozen=True)
class TextRule:
    """A text that matches a pattern in full."""

    description: str = "a text"
    pattern: str = r"(?s:.+)"
    max_chars: int = 1 << 20
    """Most characters."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{path} is {value!r}, not a text"
        elif len(value) > self.max_chars:
            yield f"{path} has {len(value)} characters, at most {self.max_chars} are allowed"
        elif not re.fullmatch(self.pattern, value):
            yield f"{path} is {value!r}, not {self.description}"


@dataclass(frozen=True)
class IntegerRule:
    """A whole number."""

    minimum: int = 0
    maximum: int = 2**31 - 1

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{path} is {value!r}, not a whole number"
        elif not self.minimum <= value <= self.maximum:
            yield f"{path} is {value}, not within {self.minimum} and {self.maximum}"


@dataclass(frozen=True)
class BooleanRule:
    """True or false."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, bool):
            yield f"{path} is {value!r}, neither true nor false"


@dataclass(frozen=True)
class ChoiceRule:
    """One of a few texts."""

    choices: tuple[str, ...]

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if value not in self.choices:
            yield f"{path} is {value!r}, not one of {', '.join(self.choices)}"


@dataclass(frozen=True)
class ListRule:
    """A list; `unique_field` names a field whose values must differ between entries."""

    item_rule: FieldRule
    min_items: int = 0
    unique_field: str = ""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{path} is {value!r}, not a list"
            return
        if len(value) < self.min_items:
            yield f"{path} has {len(value)} entries, at least {self.min_items} are needed"
        for index, item in enumerate(value):
            yield from self.item_rule.find_faults(item, f"{path}[{index}]")
        names = [item.get(self.unique_field) for item in value if isinstance(item, dict)] if self.unique_field else []
        for name in sorted({str(name) for name in names if names.count(name) > 1}):
            yield f"{path} has {self.unique_field} {name!r} twice"


@dataclass(frozen=True)
class MapRule:
    """A map with keys chosen by the user; `known` has stricter rules for some of them."""

    key_rule: FieldRule
    value_rule: FieldRule
    known: Mapping[str, FieldRule] = field(default_factory=dict)
    max_bytes: int = 1 << 20
    """Most bytes of all keys and values together, in UTF-8."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a map"
            return
        for name, item in value.items():
            if key_faults := list(self.key_rule.find_faults(name, f"{path}: the key")):
                yield from key_faults  # a path with this key in it could be any text
            else:
                yield from self.known.get(name, self.value_rule).find_faults(item, f"{path}.{name}")
        texts = (text for pair in value.items() for text in pair if isinstance(text, str))
        size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if size > self.max_bytes:
            yield f"{path} has {size} bytes, at most {self.max_bytes} are allowed"


@dataclass(frozen=True)
class ObjectRule:
    """A map with known keys; exactly one of `exactly_one_of` must be present."""

    required: Mapping[str, FieldRule] = field(default_factory=dict)
    optional: Mapping[str, FieldRule] = field(default_factory=dict)
    exactly_one_of: tuple[str, ...] = ()

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a map"
            return
        known = {**self.required, **self.optional}
        yield from (f"{path}.{name} is missing" for name in self.required if name not in value)
        if self.exactly_one_of and (count := sum(name in value for name in self.exactly_one_of)) != 1:
            yield f"{path} has {count} of {', '.join(self.exactly_one_of)}, exactly one is needed"
        for name, item in value.items():
            if name in known:
                yield from known[name].find_faults(item, f"{path}.{name}")
            else:
                yield f"{path}.{name} is not a field that is known there"
