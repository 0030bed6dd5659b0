"""The words of the pages: each in both languages, and every word that a program asks for exists."""

from __future__ import annotations

import re

from anabatic.infer.web.pages import WEB_FOLDER as SHARED_FOLDER
from anabatic_studio.pages import STUDIO_PROGRAMS, WEB_FOLDER

ENGLISH_ALONE = {"exportCsv", "exportSvg", "exportPng"}
"""Names of file formats."""
_NAME = re.compile(r"(?:^|[{,])\s*(?:\"([^\"]+)\"|([A-Za-z_0-9]+)): ", re.MULTILINE)


def names(block: str) -> set[str]:
    return {quoted or plain for quoted, plain in _NAME.findall(block)}


def read_words(path) -> tuple[set[str], set[str]]:
    text = path.read_text(encoding="utf-8")
    start = text.find("zh: {") if "WORDS = {" in text else text.index("Object.assign(WORDS.zh")
    return names(text[:start]), names(text[start:])


def test_both_languages_have_the_same_words():
    english, chinese = read_words(WEB_FOLDER / "studio_words.js")
    states = names("{" + (WEB_FOLDER / "studio_words.js").read_text(encoding="utf-8").split("states: {\n")[1])
    assert len(english) > 150
    assert english - chinese == ENGLISH_ALONE
    assert chinese - english <= states


def test_every_word_that_is_asked_for_exists():
    known = read_words(WEB_FOLDER / "studio_words.js")[0] | read_words(SHARED_FOLDER / "words.js")[0]
    asked: set[str] = set()
    for name in STUDIO_PROGRAMS:
        path = WEB_FOLDER / name
        text = (path if path.is_file() else SHARED_FOLDER / name).read_text(encoding="utf-8")
        asked |= set(re.findall(r"\b(?:word|button)\(\"(\w+)\"", text))
    template = (WEB_FOLDER / "studio.html.j2").read_text(encoding="utf-8")
    asked |= set(re.findall(r"data-(?:words|label|title)=\"(\w+)\"", template))
    assert asked - known == set()
