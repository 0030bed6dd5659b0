"""Texts in English and Chinese, and which of the two a reader gets."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean

Language = Literal["en", "zh"]
_LANGUAGES: dict[str, Language] = {"en": "en", "zh": "zh"}
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first that is set decides (POSIX, section 8.2)."""


@dataclass(frozen=True)
class LocalizedText:
    """The same sentence in two languages; `{name}` stands for a value."""

    en: str
    zh: str

    def render_in(self, language: Language, values: dict[str, Any]) -> str:
        """Return the sentence with its values."""
        return (self.zh if language == "zh" else self.en).format(**values)


def choose_language(requested: str | None, environ: Mapping[str, str]) -> Language:
    """Return the language of `--lang`, else of the locale; English when neither says Chinese.

    Raises:
        ConfigError: `requested` is neither `en` nor `zh`.
    """
    if requested is None:
        locale = next((environ[name] for name in _LOCALE_VARIABLES if environ.get(name)), "")
        return "zh" if locale.lower().startswith("zh") else "en"
    if requested not in _LANGUAGES:
        raise ConfigError(f'--lang is "{requested}".{did_you_mean(requested, _LANGUAGES)}', "en or zh")
    return _LANGUAGES[requested]


def replace_unencodable(stream: TextIO) -> None:
    """Let a stream write `?` for what its encoding lacks: an ASCII terminal must not end a report."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
