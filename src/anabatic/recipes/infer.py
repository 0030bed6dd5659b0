"""`anabatic infer`: rows in, answers out, in the same order; a stopped job goes on where it was."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabatic.config import load
from anabatic.config.infer import InferJob
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.heart import HEART
from anabatic.core.paths import output_file
from anabatic.core.text import count, duration, utf8
from anabatic.data import templates
from anabatic.data import tokenizer as tokenizers
from anabatic.data.asked import Asked, read
from anabatic.data.document import Problem
from anabatic.data.long_rows import LongRows
from anabatic.device.device import pick
from anabatic.evals.progress import Bar
from anabatic.infer.dialogue import continuation
from anabatic.infer.engine import Engine, PromptTooLong, Request
from anabatic.infer.plan import engine_of
from anabatic.models import classifier
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder
from anabatic.parallel import world
from anabatic.recipes.infer_files import Part, merge
from anabatic.recipes.saved_model import model_of

_AHEAD = 512
"""Answers that wait for an earlier one to be written."""


@dataclass
class Place:
    """A row that is being answered, or was passed over.

    Attributes:
        number: of the row among all rows, from 0.
        problem: why it was passed over.
    """

    number: int
    asked: Asked | None = None
    request: Request | None = None
    problem: str = ""

    @property
    def done(self) -> bool:
        """True when its line can be written."""
        return self.request is None or bool(self.request.finish_reason)


def run(job: InferJob) -> int:
    """Answer the rows as the job says; return the exit code.

    Raises:
        ConfigError: `out` is there already, or was begun by another job.
        DataError: the model or its tokenizer cannot be used; a file or a row cannot be read.
        Failure: `out` cannot be written.
    """
    rank, ranks = log.rank(), world.size()
    out = output_file(job.out, "answers.jsonl")
    part = Part(out, _identity(job), rank, ranks, job.resume)
    if not part.finished:
        began, totals = time.perf_counter(), [0, 0, 0]
        try:
            rows = _rows(job)
            engine = _engine(job, ranks)
            with Bar("rows", rows // ranks) as bar:
                for place in _answers(job, engine, _places(job, engine, part.lines, rank, ranks, rows)):
                    part.write(_line(job, engine, place, totals))
                    bar.to(part.lines)
            part.finish()
        finally:
            part.close()
        _say(totals, time.perf_counter() - began, engine)
    if rank == 0:
        written, skipped = merge(out, ranks, HEART.beat)
        log.info(f"wrote {written:,} answers to {out}")
        if skipped:
            log.warn(f"{len(skipped):,} rows were passed over; first: {skipped[0]}")
    return 0


def _identity(job: InferJob) -> dict[str, Any]:
    """What makes an answer what it is: a begun job goes on with the same of it alone."""
    kept = ("model", "ckpt_dir", "adapter", "inputs", "system", "raw", "quantize", "columns", "sampling", "on_bad_row")
    tree = load.tree_of(job)
    more = {} if job.chat_template is None else {"chat_template": templates.read(job.chat_template)}
    return {key: tree.get(key) for key in kept} | more


def _engine(job: InferJob, ranks: int) -> Engine:
    device = pick(job.device)
    if job.ckpt_dir:
        model, tokens = model_of(Path(job.ckpt_dir).expanduser(), device, job.adapter, job.quantize)
        tokens = templates.folder_with(tokens, job.chat_template)
        folder = Path(job.ckpt_dir)
    else:
        folder = resolve(job.model)
        classifier.require_writer(folder)
        shares = below(job.adapter, folder)
        tokens = templates.folder_with(tokenizer_folder(folder, shares), job.chat_template)
        require_fit(load_config(folder), tokenizers.load(tokens), folder)
        model = load_model(folder, device.torch, device.dtype, shares, job.quantize)
    tokenizer = tokenizers.load(tokens)
    log.info(f"{folder} on {device.name} ({device.reasons['device']})")
    return engine_of(model, tokenizer, device, job.batching, ranks)


def _rows(job: InferJob) -> int:
    """Count the rows before the model is asked: what is wrong with them is told early."""
    total = 0
    for row in read(job.inputs, job.columns):
        if isinstance(row, Problem) and job.on_bad_row == "fail":
            row.fail()
        total += 1
    if not total:
        raise DataError(f"{', '.join(job.inputs)}: there is no row", "give files with rows")
    return total


def _places(job: InferJob, engine: Engine, done: int, rank: int, ranks: int, rows: int) -> Iterator[Place]:
    """The rows of this process, of `rows` in all, that are not answered yet, each with its request.

    Raises:
        DataError: a row cannot be used; too many leave no room for an answer.
    """
    long = LongRows(f"{', '.join(job.inputs)}: prompts", engine.max_len - 1, job.long_share, "--long-share")
    own = len(range(rank, rows, ranks))
    for number, row in enumerate(read(job.inputs, job.columns)):
        if number % ranks != rank or number // ranks < done:
            continue
        if isinstance(row, Problem):
            yield Place(number, problem=row.message)
            continue
        try:
            seed = job.sampling.seed
            sampling = job.sampling if seed is None else replace(job.sampling, seed=(seed + number) % 2**63)
            prompt = _prompt(job, engine.tokenizer, row)
            yield Place(number, row, engine.request(prompt, sampling, name=row.place))
        except PromptTooLong as error:
            long.add(len(prompt), row.place)
            if long.too_many(own):
                long.require(own)
            yield Place(number, problem=_at(row, error))
        except DataError as error:
            if job.on_bad_row == "fail":
                raise DataError(_at(row, error), error.hint) from error
            yield Place(number, problem=_at(row, error))


def _at(row: Asked, error: DataError) -> str:
    return str(error) if str(error).startswith(row.place) else f"{row.place}: {error}"


def _prompt(job: InferJob, tokenizer: Any, row: Asked) -> list[int]:
    """The tokens of a row: its turns through the chat template, or its text as a document begins."""
    if row.messages is None or job.raw or not tokenizer.chat_template:
        if row.messages is not None and len(row.messages) > 1:
            what = "raw is on" if job.raw else f"{tokenizer.name_or_path} has no chat template"
            raise DataError(
                f"{row.place}: {len(row.messages)} turns, and {what}", "give a prompt, or a model that chats"
            )
        return continuation(tokenizer, row.messages[0]["content"] if row.messages else row.text)
    system = job.system is not None and row.messages[0]["role"] not in ("system", "developer")
    begins = [{"role": "system", "content": utf8(job.system or "")}] if system else []
    return tokenizers.chat_prompt(tokenizer, [*begins, *row.messages], row.tools)


def _answers(job: InferJob, engine: Engine, places: Iterator[Place]) -> Iterator[Place]:
    """Yield the rows in their order as they are answered; others are answered meanwhile."""
    window: deque[Place] = deque()
    more = True
    while more or window:
        while more and len(window) < _AHEAD and engine.load().waiting < job.batching.batch:
            place = next(places, None)
            more = place is not None
            if place is not None:
                window.append(place)
                engine.submit([place.request] if place.request else [])
        if engine.busy:
            engine.step()
            HEART.beat()
        while window and window[0].done:
            yield window.popleft()


def _line(job: InferJob, engine: Engine, place: Place, totals: list[int]) -> dict[str, Any]:
    """Return the line of a row, and count its tokens."""
    if place.request is None or place.asked is None:
        return {"row": place.number, "skipped": place.problem}
    asked, request = place.asked, place.request
    answer = engine.completion(request)
    for at, number in enumerate((1, len(request.prompt), len(answer.ids))):
        totals[at] += number
    line: dict[str, Any] = {"row": place.number, "id": asked.id}
    line |= {"text": asked.text} if asked.messages is None else {"messages": asked.messages}
    line |= {"response": answer.text, "finish_reason": answer.finish_reason}
    line |= {} if asked.label is None else {"label": asked.label}
    line |= {"prompt_tokens": len(request.prompt), "response_tokens": len(answer.ids)}
    if job.sampling.top_logprobs:
        line |= {"logprobs": answer.logprobs, "top_logprobs": answer.top_logprobs}
    return line


def _say(totals: list[int], seconds: float, engine: Engine) -> None:
    rows, read_in, written = totals
    shared = engine.load().shared_tokens
    log.info(
        f"{rows:,} rows in {duration(seconds)}: {count(read_in)} tokens in ({count(shared)} shared), {count(written)}"
        f" out, {written / max(seconds, 1e-9):,.1f} tokens/s"
    )
