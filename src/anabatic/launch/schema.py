"""What a field of a manifest may hold, as data, and a check that names every field that does not fit.

Stricter than the API server, which drops fields that it does not know: here an unknown field is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class Rule(Protocol):
    """What one value may be."""

    def faults(self, value: Any, path: str) -> Iterator[str]:
        """Yield one line about each thing that is wrong with the value at `path`."""
        ...


@dataclass(frozen=True)
class Text:
    """A text that a pattern describes as a whole."""

    what: str = "a text"
    pattern: str = r"(?s:.+)"
    most: int = 1 << 20
    """Characters."""

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{path} is {value!r}, not a text"
        elif len(value) > self.most:
            yield f"{path} has {len(value)} characters, at most {self.most} are allowed"
        elif not re.fullmatch(self.pattern, value):
            yield f"{path} is {value!r}, not {self.what}"


@dataclass(frozen=True)
class Whole:
    """A whole number."""

    least: int = 0
    most: int = 2**31 - 1

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{path} is {value!r}, not a whole number"
        elif not self.least <= value <= self.most:
            yield f"{path} is {value}, not within {self.least} and {self.most}"


@dataclass(frozen=True)
class Flag:
    """True or false."""

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, bool):
            yield f"{path} is {value!r}, neither true nor false"


@dataclass(frozen=True)
class OneOf:
    """One of a few texts."""

    choices: tuple[str, ...]

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if value not in self.choices:
            yield f"{path} is {value!r}, not one of {', '.join(self.choices)}"


@dataclass(frozen=True)
class ListOf:
    """A list; `unique` names a field that no two of its entries share."""

    of: Rule
    least: int = 0
    unique: str = ""

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{path} is {value!r}, not a list"
            return
        if len(value) < self.least:
            yield f"{path} has {len(value)} entries, at least {self.least} are needed"
        for index, one in enumerate(value):
            yield from self.of.faults(one, f"{path}[{index}]")
        names = [one.get(self.unique) for one in value if isinstance(one, dict)] if self.unique else []
        for name in sorted({str(name) for name in names if names.count(name) > 1}):
            yield f"{path} has {self.unique} {name!r} twice"


@dataclass(frozen=True)
class MapOf:
    """A map whose keys are chosen by the user."""

    key: Rule
    value: Rule

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a map"
            return
        for name, one in value.items():
            yield from self.key.faults(name, f"{path}: the key")
            yield from self.value.faults(one, f"{path}.{name}")


@dataclass(frozen=True)
class Fields:
    """A map whose keys are known; exactly one of `either` has to be there."""

    required: Mapping[str, Rule] = field(default_factory=dict)
    optional: Mapping[str, Rule] = field(default_factory=dict)
    either: tuple[str, ...] = ()

    def faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a map"
            return
        known = {**self.required, **self.optional}
        yield from (f"{path}.{name} is missing" for name in self.required if name not in value)
        if self.either and (count := sum(name in value for name in self.either)) != 1:
            yield f"{path} has {count} of {', '.join(self.either)}, exactly one is needed"
        for name, one in value.items():
            if name in known:
                yield from known[name].faults(one, f"{path}.{name}")
            else:
                yield f"{path}.{name} is not a field that is known there"
