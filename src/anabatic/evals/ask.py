"""One task asked: rows, items, answers (of which many may be known already), records, figures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from anabatic.config.chat import Sampling
from anabatic.config.sandbox import Sandbox
from anabatic.config.task import EvalTask, TaskData
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.data import raw_rows, tasks
from anabatic.data.raw_rows import RawRow
from anabatic.data.tokenizer import chat_prompt
from anabatic.evals import records
from anabatic.evals.encode import beginnings, encode, prefix_token
from anabatic.evals.items import Item, items, require_chat
from anabatic.evals.judge import judge, require_judged
from anabatic.evals.known import Planned
from anabatic.evals.likelihood import Likelihood
from anabatic.evals.locate import locate
from anabatic.evals.records import Record
from anabatic.evals.statistics import Figure
from anabatic.evals.store import Store, reply_key, text_key
from anabatic.evals.trees import Text

REPLY = 64
"""Tokens of a reply where nobody says how many."""
GENERATED = 200
"""Questions of a generated task where nobody says how many."""


class Asked(Protocol):
    """Somebody who is asked: a loaded model, or a served one."""

    tokenizer: Any
    max_len: int

    def score(self, texts: Sequence[Text], what: str) -> Iterator[dict[int, Likelihood]]:
        """Yield likelihoods by number of the text."""

    def reply(self, prompts: Sequence[list[int]], sampling: Sampling, what: str) -> Iterator[dict[int, str]]:
        """Yield replies by number of the prompt."""


@dataclass(frozen=True)
class How:
    """Settings that hold for all tasks.

    Attributes:
        folder: of the user's data sets; None: those of the hub are fetched.
        shots, limit, max_new_tokens: None: as each task says.
        sandbox: where programs run that tell whether a reply is right.
    """

    folder: Path | None = None
    shots: int | None = None
    limit: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None
    sandbox: Sandbox = field(default_factory=Sandbox)


@dataclass
class Result:
    """What came of a task.

    Attributes:
        figures: metric -> figure with its interval.
        chance: what guessing scores.
        cut: items that were longer than the context and were cut from the left; empty: replies without a word.
        known: answers that were there already; seconds: the rest took.
    """

    task: EvalTask
    records: list[Record]
    figures: dict[str, Figure]
    chance: float
    shots: int
    cut: int
    empty: int
    known: int
    seconds: float
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def figure(self) -> Figure:
        """The metric that counts."""
        return self.figures[self.task.counts]

    @property
    def centred(self) -> float:
        """How far it is from chance (0) to perfect (1)."""
        return (self.figure.value - self.chance) / (1 - self.chance)


class Prepared(NamedTuple):
    """A task whose rows are read.

    Attributes:
        shots: examples before each item.
    """

    task: EvalTask
    items: list[Item]
    shots: int


def prepare(planned: Planned, how: How) -> Prepared:
    """Read the rows of a task and make its items; no model is needed.

    Raises:
        ConfigError: a template is broken.
        DataError: its rows are missing, damaged or too few.
    """
    task, limit = planned.task, planned.limit or how.limit
    shots = task.shots if how.shots is None or task.kind == "perplexity" else how.shots
    rows = _rows(task, task.data, planned.beside, how, limit)
    apart = task.examples_data
    examples = None if apart is None or not shots else _rows(task, apart, planned.beside, how, None)
    made = items(task, rows, examples, shots=shots, limit=limit, seed=how.seed)
    for item in made if task.kind == "generate" else ():
        require_judged(task, item)
    return Prepared(task, made, shots)


def _rows(task: EvalTask, data: TaskData, beside: Path | None, how: How, limit: int | None) -> list[RawRow]:
    if not data.task:
        return [row for path in locate(data, task.name, beside, how.folder) for row in raw_rows.read(path)]
    drawn = tasks.rows(data.task, "train" if data.split == "train" else "test", limit or GENERATED, how.seed)
    return [
        RawRow({"question": row.messages[0]["content"], "answer": row.answer}, f"task:{data.task} row {number}")
        for number, row in enumerate(drawn, start=1)
    ]


def require_askable(task: EvalTask, asked: Asked, how: How) -> None:
    """Make sure, before anything is asked, that a task can be.

    Raises:
        ConfigError: the tokenizer has no chat template and the task needs one.
        DataError: a reply leaves no room for a question.
    """
    require_chat(task, asked.tokenizer)
    longest = _longest(task, how)
    if task.kind == "generate" and asked.max_len <= longest:
        raise DataError(
            f"{task.name}: a reply of {longest} tokens leaves no room for a question, the context has {asked.max_len}",
            "ask for shorter replies with --max-new-tokens",
        )


def _longest(task: EvalTask, how: How) -> int:
    return how.max_new_tokens or task.max_new_tokens or REPLY


def ask(prepared: Prepared, asked: Asked, how: How, store: Store) -> Result:
    """Ask a task, which `require_askable` has passed, and return what came of it.

    Raises:
        DataError: a question cannot be put into tokens.
        Failure: the model is broken.
    """
    task, asked_items, shots = prepared
    started = time.monotonic()
    way = {"generate": _replies, "perplexity": _whole_texts}.get(task.kind, _likelihoods)
    made = way(task, asked_items, asked, how, store)
    if made.cut:
        log.warn(
            f"{task.name}: {made.cut:,} of {len(asked_items):,} items are longer than the context: cut on the left"
        )
    return Result(
        task, made.records, records.figures(task, made.records, how.seed), records.chance_of(task, asked_items), shots,
        made.cut, made.empty, made.known, time.monotonic() - started, records.by_group(task, made.records),
    )  # fmt: skip


@dataclass
class _Made:
    records: list[Record]
    cut: int
    known: int
    empty: int = 0


def _likelihoods(task: EvalTask, asked_items: list[Item], asked: Asked, how: How, store: Store) -> _Made:
    encoded = encode(asked.tokenizer, asked_items, asked.max_len, core=task.shots_draw == "core")
    found, known = _scores(task, encoded.texts, asked, store)
    ends = list(itertools.accumulate(len(item.pairs) for item in asked_items))
    made = [
        records.of_likelihoods(task, item, found[end - len(item.pairs) : end])
        for item, end in zip(asked_items, ends, strict=True)
    ]
    return _Made(_marked(made, encoded.cut), len(encoded.cut), known)


def _marked(made: list[Record], cut: Iterable[int]) -> list[Record]:
    """Tell in the record of an item that it was not asked as a whole."""
    for at in cut:
        made[at]["cut"] = True
    return made


def _whole_texts(task: EvalTask, asked_items: list[Item], asked: Asked, how: How, store: Store) -> _Made:
    """Every token counts, once. A text longer than the context is read in pieces: each begins with the last token of
    the one before, the last piece with as many as there is room for (lm-evaluation-harness, lm_eval/utils.py,
    get_rolling_token_windows)."""
    first = prefix_token(asked.tokenizer)
    texts, pieces = [], []
    for item in asked_items:
        text = str(item.pairs[0].context)
        ids = beginnings(asked.tokenizer, [text])[text]
        if not text or not ids:
            raise DataError(f"{item.place}: the text is empty", "leave the row out with `keep`")
        whole = [first, *ids]
        for at in (starts := range(0, len(ids), asked.max_len)):
            end = min(at + asked.max_len, len(ids))
            texts.append(Text(whole[max(0, end - asked.max_len) : end + 1], end - at))
        pieces.append(len(starts))
    found, known = _scores(task, texts, asked, store)
    made, at = [], 0
    for item, count in zip(asked_items, pieces, strict=True):
        made.append(records.of_likelihoods(task, item, found[at : at + count]))
        at += count
    return _Made(made, 0, known)


def _scores(task: EvalTask, texts: list[Text], asked: Asked, store: Store) -> tuple[list[Likelihood], int]:
    """Score texts that are not known yet; return all, in order, and how many were known."""
    names = [text_key(text) for text in texts]
    fresh = list({name: text for name, text in zip(names, texts, strict=True) if store.get(name) is None}.items())
    known = sum(store.get(name) is not None for name in names)
    _keep(store, fresh, asked.score([text for _, text in fresh], f"scoring {task.name}"), list)
    return [Likelihood(*store.get(name)) for name in names], known


def _keep(
    store: Store, asked_for: list[tuple[str, Any]], found: Iterable[dict[int, Any]], form: Callable[[Any], Any]
) -> None:
    for part in found if asked_for else ():
        store.put({asked_for[number][0]: form(one) for number, one in part.items()})


def _replies(task: EvalTask, asked_items: list[Item], asked: Asked, how: How, store: Store) -> _Made:
    longest = _longest(task, how)
    sampling = Sampling(temperature=0.0, max_new_tokens=longest, stop=task.stop)
    prompts: list[list[int]] = []
    cut: list[int] = []
    room = asked.max_len - longest
    for at, item in enumerate(asked_items):
        ids = _prompt(asked.tokenizer, item)
        cut += [at] * (len(ids) > room)
        prompts.append(ids[-room:])
    names = [reply_key(ids, sampling) for ids in prompts]
    fresh = list({name: ids for name, ids in zip(names, prompts, strict=True) if store.get(name) is None}.items())
    known = sum(store.get(name) is not None for name in names)
    _keep(store, fresh, asked.reply([ids for _, ids in fresh], sampling, f"asking {task.name}"), str)
    replies = [store.get(name) for name in names]
    made = judge(task, asked_items, replies, how.sandbox)
    return _Made(_marked(made, cut), len(cut), known, sum(not reply.strip() for reply in replies))


def _prompt(tokenizer: Any, item: Item) -> list[int]:
    context = item.pairs[0].context
    if not isinstance(context, str):
        return chat_prompt(tokenizer, context)
    ids = beginnings(tokenizer, [context])[context]
    return ids or [prefix_token(tokenizer)]
