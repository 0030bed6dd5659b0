"""Resolve a training's settings into what will run: defaults filled in, the mesh laid out, every rule asked. No torch.

Training, `plan`, `--dry-run`, the studio and the checks before a job starts all call `resolve`: a plan shows what a
training does, and a training refuses what its plan refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from anabatic.config.loading import settings
from anabatic.config.sections.train_jobs import LoopJob
from anabatic.core import log
from anabatic.data.readers.sources import names_hub_data
from anabatic.device.table import Chip
from anabatic.plan import job_rules, model_shape
from anabatic.plan.mesh_shape import MeshShape, resolve_mesh_shape
from anabatic.plan.model_facts import ModelFacts, find_model_facts

Job = TypeVar("Job", bound=LoopJob)


@dataclass(frozen=True)
class Machine:
    """Where a job runs, or is planned for: so many devices of a chip on each of so many machines.

    Attributes:
        chip: None: a training, which counts by the device that it has opened.
        chip_source: what says which chip it is, where the user has not.
        is_planned: nothing is started: another mesh is easier to have than other devices.
    """

    chip: Chip | None
    npus_per_node: int
    nodes: int = 1
    chip_source: str = ""
    is_planned: bool = True

    @property
    def known_chip(self) -> Chip:
        """The chip of a machine that a plan is made for."""
        assert self.chip is not None
        return self.chip

    @property
    def devices(self) -> int:
        """Of all machines."""
        return self.npus_per_node * self.nodes


@dataclass(frozen=True)
class ResolvedJob(Generic[Job]):
    """A job that can run.

    Attributes:
        job: with its defaults filled in.
        mesh: of its processes.
        model: what is known of its model.
        origins: dotted key of what was filled in -> where its value comes from.
        reads_hub_data: a source may be a data set of a hub, whose commit is looked up.
        notes, warnings: what was filled in and what was not used, a line each.
    """

    job: Job
    mesh: MeshShape
    model: ModelFacts
    origins: Mapping[str, str]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    reads_hub_data: bool = False

    def log_notes(self) -> None:
        """Log what was filled in and what was not used."""
        for note in self.notes:
            log.info(note)
        for warning in self.warnings:
            log.warn(warning)


def resolve(job: Job, machine: Machine, model: ModelFacts | None = None) -> ResolvedJob[Job]:
    """Return what of a job will run on a machine.

    Args:
        model: None: it is looked up here.

    Raises:
        ConfigError: the job cannot run; `MultipleErrors` where there is more than one reason.
    """
    if machine.chip is not None:
        job_rules.raise_problems(job_rules.find_chip_problems(machine.chip))
    origins: dict[str, str] = {}
    if machine.chip is not None and model_shape.is_depth_left_open(job):
        job = _with_chosen_depth(job, machine.chip, machine.devices)
        origins["model.depth"] = f"machine: what schedule.minutes are enough for on {machine.chip.name}"
    model = model or find_model_facts(job)
    devices = machine.devices
    job, shortened = set_default_seq_len(job, model)
    data = getattr(job, "data", None)
    reads_hub_data = names_hub_data((*getattr(data, "train", ()), *getattr(data, "valid", ())))
    mesh = resolve_mesh_shape(job.parallel, devices, machine.is_planned)
    if shortened:
        origins["batch.seq_len"] = f"model: {model.positions} positions"
    applied = ignored = ""
    if (file := job.parallel.deepspeed) is not None:
        from anabatic.config.loading import deepspeed_json

        given = job
        job, applied, ignored = deepspeed_json.apply_deepspeed(job, mesh.data_size)
        origins |= dict.fromkeys(_list_changes(given, job), f"recipe: {file}")
    problems = (
        job_rules.find_tuner_problems(job, model),
        job_rules.find_layout_problems(job, mesh, model),
        () if machine.is_planned else job_rules.find_share_problems(job, mesh, devices),
    )
    job_rules.raise_problems(itertools.chain(*problems))
    notes, warnings = tuple(filter(None, (shortened, applied))), tuple(filter(None, (ignored,)))
    return ResolvedJob(job, mesh, model, origins, notes, warnings, reads_hub_data)


def _list_changes(before: LoopJob, after: LoopJob) -> list[str]:
    """Return the dotted keys of settings that differ."""
    first, second = (settings.flatten_settings(settings.job_to_dict(job)) for job in (before, after))
    return [key for key, value in second.items() if first.get(key) != value]


def _with_chosen_depth(job: Any, chip: Chip, devices: int) -> Any:
    return model_shape.with_depth(job, model_shape.choose_depth(job, chip, devices))


def set_default_seq_len(job: Job, model: ModelFacts) -> tuple[Job, str]:
    """Return the job with `batch.seq_len` filled in: what is common, and no more than the model's positions, where they
    are known; and a line about it, where it is shorter than what is common.
    """
    if job.batch.seq_len is not None:
        return job, ""
    common = job.batch.resolved_seq_len
    length = min(common, model.positions or common)
    note = f"batch.seq_len {length} (the model was made for {length} positions; {common} is common)"
    return replace(job, batch=replace(job.batch, seq_len=length)), note if length < common else ""
