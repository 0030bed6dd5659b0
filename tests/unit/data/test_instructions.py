"""Instructions that a program verifies: for each a reply that follows it and one that does not."""

from __future__ import annotations

import pytest

from anabatic.core.errors import DataError
from anabatic.data.scoring.ifeval import INSTRUCTION_CHECKS, check_instructions

CASES = {
    "keywords:existence": ({"keywords": ["wind", "slope"]}, "Wind on a slope", "wind alone"),
    "keywords:frequency": ({"keyword": "up", "frequency": 2, "relation": "at least"}, "up and Up", "up"),
    "keywords:forbidden_words": ({"forbidden_words": ["air"]}, "a fair day", "the air is warm"),
    "keywords:letter_frequency": ({"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "zone", "Zigzag"),
    "length_constraints:number_sentences": ({"num_sentences": 3, "relation": "less than"}, "One. Two!", "A. B. C."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo\n***", "one\n***\n***\ntwo"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one, two"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "warm"}, "a b\n\nWarm, it is", "warm\n\ncold",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] at [place]", "[name]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "Bye\nP.S. more", "Bye, PS"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and *b*", "*a* and ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Part", "num_sections": 2}, "Part 1 a Part 2 b", "Part 1 a",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a: 1}"),
    "detectable_format:title": ({}, "<<Wind>>\ntext", "<< >> text"),
    "combination:two_responses": ({}, "one ****** two", "one ****** one"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Why?"}, "why? Because", "Because"),
    "startend:end_checker": ({"end_phrase": "The end."}, 'so "the end."', "The end. No."),
    "startend:quotation": ({}, '"all of it"', '"'),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"}, "GO UP now", "GO up now",
    ),
    "change_case:english_capital": ({}, "ALL UP!", "All up"),
    "change_case:english_lowercase": ({}, "all down.", "All down"),
    "punctuation:no_comma": ({}, "none", "one, two"),
}  # fmt: skip


def test_every_instruction_has_a_case():
    assert set(INSTRUCTION_CHECKS) == {*CASES, "language:response_language"}


@pytest.mark.parametrize("name", list(CASES))
def test_followed_and_not(name):
    settings, yes, no = CASES[name]
    padded = {**settings, "other": None}
    assert check_instructions(yes, [name], [padded]) == [True]
    assert check_instructions(no, [name], [padded]) == [False]
    assert check_instructions(" ", [name], [padded]) == [False]


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (["wind:up"], [{}], 'no instruction "wind:up"'),
        (["keywords:existence"], [{}], "lacks a setting"),
        (["punctuation:no_comma"], [], "1 instructions with 0 settings"),
    ],
)
def test_broken_rows(names, settings, message):
    with pytest.raises(DataError, match=message):
        check_instructions("text", names, settings)
