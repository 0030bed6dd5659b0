"""torch's agent on one machine, with the reports, the restarts and the ranks of ours. It imports torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from anabatic.core import relaunch
from anabatic.launch.local import device_replacement, worker_reports
from anabatic.launch.machine_rendezvous import JobRendezvous

_SIGNAL_GRACE_SECONDS = 5.0
"""Seconds within which a signal that reached the workers also reaches their agent."""


class ReportingAgent(LocalElasticAgent):
    """Creates a report folder for every start of the workers, and records there which ranks failed first, and how.

    Overrides what it must of torch 2.13 (elastic/agent/server): the agent stops all workers when one fails, and reports
    which one only when its restarts are used up. Of a `JobRendezvous` it takes the ranks and the common end.

    Attributes:
        root: folder of the reports.
        is_elastic: the job can continue with fewer machines.
        replaces_devices: a restart replaces lost devices.
    """

    root: Path
    is_elastic: bool
    replaces_devices: bool

    def _start_workers(self, worker_group: Any) -> Any:
        folder = worker_reports.create_attempt_folder(self.root, [each.global_rank for each in worker_group.workers])
        os.environ[relaunch.REPORTS_VARIABLE] = str(folder)
        if len(worker_reports.list_attempt_folders(self.root)) > 1:
            os.environ[relaunch.RETRY_VARIABLE] = "1"
            if self.replaces_devices:
                _replace_devices(len(worker_group.workers))
        return super()._start_workers(worker_group)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            codes = {str(rank): failure.exitcode for rank, failure in result.failures.items()}
            Path(os.environ[relaunch.REPORTS_VARIABLE], relaunch.FAILED_RANKS_FILE).write_text(
                json.dumps(codes), encoding="utf-8"
            )
            self._count_restarts(set(codes.values()))
        return result

    def _count_restarts(self, codes: set[int]) -> None:
        if worker_reports.is_stop_requested(codes):
            if self.is_elastic:  # other machines may continue: only a signal to this agent ends its part
                time.sleep(_SIGNAL_GRACE_SECONDS)
            else:
                self._remaining_restarts = 0
        elif relaunch.EXIT_USER_ERROR in codes:
            self._remaining_restarts = 0  # a restart would fail in the same way
        elif Path(os.environ[relaunch.REPORTS_VARIABLE], relaunch.RESTART_FILE).is_file():
            self._remaining_restarts += 1  # this restart is free
            _kill_workers(self._pcontext.pids().values() if self._pcontext else ())

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> Any:
        handler: JobRendezvous = spec.rdzv_handler
        world = {"world_size": handler.world_size, "role_world_size": handler.world_size}
        ranks = [(local_rank, handler.first_rank + local_rank) for local_rank in range(spec.local_world_size)]
        return [Worker(local_rank, global_rank=rank, role_rank=rank, **world) for local_rank, rank in ranks]

    def _exit_barrier(self) -> None:
        handler: JobRendezvous = self._worker_group.spec.rdzv_handler  # type: ignore[assignment]
        self._in_exit_barrier = True
        handler.wait_for_all(self._exit_barrier_timeout)
        self._in_exit_barrier = False


def make_agent_class(root: Path, *, is_elastic: bool, replaces_devices: bool) -> type[ReportingAgent]:
    """Return the class of which torch's launcher makes one object, with its attributes set."""
    return type(
        "ReportingAgent",
        (ReportingAgent,),
        {"root": root, "is_elastic": is_elastic, "replaces_devices": replaces_devices},
    )


def _kill_workers(pids: Iterable[int]) -> None:
    """Kill workers that wait in a collective for a lost one: they have nothing to save without it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _replace_devices(nproc: int) -> None:
    variables, line = device_replacement.replace_lost_devices(nproc, os.environ)
    os.environ.update(variables)
    if line:
        sys.stderr.write(f"warning: {line}\n")
