"""`anabatic bench train`: steps of the training that a command runs, compared with the plan."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from anabatic.bench import environment_info, result_files, synthetic_data, training_probe
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.bench.training_probe import TrainingMeasurement
from anabatic.config.bench import BenchTrain
from anabatic.core import log
from anabatic.core.errors import AnabaticError, ConfigError
from anabatic.device import table
from anabatic.plan import output
from anabatic.recipes import plan_command as on_paper
from anabatic.recipes.resolve import Machine

DEFAULT_COMMAND = (
    "pretrain", "--model.depth", "4", "--batch.seq-len", "256", "--batch.global-batch-tokens", "1024",
    "--tokenizer", synthetic_data.SYNTHETIC_TOKENIZER,
)  # fmt: skip
"""What is measured where no command is named: a minute or two on two cores."""
DEFAULT_ROW_TOKENS = 256
"""Tokens of its rows."""
_SYNTHETIC_TOKENS = 200_000
"""Synthetic tokens in all; they are read again and again."""
_PLANNED_COMMANDS = ("pretrain", "sft", "dpo")
"""Commands whose sizes are those of `batch`, tokens."""
_BATCH_SIZE_NAMES = ("global_batch_tokens", "micro_batch_tokens")


def run(settings: BenchTrain, name: str, job: Any, words: Sequence[str]) -> int:
    """Measure the training of a resolved job.

    Args:
        name: of its command; words: as typed.

    Raises:
        ConfigError, DataError, Failure: the training's own, and those of writing.
    """
    load = result_files.prepare_output(settings)
    folder = Path(settings.out).expanduser()
    job = prepare_job(settings, name, job, folder)
    log.info(f"training {settings.repeats + settings.warm_up} x {settings.steps} steps: {shlex.join(words)}")
    found = training_probe.measure_training(name, job, folder, settings.steps, settings.repeats + settings.warm_up)
    where = environment_info.collect_environment(
        load, found.device_event.get("name", ""), found.device_event.get("world_size", 1)
    )
    paper, notes = plan_measured_job(name, job, found)
    notes += _explain_mfu_above_peak(found, settings.warm_up)
    result = BenchResult(
        "train",
        f"{shlex.join(words)}; {settings.repeats} x {settings.steps} steps",
        build_training_metrics(found, settings.warm_up, paper),
        {"command": shlex.join(words), **asdict(settings), "sizes": dict(found.resolved_sizes)},
        where,
        notes=[*environment_info.caveat_notes(where), *notes],
    )
    result_files.write_results(settings, result)
    return 0


def _explain_mfu_above_peak(found: TrainingMeasurement, warm_up: int) -> list[str]:
    """Say what a share of the peak above all of it means."""
    utilizations = [one.logged_row["mfu"] for one in found.windows[warm_up:] if one.logged_row.get("mfu")]
    notes = "MFU above 100 %: the processor's peak is measured at the start, and the machine was busier then"
    return [notes] if utilizations and max(utilizations) > 1 else []


def prepare_job(settings: BenchTrain, name: str, job: Any, folder: Path) -> Any:
    """Return the job with a synthetic tokenizer and synthetic rows where they are asked for."""
    if getattr(job, "tokenizer", None) == synthetic_data.SYNTHETIC_TOKENIZER:
        if name != "pretrain":
            raise ConfigError(
                f"{name} with a tokenizer that is made up",
                f"{synthetic_data.SYNTHETIC_TOKENIZER} is for pretrain alone",
            )
        job = replace(job, tokenizer=str(synthetic_data.write_synthetic_tokenizer(folder / "tokenizer")))
    if settings.length is None:
        return job
    if not hasattr(job, "batch"):
        raise ConfigError(f"{name} has no rows of tokens", "leave --length out")
    if name != "pretrain" and settings.length > job.batch.resolved_seq_len:
        raise ConfigError(
            f"length is {settings.length}, and batch.seq_len {job.batch.resolved_seq_len}",
            "raise --batch.seq-len of the command",
        )
    rows = folder / "rows.jsonl"
    synthetic_data.write_synthetic_rows(rows, name, _resolve_tokenizer(name, job), settings.length, _SYNTHETIC_TOKENS)
    return replace(job, data=replace(job.data, train=[str(rows)], columns={}, text_column="text"))


def _resolve_tokenizer(name: str, job: Any) -> str:
    if job.tokenizer:
        return str(job.tokenizer)
    from anabatic.models import pretrained
    from anabatic.models.lora.merging import WeightedAdapter

    folder = pretrained.resolve_model_folder(job.model.path if name == "pretrain" else job.model)
    none: list[WeightedAdapter] = []
    return str(pretrained.find_tokenizer_folder(folder, none))


def plan_measured_job(name: str, job: Any, found: TrainingMeasurement) -> tuple[output.JobPlan | None, list[str]]:
    """Return the plan of the same job, with the sizes that the training settled on; None, and why, where there is
    none."""
    chip = table.find_chip(found.device_event.get("name", ""))
    if name not in _PLANNED_COMMANDS or chip is None:
        return None, []
    sizes = {size: int(found.resolved_sizes[size]) for size in _BATCH_SIZE_NAMES if size in found.resolved_sizes}
    try:
        paper = on_paper.estimate_job(
            replace(job, batch=replace(job.batch, **sizes)),
            Machine(chip, found.device_event["world_size"]),
        )
    except AnabaticError as error:
        return None, [f"no plan: {error}"]
    return paper, []


def build_training_metrics(found: TrainingMeasurement, warm_up: int, paper: output.JobPlan | None) -> list[BenchMetric]:
    """Return what the windows behind the warm-up say."""
    rows = found.windows[warm_up:]
    choice = paper.choice if paper else None
    metrics = [
        BenchMetric(
            "trained",
            "tokens/s",
            tuple(one.tokens_per_step / one.seconds_per_step for one in rows),
            choice.tokens_per_s if choice else None,
        ),
        BenchMetric(
            "step", "s", tuple(one.seconds_per_step for one in rows), choice.step_time.total_seconds if choice else None
        ),
    ]
    planned_share = {"mfu": choice.compute_mfu(paper.chip)} if choice and paper else {}
    for key, title in (("mfu", "MFU"), ("data_wait", "waiting for data")):
        values = tuple(one.logged_row[key] for one in rows if one.logged_row.get(key) is not None)
        if values:
            metrics.append(BenchMetric(title, "share", values, planned_share.get(key)))
    peak = (max(one.logged_row["memory_bytes"] for one in rows),)
    metrics.append(BenchMetric("peak memory of a process", "B", peak, choice.memory.total if choice else None))
    metrics.append(BenchMetric("start to first step", "s", (found.startup_seconds,)))
    return metrics
