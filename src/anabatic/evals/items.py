"""From rows to items: what a model is asked, with examples before it, and what would be right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from anabatic.config.task import EvalTask
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.raw_rows import RawRow
from anabatic.evals import template

Message = dict[str, str]

CORE_SHUFFLE, CORE_SHOTS = 1337, 1234
"""Seeds of the CORE evaluation (nanochat, scripts/base_eval.py and nanochat/core_eval.py): of the order of the rows,
and, with the number of a row added, of its examples."""


@dataclass(frozen=True)
class Pair:
    """A context and what may follow it; the context is a text, or the turns of a conversation."""

    context: str | list[Message]
    continuation: str = ""


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        number: of its row in the task, from 0.
        place: file and row.
        pairs: of choices one for each; else one.
        question: the prompt without what stands before it.
        labels: the choices as texts.
        gold: number of the right choice; -1: there are none.
        answer: what is right of a reply in own words.
        group: value of `group_by`.
        row: the columns, for checks that need more than the answer.
    """

    number: int
    place: str
    pairs: list[Pair]
    question: str = ""
    labels: list[str] = field(default_factory=list)
    gold: int = -1
    answer: str = ""
    group: str = ""
    row: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Asked:
    """One row with its templates filled, before examples are put before it."""

    prompt: str
    targets: list[str]
    contexts: list[str]
    gold: int
    answer: str

    def solved(self, task: EvalTask) -> tuple[str, str]:
        """The prompt and the right continuation."""
        at = max(0, self.gold)
        return (self.contexts[at] if self.contexts else self.prompt), self.targets[at if len(self.targets) > 1 else 0]


