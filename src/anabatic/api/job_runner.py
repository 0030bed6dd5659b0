"""Run a checked job in this process, or in one process per device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings as settings_module
from anabatic.config.loading.command_package import Command
from anabatic.config.sections.launch import LaunchSettings
from anabatic.config.sections.train_jobs import is_auto
from anabatic.core.stop_signals import SIGNAL_LISTENER


def run_job(row: Command, job: Any, owns_process: bool = True) -> int:
    """Run a job and return its exit code.

    Args:
        row: its command.
        job: its settings.
        owns_process: stop signals belong to the job until the process ends; otherwise only while it trains.

    Raises:
        UserError: the job cannot run with these settings or files.
        Failure: it failed.
    """
    settings = settings_module.job_to_dict(job)
    is_worker = "RANK" in os.environ
    if not is_worker:  # before torch is imported, which takes seconds
        from anabatic.plan import model_shape
        from anabatic.recipes.prechecks import jobs

        model_shape.require_supported_job(settings)
        jobs.require_valid_job(row.name, job)
    device = settings.get("device", {})
    nproc = device.get("nproc", 1)
    if not is_worker and (nproc > 1 or is_auto(job)):  # the job cannot restart itself
        return launch_processes(row, job, LaunchSettings(nproc=nproc), owns_process)
    if row.is_training and owns_process:
        SIGNAL_LISTENER.start_listening()
    if row.is_training and not is_worker and _may_choose_devices(device["type"]):
        from anabatic.launch.local import device_selection

        os.environ.update(device_selection.place_single_process(device, os.environ))
    code = row.import_recipe_function()(job)
    return int(code or 0)


def _may_choose_devices(device_type: str) -> bool:
    """Return whether a process of this kind can be given one of several devices."""
    from anabatic.device.table import DEVICES

    return device_type not in DEVICES or bool(DEVICES[device_type].visible_env)


def launch_processes(row: Command, job: Any, launch: LaunchSettings, owns_process: bool = True) -> int:
    """Run a job in the processes of `launch` and return its exit code.

    Raises:
        Failure: a process failed more often than it may be started again.
    """
    if owns_process:
        SIGNAL_LISTENER.start_listening(watch=False)  # the workers are not started yet
    from anabatic.launch.local import spawn

    out = settings_module.job_to_dict(job).get("out")
    return spawn.run(row.name, settings_module.dump_job(job), launch, Path(out) if out else None)
