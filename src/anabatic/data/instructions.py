"""Instructions that a program can verify (IFEval, arXiv 2311.07911): pure functions of a reply and their settings.

Names and settings are those of the data set's rows (`instruction_id_list`, `kwargs`). Words are runs of letters, digits
and underscores; a sentence ends with `.`, `!` or `?` before a blank, which the original leaves to NLTK: counts of
sentences can differ by abbreviations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabatic.core import json_text
from anabatic.core.errors import ConfigError, DataError

Settings = Mapping[str, Any]
_CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _related(found: int, settings: Settings, number: str, relation: str = "relation") -> bool:
    """`less than` so many, or `at least`."""
    return found < settings[number] if settings[relation] == "less than" else found >= settings[number]


def _words(reply: str) -> list[str]:
    return re.findall(r"\w+", reply)


def _sentences(reply: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", reply.strip()) if re.search(r"\w", part)]


def _found(word: str, reply: str) -> int:
    return len(re.findall(re.escape(word), reply, re.IGNORECASE))


def _number_of_paragraphs(reply: str, settings: Settings) -> bool:
    """Parted by `***`; an empty one counts against the reply, but for the first and the last."""
    parts = re.split(r"\s?\*\*\*\s?", reply)
    inner = [part for at, part in enumerate(parts) if part.strip() or 0 < at < len(parts) - 1]
    return all(part.strip() for part in inner) and len(inner) == settings["num_paragraphs"]


def _first_word_of_a_paragraph(reply: str, settings: Settings) -> bool:
    parts = [part for part in re.split(r"\n\n", reply) if part.strip()]
    if len(parts) != settings["num_paragraphs"] or settings["nth_paragraph"] > len(parts):
        return False
    first = parts[settings["nth_paragraph"] - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", first)[0].lower() == settings["first_word"].lower()


def _postscript(reply: str, settings: Settings) -> bool:
    marks = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    marker = settings["postscript_marker"]
    pattern = marks.get(marker, r"\s*" + re.escape(marker.lower()) + r".*$")
    return re.search(pattern, reply.lower(), re.MULTILINE) is not None


def _bullets(reply: str, settings: Settings) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", reply, re.MULTILINE)
    lines = re.findall(r"^\s*-.*$", reply, re.MULTILINE)
    return len(stars) + len(lines) == settings["num_bullets"]


def _highlights(reply: str, settings: Settings) -> bool:
    single = [part for part in re.findall(r"\*[^\n\*]*\*", reply) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", reply) if part[2:-2].strip()]
    return len(single) + len(double) >= settings["num_highlights"]


def _sections(reply: str, settings: Settings) -> bool:
    parts = re.split(r"\s?" + re.escape(settings["section_spliter"]) + r"\s?\d+\s?", reply)
    return len(parts) - 1 >= settings["num_sections"]


def _json(reply: str, settings: Settings) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", reply.strip(), flags=re.IGNORECASE).strip()
    try:
        json_text.loads(text)
    except ValueError:
        return False
    return True


def _two_replies(reply: str, settings: Settings) -> bool:
    parts = reply.split("******")
    inner = [part for at, part in enumerate(parts) if part.strip() or 0 < at < len(parts) - 1]
    return len(inner) == 2 and all(part.strip() for part in inner) and inner[0].strip() != inner[1].strip()


def _language(reply: str, settings: Settings) -> bool:
    try:
        import langdetect  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            "a reply's language is to be told, and langdetect is not installed",
            "pip install langdetect, or leave such rows out with `keep`",
        ) from error
    try:
        return bool(langdetect.detect(reply) == settings["language"])
    except langdetect.LangDetectException:  # no letters in it
        return False


def _capitals(reply: str, settings: Settings) -> bool:
    shouted = sum(word.isupper() for word in re.findall(r"[\w'-]+", reply))
    return _related(shouted, settings, "capital_frequency", "capital_relation")


VERIFY: dict[str, Callable[[str, Settings], bool]] = {
    "keywords:existence": lambda reply, s: all(_found(word, reply) for word in s["keywords"]),
    "keywords:frequency": lambda reply, s: _related(_found(s["keyword"], reply), s, "frequency"),
    "keywords:forbidden_words": lambda reply, s: (
        not any(re.search(rf"\b{re.escape(word)}\b", reply, re.IGNORECASE) for word in s["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda reply, s: _related(
        reply.lower().count(s["letter"].lower()), s, "let_frequency", "let_relation"
    ),
    "language:response_language": _language,
    "length_constraints:number_sentences": lambda reply, s: _related(len(_sentences(reply)), s, "num_sentences"),
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:number_words": lambda reply, s: _related(len(_words(reply)), s, "num_words"),
    "length_constraints:nth_paragraph_first_word": _first_word_of_a_paragraph,
    "detectable_content:number_placeholders": lambda reply, s: (
        len(re.findall(r"\[.*?\]", reply)) >= s["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:constrained_response": lambda reply, s: any(one in reply for one in _CONSTRAINED),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": lambda reply, s: any(one.strip() for one in re.findall(r"<<([^\n]+)>>", reply)),
    "combination:two_responses": _two_replies,
    "combination:repeat_prompt": lambda reply, s: (
        reply.strip().lower().startswith(s["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda reply, s: reply.strip().strip('"').lower().endswith(s["end_phrase"].strip().lower()),
    "startend:quotation": lambda reply, s: len(reply.strip()) > 1 and reply.strip()[0] == reply.strip()[-1] == '"',
    "change_case:capital_word_frequency": _capitals,
    "change_case:english_capital": lambda reply, s: reply.isupper(),
    "change_case:english_lowercase": lambda reply, s: reply.islower(),
    "punctuation:no_comma": lambda reply, s: "," not in reply,
}
"""Name of an instruction -> `(reply, settings)` -> it is followed."""


def followed(reply: str, names: Sequence[str], settings: Sequence[Settings]) -> list[bool]:
    """Tell of each instruction whether a reply follows it; an empty reply follows none.

    Raises:
        DataError: an instruction is not known, or lacks a setting.
        ConfigError: a language is to be told, and the library for it is not installed.
    """
    if len(names) != len(settings):
        raise DataError(f"{len(names)} instructions with {len(settings)} settings", "mend the row")
    found = []
    for name, given in zip(names, settings, strict=True):
        if name not in VERIFY:
            raise DataError(f'there is no instruction "{name}"', f"known are {', '.join(VERIFY)}")
        try:
            found.append(bool(reply.strip()) and VERIFY[name](reply, given or {}))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{name} lacks a setting, or has a wrong one: {error}", "mend the row") from error
    return found
