"""`anabatic eval`: bits per byte beside gzip, tasks beside chance."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.evaluate import EvalJob
from anabatic.config.shared import require
from anabatic.core import log
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.core.text import count, size
from anabatic.data import shards, sources, tasks
from anabatic.data import tokenizer as tokenizers
from anabatic.data.loader import ValidPass, valid_batches
from anabatic.device.device import Device, pick
from anabatic.evals import generative
from anabatic.evals.generative import TaskScore
from anabatic.evals.loss import BitsPerByte, bits_per_byte
from anabatic.models.hf import below, load_config, load_model, require_fit, resolve, tokenizer_folder

LONGEST_SEGMENT = 2048
"""Segment length of the loss when neither the job nor the model asks for less."""


def run(job: EvalJob) -> None:
    """Measure, print the table to stdout, and write eval.json into the run folder.

    Raises:
        ConfigError: several processes, or a task that does not exist.
        DataError: the model, its tokenizer or the text cannot be used.
        Failure: eval.json cannot be written.
    """
    require(job.device.nproc == 1, f"device.nproc is {job.device.nproc}", "eval runs in one process: leave it out")
    wanted = wanted_tasks(job.tasks)
    device = pick(job.device)
    folder = resolve(job.model)
    out = _out(job, folder)
    if out is not None:
        RunFolder(out).create()
    shares = below(job.adapter, folder)
    tokens = tokenizer_folder(folder, shares)
    tokenizer = tokenizers.load(tokens)
    require_fit(load_config(folder), tokenizer, folder)
    model = load_model(folder, device.torch, device.dtype, shares)
    log.info(f"{folder} on {device.name} ({device.reasons['device']})")
    result: dict[str, Any] = {"model": str(folder)}
    if shares:
        result["adapters"] = [str(share) for share in shares]
    if job.data.valid or job.data.train:
        bits = _bits(job, model, tokenizer, tokens, device)
        result["bits_per_byte"] = bits.as_json()
        sys.stdout.write(f"{_bits_line(bits)}\n")
    if wanted:
        scores = generative.evaluate(
            model,
            tokenizer,
            wanted,
            max_new_tokens=job.max_new_tokens,
            batch_size=job.batch_size,
            show=job.show,
        )
        result["tasks"] = {name: score.as_json() for name, score in scores.items()}
        sys.stdout.write(table(scores))
    _write(result, out)


def wanted_tasks(specs: list[str]) -> dict[str, int]:
    """Return task -> questions from sources such as `task:spelling#200`; `task:all#200` asks 200 of each.

    Raises:
        ConfigError: a source is no task, or there is no such task.
    """
    wanted: dict[str, int] = {}
    for spec in specs:
        source = sources.parse(spec)
        scheme, _, name = source.path.partition(":")
        require(scheme == "task", f'tasks: "{spec}" is not a task', "write task:NAME#ROWS, such as task:all#200")
        for task in tasks.find(name):
            wanted[task.name] = source.rows or generative.DEFAULT_ROWS
    return wanted


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


def table(scores: dict[str, TaskScore]) -> str:
    """Return the scores and the examples as printed."""
    width = max(len(name) for name in scores)
    lines = [f"{'task':{width}}  accuracy  chance  questions"]
    for name, score in scores.items():
        lines.append(f"{name:{width}}  {score.accuracy:8.1%}  {score.chance:6.1%}  {score.n:9,}")
    for name, score in scores.items():
        for example in score.examples:
            mark = "right" if example.correct else f"wrong, the answer is {example.answer}"
            reply = " ".join(example.reply.split())
            lines.append(f"{name}: {example.prompt} -> {reply} ({mark})")
    return "\n".join(lines) + "\n"


def _out(job: EvalJob, folder: Path) -> Path | None:
    """Return the folder for eval.json: the one given, else the run folder that the model lies in, unless adapters of
    other runs make another model of it."""
    if job.out or job.adapter:
        return Path(job.out) if job.out else None
    for run in (RunFolder(job.model), RunFolder(folder.parent)):
        if run.config.is_file() or run.metrics.is_file():
            return run.root
    return None


def _write(result: dict[str, Any], out: Path | None) -> None:
    if out is None:
        log.info("eval.json is not written: this model lies in no run folder (give one with --out DIR)")
        return
    path = out / "eval.json"
    write_atomic(path, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {path}")
