"""`anabatic bench infer`: the engine of `infer`, `serve` and `chat`, with prompts and answers of one length."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

from anabatic.bench import benchmark_model as models
from anabatic.bench import environment_info, result_files
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.config.bench import BenchInferJob
from anabatic.core.errors import ConfigError
from anabatic.core.progress import ProgressBar
from anabatic.device.device import Device, select_device
from anabatic.infer.cache_sizing import make_engine
from anabatic.infer.engine import Engine
from anabatic.infer.sampling import GREEDY


def run(job: BenchInferJob) -> int:
    """Measure as the job says; return the exit code.

    Raises:
        ConfigError, DataError: the model or the sizes cannot be used.
        Failure: the figures cannot be written.
    """
    load = result_files.prepare_output(job)
    device = select_device(job.device)
    model, tokenizer, what = models.load_benchmark_model(
        job.model, job.depth, Path(job.out) / "tokenizer", device, job.quantize
    )
    longest = job.prompt_tokens + job.new_tokens
    limit = job.batching.max_len or longest
    if limit < longest:
        raise ConfigError(
            f"batching.max_len is {limit}, and a prompt with its answer has {longest} tokens",
            "raise it, or leave it out",
        )
    engine = make_engine(model, tokenizer, device, replace(job.batching, max_len=limit))
    figures = _measure_engine(job, engine, device, len(tokenizer))
    where = environment_info.collect_environment(load, device.name)
    sizes = f"{job.requests} prompts of {job.prompt_tokens} tokens, {job.new_tokens} new ones each"
    together = min(job.batching.batch, job.requests)
    result = BenchResult(
        "infer",
        f"{what}; {sizes}, {together} at once",
        figures,
        {**asdict(job), "model": what, "dtype": str(device.dtype).removeprefix("torch.")},
        where,
        notes=environment_info.caveat_notes(where),
    )
    result_files.write_results(job, result)
    return 0


def _measure_engine(job: BenchInferJob, engine: Engine, device: Device, vocabulary: int) -> list[BenchMetric]:
    reading, total_seconds = [], []
    with ProgressBar("repeats", job.warm_up + job.repeats) as bar:
        for number, prompts in enumerate(_random_prompts(job, vocabulary)):
            one = _time_generation(engine, device, prompts, 1)
            all_of_it = _time_generation(engine, device, prompts, job.new_tokens)
            if number >= job.warm_up:
                reading.append(one)
                total_seconds.append(all_of_it)
            bar.update(number + 1)
    read, new = job.requests * job.prompt_tokens, job.requests * (job.new_tokens - 1)
    pairs = list(zip(reading, total_seconds, strict=True))
    return [
        BenchMetric("reading prompts", "tokens/s", tuple(read / one for one in reading)),
        BenchMetric("writing answers", "tokens/s", tuple(new / max(both - one, 1e-9) for one, both in pairs)),
        BenchMetric("answers", "requests/s", tuple(job.requests / both for both in total_seconds)),
        BenchMetric("first tokens of all", "s", tuple(reading)),
        BenchMetric("all answers", "s", tuple(total_seconds)),
        BenchMetric("peak memory", "B", (device.get_peak_memory(),)),
    ]


def _random_prompts(job: BenchInferJob, vocabulary: int) -> Iterator[list[list[int]]]:
    """Yield other random prompts for every repeat."""
    draw = Random(0)
    for _ in range(job.warm_up + job.repeats):
        yield [[draw.randrange(vocabulary) for _ in range(job.prompt_tokens)] for _ in range(job.requests)]


def _time_generation(engine: Engine, device: Device, prompts: list[list[int]], new_tokens: int) -> float:
    """Answer the prompts; what an earlier answer has left in the cache is forgotten first."""
    engine.clear_prefix_cache()
    device.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, replace(GREEDY, max_new_tokens=new_tokens), stop_ids=())
    device.synchronize()
    return time.perf_counter() - start
