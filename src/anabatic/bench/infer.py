"""`anabatic bench infer`: the engine of `infer`, `serve` and `chat`, with prompts and answers of one length."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from anabatic.bench import machine, written
from anabatic.bench import model as models
from anabatic.bench.figures import Figure, Result
from anabatic.config.bench import BenchInferJob
from anabatic.core.errors import ConfigError
from anabatic.device.device import Device, pick
from anabatic.evals.progress import Bar
from anabatic.infer.engine import Engine
from anabatic.infer.plan import engine_of
from anabatic.infer.sampling import GREEDY


def run(job: BenchInferJob) -> int:
    """Measure as the job says; return the exit code.

    Raises:
        ConfigError, DataError: the model or the sizes cannot be used.
        Failure: the figures cannot be written.
    """
    load = written.begin(job)
    device = pick(job.device)
    model, tokenizer, what = models.loaded(job.model, job.depth, Path(job.out) / "tokenizer", device, job.quantize)
    longest = job.prompt_tokens + job.new_tokens
    limit = job.batching.max_len or longest
    if limit < longest:
        raise ConfigError(
            f"batching.max_len is {limit}, and a prompt with its answer has {longest} tokens",
            "raise it, or leave it out",
        )
    engine = engine_of(model, tokenizer, device, replace(job.batching, max_len=limit))
    figures = _measured(job, engine, device, len(tokenizer))
    where = machine.facts(load, device.name)
    sizes = f"{job.requests} prompts of {job.prompt_tokens} tokens, {job.new_tokens} new ones each"
    together = min(job.batching.batch, job.requests)
    result = Result(
        "infer", f"{what}; {sizes}, {together} at once", figures,
        {**asdict(job), "model": what, "dtype": str(device.dtype).removeprefix("torch.")}, where,
        notes=machine.notes(where),
    )  # fmt: skip
    written.finish(job, result)
    return 0


def _measured(job: BenchInferJob, engine: Engine, device: Device, vocabulary: int) -> list[Figure]:
    reading, whole = [], []
    with Bar("repeats", job.warm_up + job.repeats) as bar:
        for number, prompts in enumerate(_prompts(job, vocabulary)):
            one = _seconds(engine, device, prompts, 1)
            all_of_it = _seconds(engine, device, prompts, job.new_tokens)
            if number >= job.warm_up:
                reading.append(one)
                whole.append(all_of_it)
            bar.to(number + 1)
    read, new = job.requests * job.prompt_tokens, job.requests * (job.new_tokens - 1)
    pairs = list(zip(reading, whole, strict=True))
    return [
        Figure("reading prompts", "tokens/s", tuple(read / one for one in reading)),
        Figure("writing answers", "tokens/s", tuple(new / max(both - one, 1e-9) for one, both in pairs)),
        Figure("answers", "requests/s", tuple(job.requests / both for both in whole)),
        Figure("first tokens of all", "s", tuple(reading)),
        Figure("all answers", "s", tuple(whole)),
        Figure("peak memory", "B", (device.peak_memory(),)),
    ]


def _prompts(job: BenchInferJob, vocabulary: int) -> Iterator[list[list[int]]]:
    """Yield other random prompts for every repeat."""
    draw = Random(0)
    for _ in range(job.warm_up + job.repeats):
        yield [[draw.randrange(vocabulary) for _ in range(job.prompt_tokens)] for _ in range(job.requests)]


def _seconds(engine: Engine, device: Device, prompts: list[list[int]], new_tokens: int) -> float:
    """Answer the prompts; what an earlier answer has left in the cache is forgotten first."""
    engine.forget()
    device.synchronize()
    begun = time.perf_counter()
    engine.generate(prompts, replace(GREEDY, max_new_tokens=new_tokens), stop_ids=())
    device.synchronize()
    return time.perf_counter() - begun
