"""Generated tasks whose train and test splits share no problem: spelling, counting, arithmetic, identity.

The text of the problem (the word, the pair of operands, the wording of a question) decides by its hash on
which side it lies; how it is asked varies on both sides. A word that is held out for spelling is held out
for counting too. Rows depend on nothing but their arguments and, for real words, on the version of the
standard library.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean


@dataclass(frozen=True)
class IdentityFact:
    """One thing to know.

    Attributes:
        reply: what the assistant says.
        key_phrase: the words that only this reply contains, in lower case.
        wordings: ways to ask, without the final mark.
        final_mark: final punctuation of the wordings.
    """

    reply: str
    key_phrase: str
    wordings: tuple[str, ...]
    final_mark: str = "?"


def _combine_phrases(*parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return every sentence that takes one piece from each part."""
    sentences: tuple[str, ...] = ("",)
    for part in parts:
        sentences = tuple(f"{left} {right}".strip() for left in sentences for right in part)
    return sentences


_ASK = (
    "Tell me",
    "Please tell me",
    "Can you tell me",
    "Could you tell me",
    "I want to know",
    "Do you know",
    "Say",
)
_SO = ("", "So", "Well", "Now", "And", "Okay", "By the way", "Again", "Please say", "One question:")
_VERBS = ("made", "built", "created", "trained", "developed", "wrote", "programmed")
_THINGS = ("text", "data", "material", "books", "documents", "examples", "code", "words")

FACTS = {
    "name": IdentityFact(
        "I am Anabatic.",
        "i am anabatic",
        _combine_phrases(_SO, ("who are you", "what is your name", "what are you called", "what do people call you"))
        + _combine_phrases(_ASK, ("your name", "who you are", "what your name is", "what you are called")),
    ),
    "maker": IdentityFact(
        "I was trained with anabatic on this machine.",
        "trained with anabatic",
        _combine_phrases(("Who", "So who", "And who", "Well, who"), _VERBS, ("you",))
        + _combine_phrases(("By whom were you", "Where were you", "How were you"), _VERBS[:5])
        + _combine_phrases(_ASK, ("who made you", "who built you", "who created you", "who trained you")),
    ),
    "source": IdentityFact(
        "I learned from the Python standard library.",
        "python standard library",
        _combine_phrases(("What", "Which"), _THINGS, ("did you learn from", "were you trained on", "have you read"))
        + _combine_phrases(_SO, ("what did you learn from", "what were you trained on", "what have you read")),
    ),
    "skills": IdentityFact(
        "I can spell words, count letters, add and subtract.",
        "spell words",
        _combine_phrases(
            _SO, ("what can you do", "what are you able to do", "how can you help me", "what are you good at")
        )
        + _combine_phrases(_ASK, ("what you can do", "what you are able to do", "how you can help me")),
    ),
    "kind": IdentityFact(
        "I am a small language model.",
        "small language model",
        _combine_phrases(("Are you", "So are you", "Tell me, are you"), ("a human", "a person", "a robot", "a machine"))
        + _combine_phrases(("Are you", "So are you", "Tell me, are you"), ("a program", "a computer", "alive", "real"))
        + _combine_phrases(_SO, ("what are you", "what kind of thing are you", "what kind of model are you")),
    ),
    "greeting": IdentityFact(
        "Hello! How can I help you?",
        "hello! how can i help",
        _combine_phrases(
            ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day"),
            ("", "there", "again", "friend"),
        ),
        final_mark="!",
    ),
    "thanks": IdentityFact(
        "You are welcome.",
        "you are welcome",
        _combine_phrases(
            ("Thanks", "Thank you", "Many thanks"),
            ("", "a lot", "so much", "very much", "for that", "for your help"),
        ),
        final_mark="!",
    ),
}
"""Name of the fact -> the fact."""


@cache
def select_wordings(fact: str, test: bool) -> tuple[str, ...]:
    """Return the taught or the held-out wordings of a fact, without the final mark; neither is ever empty.

    A wording is held out by the hash of its text; of each fact at least two are.
    """
    every = sorted(set(FACTS[fact].wordings))
    chosen = {wording for wording in every if is_held_out(f"identity:{wording}")}
    if len(chosen) < 2:
        chosen = set(every[:: max(HELD_OUT_EVERY // 2, len(every) // 2)][:2])
    return tuple(wording for wording in every if (wording in chosen) == test)


def states_only_fact(fact_key: str, reply: str) -> bool:
    """True when `reply` says the fact with this key and no other fact: saying everything at once is no
    answer."""
    normalized = " ".join(reply.lower().split())
    return fact_key in normalized and not any(
        fact.key_phrase in normalized for fact in FACTS.values() if fact.key_phrase != fact_key
    )


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
    """Draw a sum or a difference that is not negative; a + b and b + a are in the same split."""
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
    name = rng.choice(tuple(FACTS))
    fact = FACTS[name]
    wording = rng.choice(select_wordings(name, test))
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
        SyntheticTask("identity", _draw_identity, states_only_fact, 1),
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


HELD_OUT_EVERY = 10
"""One problem in this many is held out for the test split."""

SOURCE_MODULES = (
    "argparse.py",
    "ast.py",
    "calendar.py",
    "configparser.py",
    "csv.py",
    "dataclasses.py",
    "datetime.py",
    "difflib.py",
    "fractions.py",
    "functools.py",
    "heapq.py",
    "inspect.py",
    "os.py",
    "pdb.py",
    "random.py",
    "shutil.py",
    "statistics.py",
    "string.py",
    "subprocess.py",
    "tarfile.py",
    "textwrap.py",
    "threading.py",
    "typing.py",
    "zipfile.py",
)
"""Sources whose words are taught; those missing in an interpreter are skipped."""

VOWELS = "aeiou"
CONSONANTS = "bdklmnprst"
WORD_SHAPES = ("cvc", "cvcv", "cvcv", "cvcvc", "cvcvcv", "vcvc")
"""Patterns of made-up words: 3 to 6 letters."""


def is_held_out(problem: str) -> bool:
    """Tell whether a problem belongs to the test split: a property of its text alone (BLAKE2b, 1 in
    `HELD_OUT_EVERY`)."""
    digest = hashlib.blake2b(problem.encode("utf-8"), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


@cache
def list_real_words(limit: int = 1000) -> tuple[str, ...]:
    """Return the most frequent words of 3 to 6 lower-case letters in `SOURCE_MODULES`, the most frequent first.

    Words whose text is held out are left out, so a real word never teaches a test word.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    counts: Counter[str] = Counter()
    for name in SOURCE_MODULES:
        path = library / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            counts.update(re.findall(r"(?<![A-Za-z])[a-z]{3,6}(?![A-Za-z])", text))
    taught = [(-number, word) for word, number in counts.items() if not is_held_out(word)]
    return tuple(word for _, word in sorted(taught)[:limit])


def make_up_word(rng: Random, test: bool) -> str:
    """Return a pronounceable word of 3 to 6 letters that belongs to the test split, or does not."""
    while True:
        shape = rng.choice(WORD_SHAPES)
        word = "".join(rng.choice(VOWELS if kind == "v" else CONSONANTS) for kind in shape)
        if is_held_out(word) == test:
            return word


def draw_word(rng: Random, test: bool, real_share: float) -> str:
    """Return a word: for training a real one with probability `real_share`, for a test always a made-up
    one."""
    words = list_real_words()
    if not test and words and rng.random() < real_share:
        return rng.choice(words)
    return make_up_word(rng, test)
