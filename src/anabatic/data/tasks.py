"""Generated tasks with a train and a test split that share no problem.

The text of the problem (the word, the pair of operands, the wording of a question) decides by its hash on
which side it lies; how it is asked varies on both sides. A word that is held out for spelling is held out
for counting too. Rows depend on nothing but their arguments and, for real words, on the version of the
standard library.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean
from anabatic.data import task_identity
from anabatic.data.task_words import CONSONANTS, VOWELS, held_out, word

Split = Literal["train", "test"]
Message = dict[str, str]

DEFAULT_ROWS = 20_000
"""Rows of a `task:NAME` source without `#ROWS`."""
CHANCE_ROWS = 1_000
"""Test rows over which chance is computed."""
_PATIENCE = 200
"""Draws in a row that may repeat a test problem before repeats are let through: the problems are used up."""


@dataclass(frozen=True)
class Problem:
    """A problem before it is put into a conversation; `text` identifies it."""

    text: str
    question: str
    reply: str
    answer: str
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TaskRow:
    """One solved problem.

    Attributes:
        messages: the conversation; the last message is the assistant's and holds the reference reply.
        answer: what `score` compares a reply with.
        choices: the answers to choose from when the task has a closed list, else None.
        task: name of the task, for rows of `all`.
    """

    messages: list[Message]
    answer: str
    choices: tuple[str, ...] | None
    task: str


@dataclass(frozen=True)
class Task:
    """A task: how a problem is drawn, when a reply is right, and its share of the rows of `all`."""

    name: str
    draw: Callable[[Random, bool], Problem]
    is_right: Callable[[str, str], bool]
    share: int


SPELLING = (
    "Spell the word {w}.",
    "Spell {w}.",
    "How do you spell {w}?",
    "How is {w} spelled?",
    "Please spell {w}.",
    "Say the letters of {w}.",
)
COUNTING = (
    "How many times does the letter {c} occur in the word {w}?",
    "How many {c} are in {w}?",
    "How often does {c} occur in {w}?",
    "Count the letter {c} in {w}.",
    "Count {c} in {w}.",
)
ARITHMETIC = {
    "+": (
        "What is {a} + {b}?",
        "{a} + {b} = ?",
        "Compute {a} + {b}.",
        "How much is {a} + {b}?",
        "Add {a} + {b}.",
    ),
    "-": (
        "What is {a} - {b}?",
        "{a} - {b} = ?",
        "Compute {a} - {b}.",
        "How much is {a} - {b}?",
        "Subtract {a} - {b}.",
    ),
}
LARGEST_OPERAND = 49
MOST_LETTERS = 3


def _spelling(rng: Random, test: bool) -> Problem:
    chosen = word(rng, test, real_share=0.15)
    letters = " ".join(chosen)
    return Problem(chosen, rng.choice(SPELLING).format(w=chosen), letters, letters)


def _counting(rng: Random, test: bool) -> Problem:
    """Draw how often the letter shall occur first, so that no answer is much more frequent than another."""
    wanted = rng.randint(0, MOST_LETTERS)
    while True:
        chosen = word(rng, test, real_share=0.05)
        letters = [c for c in VOWELS + CONSONANTS if chosen.count(c) == wanted]
        if letters:
            break
    letter = rng.choice(letters)
    question = rng.choice(COUNTING).format(c=letter, w=chosen)
    choices = tuple(str(number) for number in range(MOST_LETTERS + 1))
    return Problem(f"{chosen} {letter}", question, _count_aloud(chosen, letter), str(wanted), choices)


def _count_aloud(chosen: str, letter: str) -> str:
    """Return the letters with a number after each one that counts: `t r e1 e2: 2`."""
    number, parts = 0, []
    for each in chosen:
        number += each == letter
        parts.append(f"{each}{number}" if each == letter else each)
    return f"{' '.join(parts)}: {number}"


def _arithmetic(rng: Random, test: bool) -> Problem:
    """Draw a sum or a difference that is not negative; a + b and b + a lie on the same side."""
    while True:
        a, b = rng.randint(0, LARGEST_OPERAND), rng.randint(0, LARGEST_OPERAND)
        sign = rng.choice("+-")
        low, high = sorted((a, b))
        if sign == "-":
            a, b = high, low
        if held_out(f"{high} {sign} {low}") == test:
            break
    answer = str(a + b if sign == "+" else a - b)
    question = rng.choice(ARITHMETIC[sign]).format(a=a, b=b)
    return Problem(f"{high} {sign} {low}", question, f"{a} {sign} {b} = {_working(a, sign, b)} = {answer}", answer)


def _working(a: int, sign: str, b: int) -> str:
    """Return the tens and the ones apart: 27 + 45 is 60 + 12, 52 - 27 is 30 - 5."""
    if sign == "+":
        return f"{a // 10 * 10 + b // 10 * 10} + {a % 10 + b % 10}"
    tens, ones = a // 10 * 10 - b // 10 * 10, a % 10 - b % 10
    return f"{tens} {'-' if ones < 0 else '+'} {abs(ones)}"


def _identity(rng: Random, test: bool) -> Problem:
    name = rng.choice(tuple(task_identity.FACTS))
    fact = task_identity.FACTS[name]
    wording = rng.choice(task_identity.wordings(name, test))
    return Problem(wording, wording[0].upper() + wording[1:] + fact.mark, fact.reply, fact.key)


def _same_letters(answer: str, reply: str) -> bool:
    return reply.split() == answer.split()


def _same_number(answer: str, reply: str) -> bool:
    """The last number said is the answer."""
    numbers = re.findall(r"-?\d+", reply)
    return bool(numbers) and numbers[-1] == answer


TASKS = {
    task.name: task
    for task in (
        Task("spelling", _spelling, _same_letters, 3),
        Task("counting", _counting, _same_number, 3),
        Task("arithmetic", _arithmetic, _same_number, 3),
        Task("identity", _identity, task_identity.is_about, 1),
    )
}
"""Name -> task, in the order in which scores are printed."""


def rows(name: str, split: Split, n: int | None, seed: int) -> Iterator[TaskRow]:
    """Yield `n` rows of a task (without end when `n` is None); `all` mixes the tasks by their shares.

    Pure: the same arguments give the same rows. In the test split no problem comes twice before the
    problems are used up.

    Raises:
        ConfigError: there is no task of this name.
    """
    tasks = find(name)
    shares = [task.share for task in tasks]
    rng = Random(f"{name}/{split}/{seed}")
    seen: set[tuple[str, str]] = set()
    for _ in itertools.count() if n is None else range(n):
        task = tasks[0] if len(tasks) == 1 else rng.choices(tasks, shares)[0]
        problem = task.draw(rng, split == "test")
        if split == "test":
            problem = _fresh(task, problem, rng, seen)
        messages = [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.reply},
        ]
        yield TaskRow(messages, problem.answer, problem.choices, task.name)


def _fresh(task: Task, problem: Problem, rng: Random, seen: set[tuple[str, str]]) -> Problem:
    for _ in range(_PATIENCE):
        if (task.name, problem.text) not in seen:
            break
        problem = task.draw(rng, True)
    seen.add((task.name, problem.text))
    return problem


def find(name: str) -> list[Task]:
    """Return the task of this name, or every task for `all`.

    Raises:
        ConfigError: there is no such task.
    """
    if name == "all":
        return list(TASKS.values())
    if name not in TASKS:
        known = [*TASKS, "all"]
        raise ConfigError(f'there is no task "{name}"', f"choose one of {', '.join(known)}.{did_you_mean(name, known)}")
    return [TASKS[name]]


def documents(name: str, rows: int | None, split: Split = "train", seed: int = 0) -> Iterator[list[Message]]:
    """Yield the conversations of a `task:NAME` source, `DEFAULT_ROWS` of them unless `rows` says otherwise.

    Two in five put several questions one after another, so that the model learns to go by the last one.

    Raises:
        ConfigError: there is no task of this name.
    """
    wanted = DEFAULT_ROWS if rows is None else rows
    lengths = Random(f"turns {seed}").choices((1, 2, 3), weights=(6, 2, 2), k=wanted)
    drawn = _rows(name, split, sum(lengths), seed)
    for length in lengths:
        yield [message for row in itertools.islice(drawn, length) for message in row.messages]


_rows = rows
"""`rows` under a name that the parameter of `documents` does not hide."""


def score(task: str, answer: str, reply: str) -> bool:
    """Tell whether `reply` answers a row of `task` (the row's own `task`, not `all`) whose answer is
    `answer`.

    spelling: the same letters, one blank between them; counting and arithmetic: the last number said;
    identity: the fact asked for is said, and no other.

    Raises:
        ConfigError: there is no task of this name.
    """
    return find(task)[0].is_right(answer, reply)


@cache
def chance(task: str) -> float:
    """Return the accuracy of the best reply that is given without reading the question, 0 to 1.

    Every reply that is right somewhere in the first `CHANCE_ROWS` test rows (seed 0) is given to all of
    them and scored as a model's would be; the best share counts. For `all` each task is answered by its own
    best reply and the tasks are weighted by how often they are asked.

    Raises:
        ConfigError: there is no task of this name.
    """
    tasks = find(task)
    total = sum(one.share for one in tasks)
    return sum(one.share * _best_constant(one) for one in tasks) / total


def _best_constant(task: Task) -> float:
    drawn = list(rows(task.name, "test", CHANCE_ROWS, 0))
    answers = Counter(row.answer for row in drawn)
    replies = {row.answer: row.messages[-1]["content"] for row in drawn}.values()  # those of one answer score alike
    best = max(sum(number for answer, number in answers.items() if task.is_right(answer, reply)) for reply in replies)
    return best / len(drawn)
