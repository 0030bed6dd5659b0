"""What a pipeline of stages trains; all else is refused by name, before any process works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anabatic.config.loading.command_table import command_name
from anabatic.config.pretrain import PretrainJob
from anabatic.config.sections.train_jobs import LoopJob, TuneJob
from anabatic.config.sft import SftJob
from anabatic.core.errors import ConfigError


def require_pipeline_job(job: LoopJob) -> None:
    """Check that stages can train what a job asks for.

    Raises:
        ConfigError: they cannot.
    """
    stages = job.parallel.pipeline
    if stages == 1:
        return
    if type(job) not in (PretrainJob, SftJob):
        raise ConfigError(
            f"parallel.pipeline is {stages}, and {command_name(job)} does not train in stages",
            "leave parallel.pipeline at 1: pretrain and sft take it",
        )
    for what, hint in _list_unsupported(job):
        raise ConfigError(f"parallel.pipeline is {stages}, and {what}", f"{hint}, or leave parallel.pipeline at 1")


def _list_unsupported(job: Any) -> Iterator[tuple[str, str]]:
    if job.eval.sample_prompts:
        yield "eval.sample_prompts needs the whole model on one process", "leave them out"
    if job.save.memory_every:
        yield f"save.memory_every is {job.save.memory_every}", "use --save.memory-every 0"
    if job.parallel.check_replicas:
        yield f"parallel.check_replicas is {job.parallel.check_replicas}", "use --parallel.check-replicas 0"
    if job.parallel.offload != "none":
        yield f"parallel.offload is {job.parallel.offload}", "use --parallel.offload none"
    if job.parallel.deepspeed is not None:
        yield f"parallel.deepspeed is {job.parallel.deepspeed}", "leave it out"
    if isinstance(job, TuneJob):
        yield from _list_unsupported_tuning(job)


def _list_unsupported_tuning(job: Any) -> Iterator[tuple[str, str]]:
    if job.tuner == "freeze":
        yield "tuner is freeze, which may leave a stage nothing to train", "use --tuner full or lora"
    if job.quantize != "none":
        yield f"quantize is {job.quantize}", "use --quantize none"
    if job.adapter:
        yield f"adapter is {job.adapter[0]}", "merge it first with `anabatic merge`"
    if job.lora.init == "pissa":
        yield "lora.init is pissa", "use --lora.init default"
    if job.lora.use_dora:
        yield "lora.use_dora is true", "use --lora.use-dora false"
    if job.lora.modules_to_save:
        yield f"lora.modules_to_save is {', '.join(job.lora.modules_to_save)}", "leave it out"
    if job.curriculum.use and job.curriculum.by == "loss":
        yield "curriculum.by is loss", "use another order"
