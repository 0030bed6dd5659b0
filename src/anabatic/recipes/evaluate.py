"""`anabatic eval`: bits per byte beside gzip, tasks beside chance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anabatic.config.evaluate import EvalJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.paths import RunFolder, cache_root, write_atomic
from anabatic.core.text import count, size
from anabatic.data import shards, templates
from anabatic.data import tokenizer as tokenizers
from anabatic.data.loader import ValidPass, valid_batches
from anabatic.device.device import pick
from anabatic.evals import known, results
from anabatic.evals.ask import Asked, How, Prepared, Result, ask, prepare, require_askable
from anabatic.evals.dealt import Dealt
from anabatic.evals.endpoint import Endpoint
from anabatic.evals.known import Plan
from anabatic.evals.local import Local
from anabatic.evals.loss import BitsPerByte, bits_per_byte
from anabatic.evals.store import Store, fingerprint
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder
from anabatic.parallel import world as parallel
from anabatic.parallel.world import World

HUB = "hub"
"""`tasks_from` that says in a word: fetch them."""
LONGEST_SEGMENT = 2048
"""Segment length of the loss when neither the job nor the model asks for less."""


def run(job: EvalJob) -> None:
    """Measure, print the table to stdout, and write eval.json, eval.md and samples.jsonl into the run folder.

    Raises:
        ConfigError: a task does not exist, or an endpoint is to be asked by several processes.
        DataError: the model, its tokenizer, the text or the rows of a task cannot be used.
        Failure: a file cannot be written, or the model is broken.
    """
    several = parallel.size()
    require(not (job.endpoint and several > 1), f"endpoint is given, and {several} processes", "one process asks it")
    if log.rank():
        _beside(job)
        return
    if Path(job.model).expanduser().exists():
        resolve(job.model)  # what is no model is said before rows are fetched; a hub's model comes after them
    data_sets = _data_sets(job)
    plan = known.plan(job.tasks, data_sets)
    require(bool(plan.tasks or not job.tasks), "tasks names none", "give --tasks arc_easy, or leave it out")
    how = How(data_sets, job.shots, job.limit, job.seed, job.max_new_tokens, job.sandbox)
    prepared = [prepare(planned, how) for planned in plan.tasks]  # what is wrong with rows is said before a model loads
    folder = resolve(job.model)
    out = _out(job, folder)
    if out is not None:
        RunFolder(out).create()
    result: dict[str, Any] = {"model": str(folder)}
    way = _served if job.endpoint else _loaded
    asked = way(job, prepared, folder, how, result)
    _finish(job, plan, asked, result, out)


def _loaded(job: EvalJob, prepared: list[Prepared], folder: Path, how: How, result: dict[str, Any]) -> list[Result]:
    """Load the model and measure it, with the help of the other processes."""
    model = _Model(job, folder)
    log.info(f"{folder} on {model.device.name} ({model.device.reasons['device']})")
    if model.shares:
        result["adapters"] = [str(share) for share in model.shares]
    if job.data.valid or job.data.train:
        bits = model.bits()
        result["bits_per_byte"] = bits.as_json()
        sys.stdout.write(f"{_bits_line(bits)}\n")
    found = []
    if prepared:
        found = _ask_all(prepared, model.asked, how, Store(model.store, read=job.resume == "auto"))
        model.asked.close()
    parallel.stop(model.world)
    return found


def _beside(job: EvalJob) -> None:
    """What every process but the first does: its share of all that is measured."""
    model = _Model(job, resolve(job.model))
    if job.data.valid or job.data.train:
        model.bits()
    if job.tasks:
        model.asked.serve(model.store)
    parallel.stop(model.world)


class _Model:
    """The model, loaded in this process, which has joined the others.

    Attributes:
        store: of the answers of this very model: its files as they are, its adapters, its device and numbers.
    """

    def __init__(self, job: EvalJob, folder: Path) -> None:
        self.job, self.device = job, pick(job.device)
        self.shares = below(job.adapter, folder)
        self.tokens = templates.folder_with(tokenizer_folder(folder, self.shares), job.chat_template)
        self.tokenizer = tokenizers.load(self.tokens)
        require_fit(load_config(folder), self.tokenizer, folder)
        self.world = parallel.start(self.device)
        self.model = load_model(folder, self.device.torch, self.device.dtype, self.shares)
        local = Local(self.model, self.tokenizer, self.device, job.batch_tokens, job.batch_size, self.world)
        self.asked = Dealt(local, self.world)
        more = [self.device.type, str(self.device.dtype), *map(str, self.shares)]
        more += [str(self.tokens)] if job.chat_template else []
        name = fingerprint([folder, *(share.folder for share in self.shares)], more)
        self.store = cache_root() / "evals" / f"{name}.jsonl"

    def bits(self) -> BitsPerByte:
        """Measure the held-out text; every process reads its share of it."""
        seq_len = self.job.seq_len or min(self.model.config.max_position_embeddings, LONGEST_SEGMENT)
        batches = held_out(self.job, self.tokens, seq_len, self.world)
        log.info(f"measuring {count(batches.num_tokens)} tokens, {size(batches.num_bytes)} of held-out text")
        return bits_per_byte(self.model, self.tokenizer, batches, self.device, self.world)


def _served(job: EvalJob, prepared: list[Prepared], folder: Path, how: How, result: dict[str, Any]) -> list[Result]:
    """Ask a served model; nothing is kept, for it may change behind its address."""
    tokenizer = tokenizers.load(templates.folder_with(folder, job.chat_template))
    asked = Endpoint(str(job.endpoint), tokenizer, load_config(folder).max_position_embeddings, job.batch_size)
    result |= {"endpoint": job.endpoint, "served": asked.name}
    return _ask_all(prepared, asked, how, Store(None))


def _data_sets(job: EvalJob) -> Path | None:
    if job.tasks_from in (None, HUB):
        return None
    folder = Path(job.tasks_from).expanduser()
    require(folder.is_dir(), f"tasks_from is {folder}, which is no folder", "name the folder of the data sets")
    return folder


def _ask_all(prepared: list[Prepared], asked: Asked, how: How, store: Store) -> list[Result]:
    found = []
    try:
        for each in prepared:
            require_askable(each.task, asked, how)
        for each in prepared:
            one = ask(each, asked, how, store)
            again = f", {one.known:,} answers known from before" if one.known else ""
            log.info(f"{one.task.name}: {len(one.records):,} items in {one.seconds:.1f} s{again}")
            found.append(one)
    finally:
        store.close()
    return found


def _finish(job: EvalJob, plan: Plan, asked: list[Result], result: dict[str, Any], out: Path | None) -> None:
    """Print the table, and write the files."""
    sums = results.totals(plan.groups, asked)
    if asked:
        result |= results.as_json(asked, sums, job.show)
        result["settings"] = {"seed": job.seed, "shots": job.shots, "limit": job.limit}
        sys.stdout.write(results.table(asked, sums, job.show))
    if out is None:
        log.info("eval.json is not written: this model lies in no run folder (give one with --out DIR)")
        return
    if asked:
        rows = [{"task": one.task.name, **record} for one in asked for record in one.records]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(out / "samples.jsonl", lines.encode("utf-8", "backslashreplace"))
        about = [f"Model: `{result['model']}`. Seed {job.seed}."]
        write_atomic(out / "eval.md", results.markdown("Evaluation", about, asked, sums))
    write_atomic(out / "eval.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {out / 'eval.json'}" + (", eval.md and samples.jsonl" if asked else ""))


def held_out(job: EvalJob, folder: Path, seq_len: int, world: World) -> ValidPass:
    """Tokenise the held-out text, or take it from the cache, and return this process's share of one pass over it."""
    named = job.data.valid or job.data.train
    if not world.first:
        parallel.barrier(world)
    built = [part for part, _ in shards.build_all(named, folder, job.data, "valid", seq_len=seq_len)]
    if world.first:
        parallel.barrier(world)
    limit = job.tokens or sum(part.num_tokens for part in built)
    return valid_batches(built, seq_len, max(job.batch_tokens, seq_len), limit, world.rank, world.size)


def _bits_line(bits: BitsPerByte) -> str:
    return (
        f"bits per byte  {bits.model:.4f}   gzip -9  {bits.gzip9:.4f}   "
        f"({bits.num_bytes:,} bytes, {bits.num_tokens:,} tokens)"
    )


def _out(job: EvalJob, folder: Path) -> Path | None:
    """Return the folder for eval.json: the one given, else the run folder that the model lies in, unless adapters of
    other runs make another model of it."""
    if job.out or job.adapter:
        return Path(job.out) if job.out else None
    for run in (RunFolder(job.model), RunFolder(folder.parent)):
        if run.config.is_file() or run.metrics.is_file():
            return run.root
    return None
