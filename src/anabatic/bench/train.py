"""`anabatic bench train`: steps of the very training that a command runs, beside what the plan says of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from anabatic.bench import machine, synthetic, windows, written
from anabatic.bench.figures import Figure, Result
from anabatic.bench.windows import Trained
from anabatic.config.bench import BenchTrain
from anabatic.core import log
from anabatic.core.errors import AnabaticError, ConfigError
from anabatic.device import table
from anabatic.plan import show
from anabatic.recipes import plan as on_paper

DEFAULT = (
    "pretrain", "--model.depth", "4", "--batch.seq-len", "256", "--batch.global-batch-tokens", "1024",
    "--tokenizer", synthetic.NAME,
)  # fmt: skip
"""What is measured where no command is named: a minute or two on two cores."""
LENGTH = 256
"""Tokens of its rows."""
_TOKENS = 200_000
"""Synthetic tokens in all; they are read again and again."""
_PLANNED = ("pretrain", "sft", "dpo")
"""Commands whose sizes are those of `batch`, tokens."""
_SIZES = ("global_batch_tokens", "micro_batch_tokens")


def run(asked: BenchTrain, name: str, job: Any, words: Sequence[str]) -> int:
    """Measure the training of a resolved job.

    Args:
        name: of its command; words: as typed.

    Raises:
        ConfigError, DataError, Failure: the training's own, and those of writing.
    """
    load = written.begin(asked)
    folder = Path(asked.out).expanduser()
    job = prepared(asked, name, job, folder)
    log.info(f"training {asked.repeats + asked.warm_up} x {asked.steps} steps: {shlex.join(words)}")
    found = windows.train(name, job, folder, asked.steps, asked.repeats + asked.warm_up)
    where = machine.facts(load, found.device.get("name", ""), found.device.get("world_size", 1))
    paper, told = planned(name, job, found)
    told += _beyond(found, asked.warm_up)
    result = Result(
        "train", f"{shlex.join(words)}; {asked.repeats} x {asked.steps} steps", figures(found, asked.warm_up, paper),
        {"command": shlex.join(words), **asdict(asked), "sizes": dict(found.plan)}, where,
        notes=[*machine.notes(where), *told],
    )  # fmt: skip
    written.finish(asked, result)
    return 0


def _beyond(found: Trained, warm_up: int) -> list[str]:
    """Say what a share of the peak above all of it means."""
    shares = [one.row["mfu"] for one in found.windows[warm_up:] if one.row.get("mfu")]
    told = "MFU above 100 %: the processor's peak is measured at the start, and the machine was busier then"
    return [told] if shares and max(shares) > 1 else []


def prepared(asked: BenchTrain, name: str, job: Any, folder: Path) -> Any:
    """Return the job with a synthetic tokenizer and synthetic rows where they are asked for."""
    if getattr(job, "tokenizer", None) == synthetic.NAME:
        if name != "pretrain":
            raise ConfigError(f"{name} with a tokenizer that is made up", f"{synthetic.NAME} is for pretrain alone")
        job = replace(job, tokenizer=str(synthetic.tokenizer(folder / "tokenizer")))
    if asked.length is None:
        return job
    if not hasattr(job, "batch"):
        raise ConfigError(f"{name} has no rows of tokens", "leave --length out")
    if name != "pretrain" and asked.length > job.batch.length:
        raise ConfigError(
            f"length is {asked.length}, and batch.seq_len {job.batch.length}", "raise --batch.seq-len of the command"
        )
    rows = folder / "rows.jsonl"
    synthetic.rows(rows, name, _tokenizer(name, job), asked.length, _TOKENS)
    return replace(job, data=replace(job.data, train=[str(rows)], columns={}, text_column="text"))


def _tokenizer(name: str, job: Any) -> str:
    if job.tokenizer:
        return str(job.tokenizer)
    from anabatic.models import hf
    from anabatic.models.stack import Share

    named = hf.resolve(job.model.path if name == "pretrain" else job.model)
    none: list[Share] = []
    return str(hf.tokenizer_folder(named, none))


def planned(name: str, job: Any, found: Trained) -> tuple[show.Plan | None, list[str]]:
    """Return the same job on paper, with the sizes that the training settled on; None, and why, where there is none."""
    chip = table.find_chip(found.device.get("name", ""))
    if name not in _PLANNED or chip is None:
        return None, []
    sizes = {size: int(found.plan[size]) for size in _SIZES if size in found.plan}
    try:
        paper = on_paper.on_paper(
            replace(job, batch=replace(job.batch, **sizes)), on_paper.Place(chip, found.device["world_size"])
        )
    except AnabaticError as error:
        return None, [f"no plan: {error}"]
    return paper, []


def figures(found: Trained, warm_up: int, paper: show.Plan | None) -> list[Figure]:
    """Return what the windows behind the warm-up say."""
    rows = found.windows[warm_up:]
    choice = paper.choice if paper else None
    made = [
        Figure("trained", "tokens/s", tuple(one.tokens / one.seconds for one in rows),
               choice.tokens_per_s if choice else None),
        Figure("step", "s", tuple(one.seconds for one in rows), choice.clock.step if choice else None),
    ]  # fmt: skip
    planned_share = {"mfu": choice.mfu(paper.chip)} if choice and paper else {}
    for key, title in (("mfu", "MFU"), ("data_wait", "waiting for data")):
        values = tuple(one.row[key] for one in rows if one.row.get(key) is not None)
        if values:
            made.append(Figure(title, "share", values, planned_share.get(key)))
    peak = (max(one.row["memory_bytes"] for one in rows),)
    made.append(Figure("peak memory of a process", "B", peak, choice.memory.total if choice else None))
    made.append(Figure("start to first step", "s", (found.start_up,)))
    return made
