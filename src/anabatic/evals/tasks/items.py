"""From rows to items: what a model is asked, with examples before it, and what would be right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from anabatic.config.task import EvalTask
from anabatic.core.errors import ConfigError, DataError
from anabatic.core.formatting import parse_whole
from anabatic.data.chat.turn_fields import BadRowError
from anabatic.data.readers.raw_rows import RawRow
from anabatic.data.vision.row_pictures import resolve_picture
from anabatic.evals.tasks import templates

ChatTurn = dict[str, str]

CORE_SHUFFLE, CORE_SHOTS = 1337, 1234
"""Seeds of the CORE evaluation (nanochat, scripts/base_eval.py and nanochat/core_eval.py): of the order of the rows,
and, with the number of a row added, of its examples."""


@dataclass(frozen=True)
class ContextPair:
    """A context and what may follow it; the context is a text, or the turns of a conversation."""

    context: str | list[ChatTurn]
    continuation: str = ""


@dataclass(frozen=True)
class EvalItem:
    """One question.

    Attributes:
        row_number: of its row in the task, from 0.
        source_location: file and row.
        pairs: of choices one for each; else one.
        question: the prompt without what stands before it.
        labels: the choices as texts.
        gold_index: number of the right choice; -1: there are none.
        answer: what is right of a reply in own words.
        group: value of `group_by`.
        row: the columns, for checks that need more than the answer.
        pictures: paths and data URIs, in the order of the tags in the turns.
    """

    row_number: int
    source_location: str
    pairs: list[ContextPair]
    question: str = ""
    labels: list[str] = field(default_factory=list)
    gold_index: int = -1
    answer: str = ""
    group: str = ""
    row: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class _FilledRow:
    """One row with its templates filled, before examples are put before it."""

    prompt: str
    targets: list[str]
    contexts: list[str]
    gold_index: int
    answer: str

    def solved_pair(self, task: EvalTask) -> tuple[str, str]:
        """The prompt and the right continuation."""
        at = max(0, self.gold_index)
        return (self.contexts[at] if self.contexts else self.prompt), self.targets[at if len(self.targets) > 1 else 0]


def build_items(
    task: EvalTask,
    rows: Sequence[RawRow],
    shots_rows: Sequence[RawRow] | None,
    *,
    shots: int,
    limit: int | None,
    seed: int,
) -> list[EvalItem]:
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
    kept = [row for row in rows if not task.keep or templates.fill_value(task.keep, row, f"keep of {task.name}")]
    if not kept:
        raise DataError(f"{task.name}: none of {len(rows):,} rows is kept", f'look at its `keep`: "{task.keep}"')
    order = list(range(len(kept)))
    if task.shots_draw == "core":
        Random(CORE_SHUFFLE).shuffle(order)
        kept, order = [kept[at] for at in order], list(range(len(kept)))
    wanted = len(kept) if limit is None else min(limit, len(kept))
    chosen = order[:wanted] if task.shots_draw == "core" else [at * len(kept) // wanted for at in range(wanted)]
    examples = _ExamplePool(task, kept, shots_rows, shots, seed)
    return [_build_item(task, kept[at], at, examples.draw_examples(at)) for at in chosen]


def _check_templates(task: EvalTask, columns: Container[str]) -> None:
    for name in ("description", "program", "tests", "helpers", "system"):
        templates.check_template(getattr(task, name), f"{name} of {task.name}")
    for name in ("prompt", "continuation", "keep", "group_by", "shots_same", "choices", "contexts", "answer", "images"):
        given = getattr(task, name)
        for one in given if isinstance(given, list) else [given]:
            if isinstance(one, str):
                templates.check_template(one, f"{name} of {task.name}", () if isinstance(given, list) else columns)


class _ExamplePool:
    """Rows that are shown, solved, before a question."""

    def __init__(
        self, task: EvalTask, rows: Sequence[RawRow], given: Sequence[RawRow] | None, shots: int, seed: int
    ) -> None:
        self._task, self._rows, self._shots, self._seed = task, rows, shots, seed
        self._uses_own_rows = given is None
        self._pool: dict[str, list[int]] = defaultdict(list)
        self._source = rows if given is None else given
        for at, row in enumerate(self._source if shots else ()):
            self._pool[self._pool_key(row)].append(at)
        self._filled_rows: dict[int, _FilledRow] = {}

    def _pool_key(self, row: RawRow) -> str:
        same = self._task.shots_same
        return templates.fill_text(same, row, f"shots_same of {self._task.name}") if same else ""

    def draw_examples(self, at: int) -> list[_FilledRow]:
        """Return the examples for a row."""
        if not self._shots:
            return []
        key = self._pool_key(self._rows[at])
        pool = [other for other in self._pool[key] if not self._is_same_row(other, at)]
        if len(pool) < self._shots:
            alike = f" with {self._task.shots_same} as in {self._rows[at].location}" if key else ""
            raise DataError(
                f"{self._task.name} shows {self._shots} examples before a question, and has {len(pool)} rows for"
                f" them{alike}",
                f"ask for fewer with --shots {len(pool)}, or give more rows",
            )
        return [self._fill_example(one) for one in self._choose_rows(pool, at)]

    def _is_same_row(self, other: int, at: int) -> bool:
        """Tell whether an example would be the question: also where both are drawn from the same file."""
        if self._uses_own_rows:
            return other == at
        return self._source[other] == self._rows[at]

    def _choose_rows(self, pool: list[int], at: int) -> list[int]:
        draw = self._task.shots_draw
        if draw == "first":
            return pool[: self._shots]
        seed = CORE_SHOTS + at if draw == "core" else f"{self._seed}/{self._task.name}/{at}"
        return Random(seed).sample(pool, self._shots)

    def _fill_example(self, at: int) -> _FilledRow:
        if at not in self._filled_rows:
            self._filled_rows[at] = _fill_row(self._task, self._source[at])
        return self._filled_rows[at]


def _build_item(task: EvalTask, row: RawRow, number: int, examples: list[_FilledRow]) -> EvalItem:
    asked = _fill_row(task, row)
    group = templates.fill_text(task.group_by, row, f"group_by of {task.name}") if task.group_by else ""
    pairs = (
        _build_chat_pairs(task, row, asked, examples) if task.chat else _build_plain_pairs(task, row, asked, examples)
    )
    labels = asked.contexts if task.kind == "cloze" else asked.targets if task.kind == "choices" else []
    pictures = _fill_pictures(task, row)
    return EvalItem(
        number, row.location, pairs, asked.prompt, labels, asked.gold_index, asked.answer, group, row.columns, pictures
    )


def _fill_pictures(task: EvalTask, row: RawRow) -> tuple[str, ...]:
    given = None if task.images is None else templates.fill_value(task.images, row, f"images of {task.name}")
    try:
        values = given if isinstance(given, (list, tuple)) else [] if given in (None, "") else [given]
        return tuple(resolve_picture(each, row.folder) for each in values)
    except BadRowError as error:
        raise DataError(f"{row.location}: images of {task.name}: {error}", error.hint or "give a path") from error


def _build_plain_pairs(task: EvalTask, row: RawRow, asked: _FilledRow, examples: list[_FilledRow]) -> list[ContextPair]:
    before = templates.fill_text(task.description, row, f"description of {task.name}")
    for example in examples:
        prompt, target = example.solved_pair(task)
        before += prompt + task.between + target + task.shots_between
    if task.kind == "cloze":
        return [ContextPair(before + context, task.between + asked.targets[0]) for context in asked.contexts]
    if task.kind == "completion" and task.shots_draw == "core":
        return [ContextPair(before + asked.prompt + task.between, asked.targets[0])]
    if task.kind in ("generate", "perplexity"):
        return [ContextPair(before + asked.prompt)]
    return [ContextPair(before + asked.prompt, task.between + target) for target in asked.targets]


def _build_chat_pairs(task: EvalTask, row: RawRow, asked: _FilledRow, examples: list[_FilledRow]) -> list[ContextPair]:
    turns: list[ChatTurn] = []
    system = templates.fill_text(task.system, row, f"system of {task.name}")
    if system:
        turns.append({"role": "system", "content": system})
    for example in examples:
        prompt, target = example.solved_pair(task)
        turns += [{"role": "user", "content": prompt}, {"role": "assistant", "content": target}]
    turns.append({"role": "user", "content": asked.prompt})
    return [ContextPair(turns, target) for target in (asked.targets if task.kind == "choices" else [""])]


def _fill_row(task: EvalTask, row: RawRow) -> _FilledRow:
    prompt = templates.fill_text(task.prompt, row, f"prompt of {task.name}")
    if task.shots_draw == "core" and task.kind == "completion":
        prompt = prompt.strip()
    if task.kind == "choices":
        targets = _fill_choices(task, row, "choices")
        return _FilledRow(prompt, targets, [], _find_gold_index(task, row, targets), "")
    if task.kind == "cloze":
        contexts = _fill_choices(task, row, "contexts")
        target = templates.fill_text(task.continuation, row, f"continuation of {task.name}")
        return _FilledRow(prompt, [target], contexts, _find_gold_index(task, row, contexts), "")
    if task.kind == "completion":
        return _FilledRow(
            prompt, [templates.fill_text(task.continuation, row, f"continuation of {task.name}")], [], -1, ""
        )
    answer = "" if task.answer is None else templates.fill_value(task.answer, row, f"answer of {task.name}")
    return _FilledRow(prompt, [str(answer)], [], -1, str(answer))


def _fill_choices(task: EvalTask, row: RawRow, name: str) -> list[str]:
    what = f"{name} of {task.name}"
    given = templates.fill_value(getattr(task, name), row, what)
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        raise DataError(
            f"{row.location}: {what} is {given!r:.60}, not a list of two or more",
            'write a list of templates, or a column that holds one: "{{ column }}"; a text is split by "{{'
            " column.split(';') }}\"",
        )
    if inner := [one for one in given if isinstance(one, (list, tuple, dict))]:
        raise DataError(
            f"{row.location}: {what} holds {inner[0]!r:.60}, which is no text", "write one template for each"
        )
    texts = [str(one) for one in given]
    if empty := [at for at, one in enumerate(texts, start=1) if not one]:
        raise DataError(f"{row.location}: number {empty[0]} in {what} is empty", "fix the row")
    return texts


def _find_gold_index(task: EvalTask, row: RawRow, texts: list[str]) -> int:
    """The number of the right choice, which a row tells as that (from 0), as its text, or as a letter."""
    what = f"answer of {task.name}"
    given = templates.fill_value(task.answer, row, what)
    found = -1
    if isinstance(given, int) or (isinstance(given, float) and given.is_integer()):  # of floats: a column with gaps
        found = int(given)
    elif isinstance(given, str):
        said = given.strip()
        if given in texts:
            found = texts.index(given)
        elif (number := parse_whole(said)) is not None:
            found = number
        elif len(said) == 1 and said.isalpha():
            found = ord(said.upper()) - ord("A")
    if not 0 <= found < len(texts):
        raise DataError(
            f"{row.location}: {what} is {given!r:.60}, and there are {len(texts)} choices",
            "give the number of the right one from 0, its text, or its letter",
        )
    return found


def require_chat_template(task: EvalTask, tokenizer: Any) -> None:
    """Refuse a task in conversations where the tokenizer knows none.

    Raises:
        ConfigError: it has no chat template.
    """
    if task.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{task.name} is asked in conversations, and {tokenizer.name_or_path} has no chat template",
            "fine-tune the model with `anabatic sft` first, or use the plain form of the task",
        )