def items(
    task: EvalTask, rows: Sequence[RawRow], shots_rows: Sequence[RawRow] | None, *, shots: int, limit: int | None,
    seed: int,
) -> list[Item]:  # fmt: skip
    """Return the items of a task.

    Args:
        rows: of the task, whole.
        shots_rows: rows for examples; None: the others of `rows`.
        shots: examples before each question.
        limit: items at most, evenly spread over the rows (of CORE tasks the first ones of their order).
        seed: of random examples, which depend on it, the task and the row alone.

    Raises:
        ConfigError: a template is broken.
        DataError: a row lacks something, or there are fewer rows than examples asked for.
    """
    _check_templates(task, rows[0].columns if rows else ())
    kept = [row for row in rows if not task.keep or template.value(task.keep, row, f"keep of {task.name}")]
    if not kept:
        raise DataError(f"{task.name}: none of {len(rows):,} rows is kept", f'look at its `keep`: "{task.keep}"')
    order = list(range(len(kept)))
    if task.shots_draw == "core":
        Random(CORE_SHUFFLE).shuffle(order)
        kept, order = [kept[at] for at in order], list(range(len(kept)))
    wanted = len(kept) if limit is None else min(limit, len(kept))
    chosen = order[:wanted] if task.shots_draw == "core" else [at * len(kept) // wanted for at in range(wanted)]
    examples = _Examples(task, kept, shots_rows, shots, seed)
    return [_item(task, kept[at], at, examples.of(at)) for at in chosen]


def _check_templates(task: EvalTask, columns: Container[str]) -> None:
    for name in ("description", "program", "tests", "helpers", "system"):
        template.check(getattr(task, name), f"{name} of {task.name}")
    for name in ("prompt", "continuation", "keep", "group_by", "shots_same", "choices", "contexts", "answer"):
        given = getattr(task, name)
        for one in given if isinstance(given, list) else [given]:
            if isinstance(one, str):
                template.check(one, f"{name} of {task.name}", () if isinstance(given, list) else columns)


class _Examples:
    """Rows that are shown, solved, before a question."""

    def __init__(
        self, task: EvalTask, rows: Sequence[RawRow], given: Sequence[RawRow] | None, shots: int, seed: int
    ) -> None:
        self._task, self._rows, self._shots, self._seed = task, rows, shots, seed
        self._own = given is None
        self._pool: dict[str, list[int]] = defaultdict(list)
        self._source = rows if given is None else given
        for at, row in enumerate(self._source if shots else ()):
            self._pool[self._key(row)].append(at)
        self._known: dict[int, _Asked] = {}

    def _key(self, row: RawRow) -> str:
        same = self._task.shots_same
        return template.text(same, row, f"shots_same of {self._task.name}") if same else ""

    def of(self, at: int) -> list[_Asked]:
        """Return the examples for a row."""
        if not self._shots:
            return []
        key = self._key(self._rows[at])
        pool = [other for other in self._pool[key] if not self._is_itself(other, at)]
        if len(pool) < self._shots:
            alike = f" with {self._task.shots_same} as in {self._rows[at].place}" if key else ""
            raise DataError(
                f"{self._task.name} shows {self._shots} examples before a question, and has {len(pool)} rows for"
                f" them{alike}",
                f"ask for fewer with --shots {len(pool)}, or give more rows",
            )
        return [self._solved(one) for one in self._drawn(pool, at)]

    def _is_itself(self, other: int, at: int) -> bool:
        """Tell whether an example would be the question: also where both are drawn from the same file."""
        if self._own:
            return other == at
        return self._source[other] == self._rows[at]

    def _drawn(self, pool: list[int], at: int) -> list[int]:
        draw = self._task.shots_draw
        if draw == "first":
            return pool[: self._shots]
        seed = CORE_SHOTS + at if draw == "core" else f"{self._seed}/{self._task.name}/{at}"
        return Random(seed).sample(pool, self._shots)

    def _solved(self, at: int) -> _Asked:
        if at not in self._known:
            self._known[at] = _ask(self._task, self._source[at])
        return self._known[at]


def _item(task: EvalTask, row: RawRow, number: int, examples: list[_Asked]) -> Item:
    asked = _ask(task, row)
    group = template.text(task.group_by, row, f"group_by of {task.name}") if task.group_by else ""
    pairs = _chat_pairs(task, row, asked, examples) if task.chat else _plain_pairs(task, row, asked, examples)
    labels = asked.contexts if task.kind == "cloze" else asked.targets if task.kind == "choices" else []
    return Item(number, row.place, pairs, asked.prompt, labels, asked.gold, asked.answer, group, row.columns)


def _plain_pairs(task: EvalTask, row: RawRow, asked: _Asked, examples: list[_Asked]) -> list[Pair]:
    before = template.text(task.description, row, f"description of {task.name}")
    for example in examples:
        prompt, target = example.solved(task)
        before += prompt + task.between + target + task.shots_between
    if task.kind == "cloze":
        return [Pair(before + context, task.between + asked.targets[0]) for context in asked.contexts]
    if task.kind == "completion" and task.shots_draw == "core":
        return [Pair(before + asked.prompt + task.between, asked.targets[0])]
    if task.kind in ("generate", "perplexity"):
        return [Pair(before + asked.prompt)]
    return [Pair(before + asked.prompt, task.between + target) for target in asked.targets]


def _chat_pairs(task: EvalTask, row: RawRow, asked: _Asked, examples: list[_Asked]) -> list[Pair]:
    turns: list[Message] = []
    system = template.text(task.system, row, f"system of {task.name}")
    if system:
        turns.append({"role": "system", "content": system})
    for example in examples:
        prompt, target = example.solved(task)
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": target}]
    turns.append({"role": "user", "content": asked.prompt})
    return [Pair(turns, target) for target in (asked.targets if task.kind == "choices" else [""])]


def _ask(task: EvalTask, row: RawRow) -> _Asked:
    prompt = template.text(task.prompt, row, f"prompt of {task.name}")
    if task.shots_draw == "core" and task.kind == "completion":
        prompt = prompt.strip()
    if task.kind == "choices":
        targets = _texts(task, row, "choices")
        return _Asked(prompt, targets, [], _gold(task, row, targets), "")
    if task.kind == "cloze":
        contexts = _texts(task, row, "contexts")
        target = template.text(task.continuation, row, f"continuation of {task.name}")
        return _Asked(prompt, [target], contexts, _gold(task, row, contexts), "")
    if task.kind == "completion":
        return _Asked(prompt, [template.text(task.continuation, row, f"continuation of {task.name}")], [], -1, "")
    answer = "" if task.answer is None else template.value(task.answer, row, f"answer of {task.name}")
    return _Asked(prompt, [str(answer)], [], -1, str(answer))


def _texts(task: EvalTask, row: RawRow, name: str) -> list[str]:
    what = f"{name} of {task.name}"
    given = template.value(getattr(task, name), row, what)
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        raise DataError(
            f"{row.place}: {what} is {given!r:.60}, not a list of two or more",
            'write a list of templates, or a column that holds one: "{{ column }}"; a text is parted by "{{'
            " column.split(';') }}\"",
        )
    if inner := [one for one in given if isinstance(one, (list, tuple, dict))]:
        raise DataError(f"{row.place}: {what} holds {inner[0]!r:.60}, which is no text", "write one template for each")
    texts = [str(one) for one in given]
    if empty := [at for at, one in enumerate(texts, start=1) if not one]:
        raise DataError(f"{row.place}: number {empty[0]} in {what} is empty", "mend the row")
    return texts


def _gold(task: EvalTask, row: RawRow, texts: list[str]) -> int:
    """The number of the right choice, which a row tells as that (from 0), as its text, or as a letter."""
    what = f"answer of {task.name}"
    given = template.value(task.answer, row, what)
    found = -1
    if isinstance(given, int) or (isinstance(given, float) and given.is_integer()):  # of floats: a column with gaps
        found = int(given)
    elif isinstance(given, str):
        said = given.strip()
        if given in texts:
            found = texts.index(given)
        elif said.isdecimal():
            found = int(said)
        elif len(said) == 1 and said.isalpha():
            found = ord(said.upper()) - ord("A")
    if not 0 <= found < len(texts):
        raise DataError(
            f"{row.place}: {what} is {given!r:.60}, and there are {len(texts)} choices",
            "give the number of the right one from 0, its text, or its letter",
        )
    return found


def require_chat(task: EvalTask, tokenizer: Any) -> None:
    """Refuse a task in conversations where the tokenizer knows none.

    Raises:
        ConfigError: it has no chat template.
    """
    if task.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{task.name} is asked in conversations, and {tokenizer.name_or_path} has no chat template",
            "fine-tune the model with `anabatic sft` first, or use the plain form of the task",
        )
