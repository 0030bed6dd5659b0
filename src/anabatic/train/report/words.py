"""Every fixed word and sentence of the report in English and Chinese; `{name}` stands for a figure or a text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from anabatic.config.loading import yaml_reader
from anabatic.core.formatting import format_duration
from anabatic.core.language import LocalizedText

_TABLES = yaml_reader.read_own_yaml(Path(__file__).with_name("words.yaml"))
WORDS: dict[str, list[str]] = _TABLES["texts"]
"""Key -> [English, Chinese]."""
EVENT_WORDS: dict[str, list[str]] = _TABLES["events"]
"""Names of events; others are shown as they were written."""
FIELD_WORDS: dict[str, list[str]] = _TABLES["fields"]
"""Names of what an event says; others are shown as they were written."""
MISSING = "–"
"""Of a table, where a run has no value."""


def get_text(key: str, /, **figures: object) -> LocalizedText:
    """Return the text of `key` with its figures; a figure that is a text itself is taken in the same language.

    Raises:
        KeyError: there is no such text, or it needs another figure.
    """
    return _fill(WORDS[key], figures)


def get_known_text(table: Mapping[str, Sequence[str]], name: str) -> LocalizedText:
    """Return the text of a name that a run wrote, or the name itself where the table has none."""
    return LocalizedText(*table[name]) if name in table else as_text(name)


def as_text(value: str | LocalizedText) -> LocalizedText:
    """Return what a run wrote as it is in both languages."""
    return LocalizedText(value, value) if isinstance(value, str) else value


def join_texts(parts: Iterable[str | LocalizedText], en: str = ", ", zh: str = "，") -> LocalizedText:
    """Return texts in a row."""
    texts = [as_text(part) for part in parts]
    return LocalizedText(en.join(text.en for text in texts), zh.join(text.zh for text in texts))


def describe_duration(seconds: float) -> LocalizedText:
    """Return `3m05s` and its Chinese form."""
    english = format_duration(seconds)
    if seconds < 60:
        return LocalizedText(english, f"{english[:-1]} 秒")
    chinese = english
    for unit, word in (("h", " 小时 "), ("m", " 分 "), ("s", " 秒")):
        chinese = chinese.replace(unit, word)
    return LocalizedText(english, chinese.strip())


def _fill(pair: Sequence[str], figures: Mapping[str, object]) -> LocalizedText:
    sides = [
        {name: getattr(value, side) if isinstance(value, LocalizedText) else value for name, value in figures.items()}
        for side in ("en", "zh")
    ]
    return LocalizedText(pair[0].format(**sides[0]), pair[1].format(**sides[1]))
