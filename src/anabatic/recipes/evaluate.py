"""`anabatic eval`: bits per byte beside gzip, tasks beside chance."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.evaluate import EvalJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.paths import RunFolder, cache_root, write_atomic
from anabatic.core.text import count, size
from anabatic.data import shards
from anabatic.data import tokenizer as tokenizers
from anabatic.data.loader import ValidPass, valid_batches
from anabatic.device.device import Device, pick
from anabatic.evals import known, results
from anabatic.evals.ask import Asked, How, Prepared, Result, ask, prepare, require_askable
from anabatic.evals.endpoint import Endpoint
from anabatic.evals.known import Plan
from anabatic.evals.local import Local
from anabatic.evals.loss import BitsPerByte, bits_per_byte
from anabatic.evals.store import Store, fingerprint
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder
from anabatic.models.stack import Share

LONGEST_SEGMENT = 2048
"""Segment length of the loss when neither the job nor the model asks for less."""


def run(job: EvalJob) -> None:
    """Measure, print the table to stdout, and write eval.json, eval.md and samples.jsonl into the run folder.

    Raises:
        ConfigError: several processes, or a task that does not exist.
        DataError: the model, its tokenizer, the text or the rows of a task cannot be used.
        Failure: a file cannot be written, or the model is broken.
    """
    require(job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "eval runs in one process: leave it out")
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
    """Load the model and measure it."""
    device = pick(job.device)
    shares = below(job.adapter, folder)
    tokens = tokenizer_folder(folder, shares)
    tokenizer = tokenizers.load(tokens)
    require_fit(load_config(folder), tokenizer, folder)
    model = load_model(folder, device.torch, device.dtype, shares)
    log.info(f"{folder} on {device.name} ({device.reasons['device']})")
    if shares:
        result["adapters"] = [str(share) for share in shares]
    if job.data.valid or job.data.train:
        bits = _bits(job, model, tokenizer, tokens, device)
        result["bits_per_byte"] = bits.as_json()
        sys.stdout.write(f"{_bits_line(bits)}\n")
    if not prepared:
        return []
    local = Local(model, tokenizer, device, job.batch_tokens, job.batch_size)
    return _ask_all(prepared, local, how, _store(job, folder, shares, device))


def _served(job: EvalJob, prepared: list[Prepared], folder: Path, how: How, result: dict[str, Any]) -> list[Result]:
    """Ask a served model; nothing is kept, for it may change behind its address."""
    tokenizer = tokenizers.load(folder)
    asked = Endpoint(str(job.endpoint), tokenizer, load_config(folder).max_position_embeddings, job.batch_size)
    result |= {"endpoint": job.endpoint, "served": asked.name}
    return _ask_all(prepared, asked, how, Store(None))


def _store(job: EvalJob, folder: Path, shares: Sequence[Share], device: Device) -> Store:
    """The answers of this very model: its files as they are, its adapters, its kind of device and numbers."""
    more = [device.type, str(device.dtype), *map(str, shares)]
    name = fingerprint([folder, *(share.folder for share in shares)], more)
    return Store(cache_root() / "evals" / f"{name}.jsonl", read=job.resume == "auto")


def _data_sets(job: EvalJob) -> Path | None:
    if job.tasks_from is None:
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


def _bits(job: EvalJob, model: PreTrainedModel, tokenizer: Any, folder: Path, device: Device) -> BitsPerByte:
    seq_len = job.seq_len or min(model.config.max_position_embeddings, LONGEST_SEGMENT)
    batches = held_out(job, folder, seq_len)
    log.info(f"measuring {count(batches.num_tokens)} tokens, {size(batches.num_bytes)} of held-out text")
    return bits_per_byte(model, tokenizer, batches, device)


def held_out(job: EvalJob, folder: Path, seq_len: int) -> ValidPass:
    """Tokenise the held-out text, or take it from the cache, and return one pass over it."""
    named = job.data.valid or job.data.train
    built = [part for part, _ in shards.build_all(named, folder, job.data, "valid", seq_len=seq_len)]
    limit = job.tokens or sum(part.num_tokens for part in built)
    return valid_batches(built, seq_len, max(job.batch_tokens, seq_len), limit)


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
