"""Instructions that a program can verify (IFEval, arXiv 2311.07911): pure functions of a reply and their settings.

Names and settings are those of the data set's rows (`instruction_id_list`, `kwargs`). Words are runs of letters, digits
and underscores; a sentence ends with `.`, `!` or `?` before a blank, which the original leaves to NLTK: counts of
sentences can differ by abbreviations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anabatic.core import extras, json_reader
from anabatic.core.errors import DataError

Settings = Mapping[str, Any]
_CONSTRAINED_RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def _satisfies_relation(found: int, settings: Settings, number: str, relation: str = "relation") -> bool:
    """`less than` so many, or `at least`."""
    return found < settings[number] if settings[relation] == "less than" else found >= settings[number]


def _split_words(reply: str) -> list[str]:
    return re.findall(r"\w+", reply)


def _split_sentences(reply: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+", reply.strip()) if re.search(r"\w", part)]


def _count_keyword(word: str, reply: str) -> int:
    return len(re.findall(re.escape(word), reply, re.IGNORECASE))


def _check_paragraph_count(reply: str, settings: Settings) -> bool:
    """Split by `***`; an empty one counts against the reply, but for the first and the last."""
    parts = re.split(r"\s?\*\*\*\s?", reply)
    inner = [part for at, part in enumerate(parts) if part.strip() or 0 < at < len(parts) - 1]
    return all(part.strip() for part in inner) and len(inner) == settings["num_paragraphs"]


def _check_paragraph_first_word(reply: str, settings: Settings) -> bool:
    parts = [part for part in re.split(r"\n\n", reply) if part.strip()]
    if len(parts) != settings["num_paragraphs"] or settings["nth_paragraph"] > len(parts):
        return False
    first = parts[settings["nth_paragraph"] - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", first)[0].lower() == settings["first_word"].lower()


def _check_postscript(reply: str, settings: Settings) -> bool:
    marks = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    marker = settings["postscript_marker"]
    pattern = marks.get(marker, r"\s*" + re.escape(marker.lower()) + r".*$")
    return re.search(pattern, reply.lower(), re.MULTILINE) is not None


def _check_bullet_lists(reply: str, settings: Settings) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", reply, re.MULTILINE)
    lines = re.findall(r"^\s*-.*$", reply, re.MULTILINE)
    return len(stars) + len(lines) == settings["num_bullets"]


def _check_highlighted_sections(reply: str, settings: Settings) -> bool:
    single = [part for part in re.findall(r"\*[^\n\*]*\*", reply) if part.strip("*").strip()]
    double = [part for part in re.findall(r"\*\*[^\n\*]*\*\*", reply) if part[2:-2].strip()]
    return len(single) + len(double) >= settings["num_highlights"]


def _check_multiple_sections(reply: str, settings: Settings) -> bool:
    parts = re.split(r"\s?" + re.escape(settings["section_spliter"]) + r"\s?\d+\s?", reply)
    return len(parts) - 1 >= settings["num_sections"]


def _check_json_format(reply: str, settings: Settings) -> bool:
    text = re.sub(r"^```(?:json)?|```$", "", reply.strip(), flags=re.IGNORECASE).strip()
    try:
        json_reader.loads(text)
    except ValueError:
        return False
    return True


def _check_two_responses(reply: str, settings: Settings) -> bool:
    parts = reply.split("******")
    inner = [part for at, part in enumerate(parts) if part.strip() or 0 < at < len(parts) - 1]
    return len(inner) == 2 and all(part.strip() for part in inner) and inner[0].strip() != inner[1].strip()


def _check_response_language(reply: str, settings: Settings) -> bool:
    langdetect = extras.import_optional(
        "langdetect", "checking the language of a reply", "or leave such rows out with `keep`"
    )
    try:
        return bool(langdetect.detect(reply) == settings["language"])
    except langdetect.LangDetectException:  # no letters in it
        return False


def _check_capital_word_frequency(reply: str, settings: Settings) -> bool:
    shouted = sum(word.isupper() for word in re.findall(r"[\w'-]+", reply))
    return _satisfies_relation(shouted, settings, "capital_frequency", "capital_relation")


INSTRUCTION_CHECKS: dict[str, Callable[[str, Settings], bool]] = {
    "keywords:existence": lambda reply, s: all(_count_keyword(word, reply) for word in s["keywords"]),
    "keywords:frequency": lambda reply, s: _satisfies_relation(_count_keyword(s["keyword"], reply), s, "frequency"),
    "keywords:forbidden_words": lambda reply, s: (
        not any(re.search(rf"\b{re.escape(word)}\b", reply, re.IGNORECASE) for word in s["forbidden_words"])
    ),
    "keywords:letter_frequency": lambda reply, s: _satisfies_relation(
        reply.lower().count(s["letter"].lower()), s, "let_frequency", "let_relation"
    ),
    "language:response_language": _check_response_language,
    "length_constraints:number_sentences": lambda reply, s: _satisfies_relation(
        len(_split_sentences(reply)), s, "num_sentences"
    ),
    "length_constraints:number_paragraphs": _check_paragraph_count,
    "length_constraints:number_words": lambda reply, s: _satisfies_relation(len(_split_words(reply)), s, "num_words"),
    "length_constraints:nth_paragraph_first_word": _check_paragraph_first_word,
    "detectable_content:number_placeholders": lambda reply, s: (
        len(re.findall(r"\[.*?\]", reply)) >= s["num_placeholders"]
    ),
    "detectable_content:postscript": _check_postscript,
    "detectable_format:number_bullet_lists": _check_bullet_lists,
    "detectable_format:constrained_response": lambda reply, s: any(one in reply for one in _CONSTRAINED_RESPONSES),
    "detectable_format:number_highlighted_sections": _check_highlighted_sections,
    "detectable_format:multiple_sections": _check_multiple_sections,
    "detectable_format:json_format": _check_json_format,
    "detectable_format:title": lambda reply, s: any(one.strip() for one in re.findall(r"<<([^\n]+)>>", reply)),
    "combination:two_responses": _check_two_responses,
    "combination:repeat_prompt": lambda reply, s: (
        reply.strip().lower().startswith(s["prompt_to_repeat"].strip().lower())
    ),
    "startend:end_checker": lambda reply, s: reply.strip().strip('"').lower().endswith(s["end_phrase"].strip().lower()),
    "startend:quotation": lambda reply, s: len(reply.strip()) > 1 and reply.strip()[0] == reply.strip()[-1] == '"',
    "change_case:capital_word_frequency": _check_capital_word_frequency,
    "change_case:english_capital": lambda reply, s: reply.isupper(),
    "change_case:english_lowercase": lambda reply, s: reply.islower(),
    "punctuation:no_comma": lambda reply, s: "," not in reply,
}
"""Name of an instruction -> `(reply, settings)` -> it is followed."""


def check_instructions(reply: str, names: Sequence[str], settings: Sequence[Settings]) -> list[bool]:
    """Tell of each instruction whether a reply follows it; an empty reply follows none.

    Raises:
        DataError: an instruction is not known, or lacks a setting.
        ConfigError: a language is to be told, and the library for it is not installed.
    """
    if len(names) != len(settings):
        raise DataError(f"{len(names)} instructions with {len(settings)} settings", "fix the row")
    found = []
    for name, given in zip(names, settings, strict=True):
        if name not in INSTRUCTION_CHECKS:
            raise DataError(f'there is no instruction "{name}"', f"known are {', '.join(INSTRUCTION_CHECKS)}")
        try:
            found.append(bool(reply.strip()) and INSTRUCTION_CHECKS[name](reply, given or {}))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{name} lacks a setting, or has a wrong one: {error}", "fix the row") from error
    return found
