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
from anabatic.core.formatting import did_you_mean
from anabatic.data.builtin import identity_task
from anabatic.data.builtin.task_vocabulary import CONSONANTS, VOWELS, draw_word, is_held_out

Split = Literal["train", "test"]
Message = dict[str, str]

DEFAULT_ROWS = 20_000
"""Rows of a `task:NAME` source without `#ROWS`."""
CHANCE_ROWS = 1_000
"""Test rows over which chance is computed."""
_MAX_REDRAWS = 200
"""Draws in a row that may repeat a test problem before repeats are let through: the problems are used up."""


@dataclass(frozen=True)
class TaskProblem:
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
        answer: what `is_reply_correct` compares a reply with.
        choices: the answers to choose from when the task has a closed list, else None.
        task: name of the task, for rows of `all`.
    """

    messages: list[Message]
    answer: str
    choices: tuple[str, ...] | None
    task: str


@dataclass(frozen=True)
class SyntheticTask:
    """A task: how a problem is drawn, when a reply is right, and its share of the rows of `all`."""

    name: str
    draw_problem: Callable[[Random, bool], TaskProblem]
    is_correct: Callable[[str, str], bool]
    mixture_weight: int


SPELLING_QUESTIONS = (
    "Spell the word {w}.",
    "Spell {w}.",
    "How do you spell {w}?",
    "How is {w} spelled?",
    "Please spell {w}.",
    "Say the letters of {w}.",
)
COUNTING_QUESTIONS = (
    "How many times does the letter {c} occur in the word {w}?",
    "How many {c} are in {w}?",
    "How often does {c} occur in {w}?",
    "Count the letter {c} in {w}.",
    "Count {c} in {w}.",
)
ARITHMETIC_QUESTIONS = {
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
MAX_LETTER_COUNT = 3


def _draw_spelling(rng: Random, test: bool) -> TaskProblem:
    chosen = draw_word(rng, test, real_share=0.15)
    letters = " ".join(chosen)
    return TaskProblem(chosen, rng.choice(SPELLING_QUESTIONS).format(w=chosen), letters, letters)


def _draw_counting(rng: Random, test: bool) -> TaskProblem:
    """Draw how often the letter shall occur first, so that no answer is much more frequent than another."""
    target_count = rng.randint(0, MAX_LETTER_COUNT)
    while True:
        chosen = draw_word(rng, test, real_share=0.05)
        letters = [c for c in VOWELS + CONSONANTS if chosen.count(c) == target_count]
        if letters:
            break
    letter = rng.choice(letters)
    question = rng.choice(COUNTING_QUESTIONS).format(c=letter, w=chosen)
    choices = tuple(str(number) for number in range(MAX_LETTER_COUNT + 1))
    return TaskProblem(f"{chosen} {letter}", question, _number_letters(chosen, letter), str(target_count), choices)


def _number_letters(chosen: str, letter: str) -> str:
    """Return the letters with a number after each one that counts: `t r e1 e2: 2`."""
    number, parts = 0, []
    for each in chosen:
        number += each == letter
        parts.append(f"{each}{number}" if each == letter else each)
    return f"{' '.join(parts)}: {number}"


def _draw_arithmetic(rng: Random, test: bool) -> TaskProblem:
    """Draw a sum or a difference that is not negative; a + b and b + a lie on the same side."""
    while True:
        a, b = rng.randint(0, LARGEST_OPERAND), rng.randint(0, LARGEST_OPERAND)
        sign = rng.choice("+-")
        low, high = sorted((a, b))
        if sign == "-":
            a, b = high, low
        if is_held_out(f"{high} {sign} {low}") == test:
            break
    answer = str(a + b if sign == "+" else a - b)
    question = rng.choice(ARITHMETIC_QUESTIONS[sign]).format(a=a, b=b)
    return TaskProblem(
        f"{high} {sign} {low}", question, f"{a} {sign} {b} = {_show_tens_and_ones(a, sign, b)} = {answer}", answer
    )


def _show_tens_and_ones(a: int, sign: str, b: int) -> str:
    """Return the tens and the ones apart: 27 + 45 is 60 + 12, 52 - 27 is 30 - 5."""
    if sign == "+":
        return f"{a // 10 * 10 + b // 10 * 10} + {a % 10 + b % 10}"
    tens, ones = a // 10 * 10 - b // 10 * 10, a % 10 - b % 10
    return f"{tens} {'-' if ones < 0 else '+'} {abs(ones)}"


def _draw_identity(rng: Random, test: bool) -> TaskProblem:
    name = rng.choice(tuple(identity_task.FACTS))
    fact = identity_task.FACTS[name]
    wording = rng.choice(identity_task.select_wordings(name, test))
    return TaskProblem(wording, wording[0].upper() + wording[1:] + fact.final_mark, fact.reply, fact.key_phrase)


def _letters_match(answer: str, reply: str) -> bool:
    return reply.split() == answer.split()


def _last_number_matches(answer: str, reply: str) -> bool:
    """The last number said is the answer."""
    numbers = re.findall(r"-?\d+", reply)
    return bool(numbers) and numbers[-1] == answer


TASKS = {
    task.name: task
    for task in (
        SyntheticTask("spelling", _draw_spelling, _letters_match, 3),
        SyntheticTask("counting", _draw_counting, _last_number_matches, 3),
        SyntheticTask("arithmetic", _draw_arithmetic, _last_number_matches, 3),
        SyntheticTask("identity", _draw_identity, identity_task.states_only_fact, 1),
    )
}
"""Name -> task, in the order in which scores are printed."""


def generate_task_rows(name: str, split: Split, n: int | None, seed: int) -> Iterator[TaskRow]:
    """Yield `n` rows of a task (without end when `n` is None); `all` mixes the tasks by their shares.

    Pure: the same arguments give the same rows. In the test split no problem comes twice before the
    problems are used up.

    Raises:
        ConfigError: there is no task of this name.
    """
    tasks = get_tasks(name)
    weights = [task.mixture_weight for task in tasks]
    rng = Random(f"{name}/{split}/{seed}")
    seen: set[tuple[str, str]] = set()
    for _ in itertools.count() if n is None else range(n):
        task = tasks[0] if len(tasks) == 1 else rng.choices(tasks, weights)[0]
        problem = task.draw_problem(rng, split == "test")
        if split == "test":
            problem = _draw_unseen(task, problem, rng, seen)
        messages = [
            {"role": "user", "content": problem.question},
            {"role": "assistant", "content": problem.reply},
        ]
        yield TaskRow(messages, problem.answer, problem.choices, task.name)


def _draw_unseen(task: SyntheticTask, problem: TaskProblem, rng: Random, seen: set[tuple[str, str]]) -> TaskProblem:
    for _ in range(_MAX_REDRAWS):
        if (task.name, problem.text) not in seen:
            break
        problem = task.draw_problem(rng, True)
    seen.add((task.name, problem.text))
    return problem


def get_tasks(name: str) -> list[SyntheticTask]:
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


def generate_task_conversations(
    name: str, rows: int | None, split: Split = "train", seed: int = 0
) -> Iterator[list[Message]]:
    """Yield the conversations of a `task:NAME` source, `DEFAULT_ROWS` of them unless `generate_task_rows` says
    otherwise.

    Two in five put several questions one after another, so that the model learns to go by the last one.

    Raises:
        ConfigError: there is no task of this name.
    """
    num_rows = DEFAULT_ROWS if rows is None else rows
    lengths = Random(f"turns {seed}").choices((1, 2, 3), weights=(6, 2, 2), k=num_rows)
    drawn_rows = _rows(name, split, sum(lengths), seed)
    for length in lengths:
        yield [message for row in itertools.islice(drawn_rows, length) for message in row.messages]


_rows = generate_task_rows
"""`generate_task_rows` under a name that the parameter of `generate_task_conversations` does not hide."""


def is_reply_correct(task: str, answer: str, reply: str) -> bool:
    """Tell whether `reply` answers a row of `task` (the row's own `task`, not `all`) whose answer is
    `answer`.

    spelling: the same letters, one blank between them; counting and arithmetic: the last number said;
    identity: the fact asked for is said, and no other.

    Raises:
        ConfigError: there is no task of this name.
    """
    return get_tasks(task)[0].is_correct(answer, reply)


@cache
def chance_accuracy(task: str) -> float:
    """Return the accuracy of the best reply that is given without reading the question, 0 to 1.

    Every reply that is right somewhere in the first `CHANCE_ROWS` test rows (seed 0) is given to all of
    them and scored as a model's would be; the best share counts. For `all` each task is answered by its own
    best reply and the tasks are weighted by how often they are asked.

    Raises:
        ConfigError: there is no task of this name.
    """
    tasks = get_tasks(task)
    total = sum(one.mixture_weight for one in tasks)
    return sum(one.mixture_weight * _best_constant_accuracy(one) for one in tasks) / total


def _best_constant_accuracy(task: SyntheticTask) -> float:
    drawn_rows = list(generate_task_rows(task.name, "test", CHANCE_ROWS, 0))
    answers = Counter(row.answer for row in drawn_rows)
    replies = {
        row.answer: row.messages[-1]["content"] for row in drawn_rows
    }.values()  # those of one answer score alike
    best = max(sum(number for answer, number in answers.items() if task.is_correct(answer, reply)) for reply in replies)
    return best / len(drawn_rows)
