"""A report as one HTML file: style, program, logo and the texts of both languages inside.

The page is written in one language and holds the texts of the other, so that it can be read without its program too.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from anabatic.config.loading import yaml_reader
from anabatic.core.formatting import format_duration
from anabatic.core.language import Language, LocalizedText
from anabatic.core.logo import FAVICON_URL, INLINE_LOGO
from anabatic.core.svg_plot import insert_colours

_TABLES = yaml_reader.read_own_yaml(Path(__file__).with_name("words.yaml"))
WORDS: dict[str, list[str]] = _TABLES["texts"]
"""Key -> [English, Chinese]."""
EVENT_WORDS: dict[str, list[str]] = _TABLES["events"]
"""Names of events; others are shown as they were written."""
FIELD_WORDS: dict[str, list[str]] = _TABLES["fields"]
"""Names of what an event says; others are shown as they were written."""
MISSING = "–"
"""Of a table, where a run has no value."""
TEMPLATE_FOLDER = Path(__file__).parent
# Control characters are spelled out, what no HTML file can hold becomes the replacement character.
_UNSAFE_CHARACTERS: dict[int, int | str] = {
    **{code: f"\\x{code:02x}" for code in (*range(32), *range(0x7F, 0xA0)) if code not in (9, 10, 13)},
    **{code: "\ufffd" for code in (*range(0xD800, 0xE000), 0xFFFE, 0xFFFF)},
}


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


class _PageTexts:
    """The texts of a page that differ between the languages, each once; the program of the page finds them by number.

    Args:
        language: in which the page is written.
    """

    def __init__(self, language: Language) -> None:
        self.language = language
        self._numbers: dict[LocalizedText, int] = {}

    def write(self, text: str | LocalizedText) -> str | Markup:
        """Return a text as an element; one that is the same in both languages stays as it is."""
        text = as_text(text)
        shown: str = getattr(text, self.language)
        if text.en == text.zh:
            return shown
        return Markup('<bdi data-text="{}">{}</bdi>').format(self._number(text), shown)

    def write_word(self, key: str, **figures: object) -> str | Markup:
        """Return a text of the table as an element."""
        return self.write(get_text(key, **figures))

    def write_attribute(self, name: str, text: str | LocalizedText) -> Markup:
        """Return an attribute with a text, for the tag of an element."""
        text = as_text(text)
        shown: str = getattr(text, self.language)
        if text.en == text.zh:
            return Markup('{}="{}"').format(name, shown)
        return Markup('{0}="{1}" data-text-{0}="{2}"').format(name, shown, self._number(text))

    def as_json(self) -> Markup:
        """Return the texts, for a script element."""
        texts = [[side.translate(_UNSAFE_CHARACTERS) for side in (text.en, text.zh)] for text in self._numbers]
        step = get_text("step", step="{step}")
        return Markup(escape_json({"texts": texts, "step": [step.en, step.zh]}))

    def _number(self, text: LocalizedText) -> int:
        return self._numbers.setdefault(text, len(self._numbers))


def render_page(template: str, language: Language, **values: Any) -> str:
    """Return the page of a template of this folder, written in `language`."""
    texts = _PageTexts(language)
    script = _read_file("report.js")
    page = (
        _make_environment()
        .get_template(template)
        .render(
            **values,
            language=language,
            t=texts.write,
            w=texts.write_word,
            attribute=texts.write_attribute,
            get_text=get_text,
            texts=texts,
            style=Markup(insert_colours(_read_file("report.css"))),
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
            logo=Markup(INLINE_LOGO),
            favicon=Markup(FAVICON_URL),
            date=format_date(time.time()),
        )
    )
    return page.translate(_UNSAFE_CHARACTERS)


def escape_json(value: Any) -> str:
    """Return JSON that no script element ends in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def format_date(seconds: float) -> str:
    """Return a Unix time as the local date and time, in the form of ISO 8601 that readers of both languages use."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


@cache
def _make_environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATE_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _read_file(name: str) -> str:
    return (TEMPLATE_FOLDER / name).read_text(encoding="utf-8")
