"""One task asked: rows, items, answers (of which many may be known already), records, figures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from anabatic.config.chat import Sampling
from anabatic.config.sections.sandbox import SandboxSettings
from anabatic.config.task import EvalTask, TaskData
from anabatic.core import log
from anabatic.core.errors import ConfigError, DataError
from anabatic.data.builtin import synthetic_tasks
from anabatic.data.readers import raw_rows
from anabatic.data.readers.raw_rows import RawRow
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.evals import item_records
from anabatic.evals.answer_cache import AnswerCache, EvalPrompt, make_reply_key, make_text_key
from anabatic.evals.confidence_intervals import Estimate
from anabatic.evals.item_records import ItemRecord
from anabatic.evals.likelihood import Likelihood
from anabatic.evals.prefix_trees import ScoredText
from anabatic.evals.tasks.dataset_files import ResolveDataset, locate_files
from anabatic.evals.tasks.graders import grade_replies, require_gradable
from anabatic.evals.tasks.item_encoding import encode_beginnings, encode_items, find_prefix_token
from anabatic.evals.tasks.items import EvalItem, build_items, require_chat_template
from anabatic.evals.tasks.registry import PlannedTask
from anabatic.hub import datasets

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader

DEFAULT_REPLY_TOKENS = 64
"""Tokens of a reply where nobody says how many."""
DEFAULT_GENERATED_QUESTIONS = 200
"""Questions of a generated task where nobody says how many."""


class EvaluatedModel(Protocol):
    """Somebody who is asked: a loaded model, or a served one.

    Attributes:
        pictures: reads those of questions; None: it is shown none.
    """

    tokenizer: Any
    max_len: int
    pictures: PictureReader | None

    def score_texts(self, texts: Sequence[ScoredText], what: str) -> Iterator[dict[int, Likelihood]]:
        """Yield likelihoods by number of the text."""

    def generate_replies(
        self, prompts: Sequence[EvalPrompt], sampling: Sampling, what: str
    ) -> Iterator[dict[int, str]]:
        """Yield replies by number of the prompt."""


@dataclass(frozen=True)
class EvalOptions:
    """Settings that hold for all tasks.

    Attributes:
        dataset_folder: of the user's data sets; None: those of the hub are fetched.
        shots, limit, max_new_tokens: None: as each task says.
        sandbox: where programs run that tell whether a reply is right.
        resolve_dataset: chooses the commit of a data set of the hub.
    """

    dataset_folder: Path | None = None
    shots: int | None = None
    limit: int | None = None
    seed: int = 0
    max_new_tokens: int | None = None
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    resolve_dataset: ResolveDataset = datasets.resolve_dataset


@dataclass
class TaskResult:
    """Result of a task.

    Attributes:
        estimates: metric -> figure with its interval.
        chance: baseline, the score of guessing or of the best constant answer.
        num_truncated: items that were longer than the context and were cut from the left; num_empty: replies without a
        word.
        num_cached: answers that were there already; seconds: the rest took.
    """

    task: EvalTask
    records: list[ItemRecord]
    estimates: dict[str, Estimate]
    chance: float
    shots: int
    num_truncated: int
    num_empty: int
    num_cached: int
    seconds: float
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def main_estimate(self) -> Estimate:
        """The metric that counts."""
        return self.estimates[self.task.main_metric]

    @property
    def centred_score(self) -> float:
        """Score rescaled so that the baseline is 0 and perfect is 1."""
        return (self.main_estimate.value - self.chance) / (1 - self.chance)


class PreparedTask(NamedTuple):
    """A task whose rows are read.

    Attributes:
        shots: examples before each item.
    """

    task: EvalTask
    items: list[EvalItem]
    shots: int


def prepare_task(planned: PlannedTask, how: EvalOptions) -> PreparedTask:
    """Read the rows of a task and make its items; no model is needed.

    Raises:
        ConfigError: a template is broken.
        DataError: its rows are missing, damaged or too few.
    """
    task, limit = planned.task, planned.limit or how.limit
    shots = task.shots if how.shots is None or task.kind == "perplexity" else how.shots
    rows = _read_rows(task, task.data, planned.task_folder, how, limit)
    apart = task.examples_data
    examples = None if apart is None or not shots else _read_rows(task, apart, planned.task_folder, how, None)
    made = build_items(task, rows, examples, shots=shots, limit=limit, seed=how.seed)
    for item in made if task.kind == "generate" else ():
        require_gradable(task, item)
    return PreparedTask(task, made, shots)


def _read_rows(
    task: EvalTask, data: TaskData, beside: Path | None, how: EvalOptions, limit: int | None
) -> list[RawRow]:
    if not data.task:
        return [
            row
            for path in locate_files(data, task.name, beside, how.dataset_folder, how.resolve_dataset)
            for row in raw_rows.read_raw_rows(path, task.images is not None)
        ]
    drawn = synthetic_tasks.generate_task_rows(
        data.task, "train" if data.split == "train" else "test", limit or DEFAULT_GENERATED_QUESTIONS, how.seed
    )
    return [
        RawRow({"question": row.messages[0]["content"], "answer": row.answer}, f"task:{data.task} row {number}")
        for number, row in enumerate(drawn, start=1)
    ]


def require_runnable(task: EvalTask, asked: EvaluatedModel, how: EvalOptions) -> None:
    """Make sure, before anything is asked, that a task can be.

    Raises:
        ConfigError: the tokenizer has no chat template and the task needs one, or the task has pictures and the model
            sees none.
        DataError: a reply leaves no room for a question.
    """
    require_chat_template(task, asked.tokenizer)
    if task.images is not None and asked.pictures is None:
        raise ConfigError(f"{task.name} shows pictures, and the model is shown none", "load a model that sees, here")
    longest = _max_reply_tokens(task, how)
    if task.kind == "generate" and asked.max_len <= longest:
        raise DataError(
            f"{task.name}: a reply of {longest} tokens leaves no room for a question, the context has {asked.max_len}",
            "ask for shorter replies with --max-new-tokens",
        )


def _max_reply_tokens(task: EvalTask, how: EvalOptions) -> int:
    return how.max_new_tokens or task.max_new_tokens or DEFAULT_REPLY_TOKENS


def run_task(prepared: PreparedTask, asked: EvaluatedModel, how: EvalOptions, store: AnswerCache) -> TaskResult:
    """Ask a task, which `require_runnable` has passed, and return what came of it.

    Raises:
        DataError: a question cannot be put into tokens.
        Failure: the model is broken.
    """
    task, asked_items, shots = prepared
    started = time.monotonic()
    way = {"generate": _grade_replies, "perplexity": _score_whole_texts}.get(task.kind, _score_pairs)
    made = way(task, asked_items, asked, how, store)
    if made.num_truncated:
        log.warn(
            f"{task.name}: {made.num_truncated:,} of {len(asked_items):,} items are longer than the context: cut on "
            f"the left"
        )
    if num_unjudged := len(made.records) - len(item_records.list_judged(made.records)):
        log.warn(f"{task.name}: {num_unjudged:,} of {len(asked_items):,} replies cannot be judged, and are left out")
    return TaskResult(
        task,
        made.records,
        item_records.compute_estimates(task, made.records, how.seed),
        item_records.compute_chance(task, asked_items),
        shots,
        made.num_truncated,
        made.num_empty,
        made.num_cached,
        time.monotonic() - started,
        item_records.average_by_group(task, made.records),
    )


@dataclass
class _TaskAnswers:
    records: list[ItemRecord]
    num_truncated: int
    num_cached: int
    num_empty: int = 0


def _score_pairs(
    task: EvalTask, asked_items: list[EvalItem], asked: EvaluatedModel, how: EvalOptions, store: AnswerCache
) -> _TaskAnswers:
    encoded = encode_items(asked.tokenizer, asked_items, asked.max_len, core=task.shots_draw == "core")
    found, known = _score_uncached(task, encoded.texts, asked, store)
    ends = list(itertools.accumulate(len(item.pairs) for item in asked_items))
    made = [
        item_records.make_scored_record(task, item, found[end - len(item.pairs) : end])
        for item, end in zip(asked_items, ends, strict=True)
    ]
    return _TaskAnswers(_mark_truncated(made, encoded.truncated_items), len(encoded.truncated_items), known)


def _mark_truncated(made: list[ItemRecord], cut: Iterable[int]) -> list[ItemRecord]:
    """Tell in the record of an item that it was not asked as a whole."""
    for at in cut:
        made[at]["cut"] = True
    return made


def _score_whole_texts(
    task: EvalTask, asked_items: list[EvalItem], asked: EvaluatedModel, how: EvalOptions, store: AnswerCache
) -> _TaskAnswers:
    """Every token counts, once. A text longer than the context is read in pieces: each begins with the last token of
    the one before, the last piece with as many as there is room for (lm-evaluation-harness, lm_eval/utils.py,
    get_rolling_token_windows)."""
    first = find_prefix_token(asked.tokenizer)
    texts, pieces = [], []
    for item in asked_items:
        text = str(item.pairs[0].context)
        ids = encode_beginnings(asked.tokenizer, [text])[text]
        if not text or not ids:
            raise DataError(f"{item.source_location}: the text is empty", "leave the row out with `keep`")
        whole = [first, *ids]
        for at in (starts := range(0, len(ids), asked.max_len)):
            end = min(at + asked.max_len, len(ids))
            texts.append(ScoredText(whole[max(0, end - asked.max_len) : end + 1], end - at))
        pieces.append(len(starts))
    found, known = _score_uncached(task, texts, asked, store)
    made, at = [], 0
    for item, count in zip(asked_items, pieces, strict=True):
        made.append(item_records.make_scored_record(task, item, found[at : at + count]))
        at += count
    return _TaskAnswers(made, 0, known)


def _score_uncached(
    task: EvalTask, texts: list[ScoredText], asked: EvaluatedModel, store: AnswerCache
) -> tuple[list[Likelihood], int]:
    """Score texts that are not known yet; return all, in order, and how many were known."""
    names = [make_text_key(text) for text in texts]
    fresh = list(
        {name: text for name, text in zip(names, texts, strict=True) if store.get_answer(name) is None}.items()
    )
    known = sum(store.get_answer(name) is not None for name in names)
    _store_answers(store, fresh, asked.score_texts([text for _, text in fresh], f"scoring {task.name}"), list)
    return [Likelihood(*store.get_answer(name)) for name in names], known


def _store_answers(
    store: AnswerCache, asked_for: list[tuple[str, Any]], found: Iterable[dict[int, Any]], form: Callable[[Any], Any]
) -> None:
    for part in found if asked_for else ():
        store.add_answers({asked_for[number][0]: form(one) for number, one in part.items()})


def _grade_replies(
    task: EvalTask, asked_items: list[EvalItem], asked: EvaluatedModel, how: EvalOptions, store: AnswerCache
) -> _TaskAnswers:
    longest = _max_reply_tokens(task, how)
    sampling = Sampling(temperature=0.0, max_new_tokens=longest, stop=task.stop)
    prompts: list[EvalPrompt] = []
    cut: list[int] = []
    room = asked.max_len - longest
    for at, item in enumerate(asked_items):
        prompt = _encode_prompt(asked, item)
        cut += [at] * (len(prompt.ids) > room)
        if cut[-1:] == [at] and prompt.pictures:
            what = f"{item.source_location}: the question has {len(prompt.ids)} tokens, and {room} fit"
            raise DataError(what, "lower --max-new-tokens, or use smaller pictures")
        prompts.append(EvalPrompt(prompt.ids[-room:], prompt.pictures))
    names = [make_reply_key(prompt, sampling) for prompt in prompts]
    fresh = list(
        {name: one for name, one in zip(names, prompts, strict=True) if store.get_answer(name) is None}.items()
    )
    known = sum(store.get_answer(name) is not None for name in names)
    _store_answers(
        store, fresh, asked.generate_replies([one for _, one in fresh], sampling, f"asking {task.name}"), str
    )
    replies = [store.get_answer(name) for name in names]
    made = grade_replies(task, asked_items, replies, how.sandbox)
    return _TaskAnswers(_mark_truncated(made, cut), len(cut), known, sum(not reply.strip() for reply in replies))


def _encode_prompt(asked: EvaluatedModel, item: EvalItem) -> EvalPrompt:
    context, tokenizer = item.pairs[0].context, asked.tokenizer
    if isinstance(context, str):
        return EvalPrompt(encode_beginnings(tokenizer, [context])[context] or [find_prefix_token(tokenizer)])
    if not item.pictures or asked.pictures is None:
        return EvalPrompt(encode_chat(tokenizer, context))
    return EvalPrompt(*asked.pictures.measure_row(context, item.pictures, item.source_location))
