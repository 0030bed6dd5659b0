"""Generated tasks: disjoint splits, the same rows every time, honest chance, scoring."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.data.builtin import synthetic_tasks

NAMES = list(synthetic_tasks.TASKS)


def words_asked(row: synthetic_tasks.TaskRow) -> str:
    """The word of a spelling or counting row, read from its reply."""
    return re.sub(r"[^a-z]", "", row.messages[1]["content"].split(":")[0])


def operands(row: synthetic_tasks.TaskRow) -> tuple[int, str, int]:
    """The problem of an arithmetic row, read from its question."""
    a, sign, b = re.findall(r"(\d+) ([+-]) (\d+)", row.messages[0]["content"])[0]
    return int(a), sign, int(b)


@pytest.mark.parametrize("name", [*NAMES, "all"])
def test_rows_are_the_same_every_time_and_a_prefix_of_more_rows(name):
    assert list(synthetic_tasks.generate_task_rows(name, "train", 50, 3)) == list(
        itertools.islice(synthetic_tasks.generate_task_rows(name, "train", None, 3), 50)
    )
    assert list(synthetic_tasks.generate_task_rows(name, "train", 50, 3)) != list(
        synthetic_tasks.generate_task_rows(name, "train", 50, 4)
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_reference_reply_is_right(name, split):
    for row in synthetic_tasks.generate_task_rows(name, split, 300, 1):
        assert [message["role"] for message in row.messages] == ["user", "assistant"]
        assert synthetic_tasks.is_reply_correct(row.task, row.answer, row.messages[1]["content"])
        assert row.choices is None or row.answer in row.choices


@pytest.mark.process
@pytest.mark.parametrize("name", ["spelling", "counting"])
def test_a_test_word_is_never_taught_in_any_task(name):
    asked = {words_asked(row) for row in synthetic_tasks.generate_task_rows(name, "test", 500, 0)}
    taught = {
        words_asked(row)
        for other in ("spelling", "counting")
        for seed in range(3)
        for row in synthetic_tasks.generate_task_rows(other, "train", 3000, seed)
    }
    assert len(asked) > 100
    assert not asked & taught
    assert not asked & set(synthetic_tasks.list_real_words())


@pytest.mark.process
def test_a_test_sum_is_never_taught_in_either_order():
    asked = {operands(row) for row in synthetic_tasks.generate_task_rows("arithmetic", "test", 800, 0)}
    taught = {
        operands(row)
        for seed in range(3)
        for row in synthetic_tasks.generate_task_rows("arithmetic", "train", 8000, seed)
    }
    assert len(asked) > 300
    assert not asked & taught
    assert not {(b, sign, a) for a, sign, b in asked if sign == "+"} & taught


def test_a_test_wording_is_never_taught():
    for fact in synthetic_tasks.FACTS:
        taught, asked = synthetic_tasks.select_wordings(fact, False), synthetic_tasks.select_wordings(fact, True)
        assert len(asked) >= 2 and len(taught) >= 8
        assert not set(asked) & set(taught)
    questions = [
        {row.messages[0]["content"] for row in synthetic_tasks.generate_task_rows("identity", s, 2000, 0)}
        for s in ("train", "test")
    ]
    assert not questions[0] & questions[1]


def problem(row: synthetic_tasks.TaskRow) -> tuple:
    """What is asked, whatever the wording: the operands in either order, the word, the word and the letter."""
    if row.task == "arithmetic":
        a, sign, b = operands(row)
        return (sign, *sorted((a, b)))
    letter = re.search(r"\b[a-z]\b", row.messages[0]["content"]) if row.task == "counting" else None
    return words_asked(row), letter and letter[0]


@pytest.mark.parametrize("name", ["spelling", "counting", "arithmetic"])
def test_test_problems_do_not_repeat(name):
    problems = Counter(problem(row) for row in synthetic_tasks.generate_task_rows(name, "test", 150, 0))
    assert max(problems.values()) == 1


@pytest.mark.parametrize(
    ("name", "answer", "reply", "right"),
    [
        ("spelling", "t r e e", "t r e e", True),
        ("spelling", "t r e e", " t r e e\n", True),
        ("spelling", "t r e e", "tree", False),
        ("spelling", "t r e e", "t r e e e", False),
        ("counting", "2", "t r e1 e2: 2", True),
        ("counting", "2", "t r e1 e2", True),
        ("counting", "2", "2 or 3", False),
        ("counting", "2", "", False),
        ("arithmetic", "72", "27 + 45 = 60 + 12 = 72", True),
        ("arithmetic", "72", "172", False),
        ("arithmetic", "7", "-7", False),
        ("identity", "i am anabatic", "I  am Anabatic.", True),
        ("identity", "i am anabatic", "I am Anabatic. You are welcome.", False),
        ("identity", "i am anabatic", "Anabatic", False),
    ],
)
def test_score(name, answer, reply, right):
    assert synthetic_tasks.is_reply_correct(name, answer, reply) is right


@given(st.text(max_size=40), st.sampled_from(NAMES))
@settings(max_examples=60, deadline=None)
def test_score_never_fails_on_any_reply(reply, name):
    row = next(synthetic_tasks.generate_task_rows(name, "test", 1, 0))
    assert synthetic_tasks.is_reply_correct(name, row.answer, reply) in (True, False)


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_chance_is_the_best_constant_reply_by_brute_force(name):
    drawn = list(synthetic_tasks.generate_task_rows(name, "test", synthetic_tasks.CHANCE_ROWS, 0))
    shares = [
        sum(synthetic_tasks.is_reply_correct(name, row.answer, reply) for row in drawn) / len(drawn)
        for reply in sorted({row.messages[1]["content"] for row in drawn})[:150]
    ]
    assert max(shares) <= synthetic_tasks.chance_accuracy(name) < 0.35
    if len(shares) < 150:
        assert max(shares) == synthetic_tasks.chance_accuracy(name)


def test_no_answer_to_counting_is_much_more_frequent_than_another():
    taught = Counter(row.answer for row in synthetic_tasks.generate_task_rows("counting", "train", 2000, 5))
    assert all(0.21 < number / 2000 < 0.29 for number in taught.values())
    asked = Counter(row.answer for row in synthetic_tasks.generate_task_rows("counting", "test", 1000, 5))
    assert set(asked) == set(taught) == set("0123")
    assert max(asked.values()) < 360  # problems with three of a letter are used up first


@pytest.mark.process
def test_chance_of_all_is_the_weighted_mean():
    total = sum(task.mixture_weight for task in synthetic_tasks.TASKS.values())
    mean = (
        sum(task.mixture_weight * synthetic_tasks.chance_accuracy(name) for name, task in synthetic_tasks.TASKS.items())
        / total
    )
    assert synthetic_tasks.chance_accuracy("all") == pytest.approx(mean)


def test_documents_are_conversations_and_all_holds_every_task():
    assert len(list(synthetic_tasks.generate_task_conversations("spelling", 7))) == 7
    assert sum(1 for _ in synthetic_tasks.generate_task_conversations("identity", None)) == synthetic_tasks.DEFAULT_ROWS
    assert {row.task for row in synthetic_tasks.generate_task_rows("all", "train", 200, 0)} == set(NAMES)


def test_an_unknown_task_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match='no task "speling"') as error:
        next(synthetic_tasks.generate_task_conversations("speling", 1))
    assert 'Did you mean "spelling"?' in error.value.hint
