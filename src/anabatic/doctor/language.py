"""Which language a report is written in."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Literal, TextIO

from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean

Language = Literal["en", "zh"]
_NAMES: dict[str, Language] = {"en": "en", "zh": "zh"}
_LOCALE = ("LC_ALL", "LC_MESSAGES", "LANG")
"""The first that is set decides (POSIX, section 8.2)."""


def choose(asked: str | None, environ: Mapping[str, str]) -> Language:
    """Return the language of `--lang`, else of the locale; English when neither says Chinese.

    Raises:
        ConfigError: `asked` is neither `en` nor `zh`.
    """
    if asked is None:
        locale = next((environ[name] for name in _LOCALE if environ.get(name)), "")
        return "zh" if locale.lower().startswith("zh") else "en"
    if asked not in _NAMES:
        raise ConfigError(f'--lang is "{asked}".{did_you_mean(asked, _NAMES)}', "en or zh")
    return _NAMES[asked]


def writable(stream: TextIO) -> None:
    """Let a stream write `?` for what its encoding lacks: an ASCII terminal must not end a report."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
