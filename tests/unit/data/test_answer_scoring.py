"""What replies say, and when that is right."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.data.scoring import answer_extraction


@pytest.mark.parametrize(
    ("method", "reply", "said"),
    [
        ("number", "2+2=4\n#### 4", "4"),
        ("number", "#### 1,234.50 dollars", "1234.5"),
        ("number", "so #### 3 no, #### $5", "5"),
        ("number", "it is \\boxed{42} of 50", "42"),
        ("number", "there are 3 and then 12.", "12"),
        ("number", "from -7 to .50", "0.5"),
        ("number", "none at all", None),
        ("number", "#### none, 7", "7"),
        ("number", "", None),
        ("final_number", "#### 4 of 9", "9"),
        ("letter", "The answer is (C).", "C"),
        ("letter", "A bird is B", "B"),
        ("letter", "A", "A"),
        ("letter", "I think D.", "D"),
        ("letter", "nothing", None),
        ("first_line", "\n  yes \nno", "yes"),
        ("first_word", "  yes sir", "yes"),
        ("first_word", "", None),
        ("text", "  \n", None),
        ("code", "Sure:\n```python\nx = 1\n```\nDone ```b```", "x = 1"),
        ("code", "```\nopen\n  end", "open\n  end"),
        ("code", "    return 1\n", "    return 1\n"),
        ("code", " ", None),
    ],
)
def test_extract(method, reply, said):
    assert answer_extraction.extract_answer(reply, method) == said


@pytest.mark.parametrize(
    ("reply", "answer", "method", "check", "right"),
    [
        ("I get 18 eggs", "9 * 2 = 18\n#### 18", "number", "number", True),
        ("18.0", "#### 18", "number", "number", True),
        ("1,000", "1000", "number", "number", True),
        ("", "#### 18", "number", "number", False),
        ("The Oslo.", "the oslo", "text", "equal", True),
        ("It is Oslo, of course", "Oslo", "text", "contains", True),
        ("It is Oslofjord", "Oslo", "text", "contains", False),
        ("B", "b", "letter", "equal", True),
        ("yes\nno", "yes", "first_line", "equal", True),
    ],
)
def test_is_right(reply, answer, method, check, right):
    assert answer_extraction.is_correct(reply, answer, method, check) is right


def test_a_pattern_takes_the_last_match():
    assert answer_extraction.extract_answer("x=1, x=2", "regex", r"x=(\d)") == "2"
    assert answer_extraction.extract_answer("none", "regex", r"x=(\d)") is None


@settings(max_examples=40, deadline=None)
@given(st.text())
def test_no_reply_breaks_anything(reply):
    for method in answer_extraction.EXTRACTORS:
        said = answer_extraction.extract_answer(reply, method)
        assert said is None or isinstance(said, str)
        for check in answer_extraction.MATCHERS:
            answer_extraction.is_correct(reply, reply, method, check)


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**9), 10**9))
def test_a_number_is_found_again(value):
    assert answer_extraction.extract_number(f"The answer is\n#### {value:,}") == str(value)
    assert answer_extraction.extract_number(f"so it is {value}") == str(value)
