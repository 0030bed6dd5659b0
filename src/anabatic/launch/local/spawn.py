"""Run a command in several processes through the elastic agent of torch, and supervise it.

The agent (`elastic_agent.py`) picks the ports, sets RANK, LOCAL_RANK and WORLD_SIZE, stops all workers when one fails,
and restarts them up to the configured number of times. It runs in a separate session: a signal reaches it once, from
here. Each worker writes its message, exit code and heartbeat to a folder that is read here, so that the user sees the
cause instead of the agent's traceback, and only once if all ranks report the same. An agent that was killed, or has
lost the other machines, is restarted as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from anabatic.config.loading import command_table
from anabatic.config.loading.settings import flatten_settings
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import log, relaunch
from anabatic.core.errors import ConfigError, DeviceError, Failure
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.core.stop_signals import (
    REPEATED_SIGNAL,
    SIGNAL_LISTENER,
    STOP_NOW,
    STOP_SIGNALS,
    StopRequest,
    get_exit_code,
    is_supervised,
)
from anabatic.launch import job_secret, rendezvous, rendezvous_endpoint
from anabatic.launch.local import device_replacement, forkserver, placement, worker_reports
from anabatic.launch.local.watchdog import HangWatchdog
from anabatic.launch.schedulers import requeue
from anabatic.monitor.run_data import RunFiles

SAVE_SECONDS = 600
"""Seconds after which the agent kills workers that still save after a signal."""
_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
"""SIGQUIT ends the job at once: it comes from launchers on other machines that know that the job is lost."""
_POLL_SECONDS = 0.25
"""Seconds between two checks of the workers."""
_MAX_LINE_CHARS = 300
"""Most characters of a repeated log line."""
_SHOWN_LOG_LINES = 3
"""Log lines shown of a rank that ended the job without a message."""


def run(command: str, recipe: str, launch: LaunchSettings, out: Path | None = None) -> int:
    """Run `anabatic COMMAND` in the processes of `launch` and return the exit code.

    Args:
        command: command of anabatic, for example `pretrain`.
        recipe: the resolved settings, as YAML.
        out: run folder, for the stacks of hung processes.

    Raises:
        ConfigError: the machines run different jobs, the job's secret is invalid, or the rendezvous endpoint is
            unreachable or in use.
        DeviceError: a process ended without a message, for example killed for its memory, or hung.
        Failure: other machines did not join or were lost; or the scheduler restarts the job without progress.
    """
    if launch.is_multi_node and out is not None and _is_finished(RunFolder(out), recipe):
        log.info(f"{out} holds this job, finished: nothing is left to do")
        return 0
    if out is not None:
        requeue.require_progress(out, launch.max_requeues, launch.node_rank in (None, 0), os.environ)
    if (
        launch.is_multi_node
        and not job_secret.read_secret(os.environ)
        and rendezvous_endpoint.is_rendezvous_host(launch)
    ):
        log.warn(
            f"this job has no secret: whoever reaches port {launch.master_port} of this machine can take part in it;"
            f" set {job_secret.VARIABLE} to the same text on every machine, for example the output of"
            f" `{job_secret.SHELL_COMMAND}`"
        )
    with tempfile.TemporaryDirectory(prefix="anabatic-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(recipe, encoding="utf-8")
        settings = yaml.safe_load(recipe)
        if launch.is_multi_node:
            machine = {
                "host": launch.master_addr,
                "port": launch.master_port,
                "job": launch.job_id,
                "nodes": [launch.min_nodes, launch.max_nodes],
                "node_rank": launch.node_rank,
                "nproc": launch.nproc,
                "facts": rendezvous.collect_job_facts(flatten_settings(settings)),
                "join_seconds": launch.join_seconds,
                "is_host": rendezvous_endpoint.is_rendezvous_host(launch),
            }
            (folder / worker_reports.MACHINE_FILE).write_text(json.dumps(machine), encoding="utf-8")
        processes = "1 process" if launch.nproc == 1 else f"{launch.nproc} processes"
        log.info(f"starting {processes}{f' on each of {launch.max_nodes} machines' if launch.is_multi_node else ''}")
        worker_variables = placement.place_workers(settings["device"], launch.nproc, os.environ, launch.is_multi_node)
        module, _, _ = command_table.COMMANDS.find_row(command).recipe.partition(":")
        preload = forkserver.list_preload_modules(settings["device"]["type"], module)
        return _Supervisor(command.split(), folder, launch, worker_variables, out, preload).run()


def _is_finished(folder: RunFolder, recipe: str) -> bool:
    """Return whether the job has finished already: a machine that was absent then must not wait for the others."""
    try:
        previous_settings = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return False
    return (
        RunFiles(folder.root).is_finished
        and previous_settings == yaml.safe_load(recipe)
        and folder.final_model.is_dir()
    )


class _Supervisor:
    """Runs the agent, and restarts it until the job ends."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        launch: LaunchSettings,
        worker_variables: dict[str, str],
        out: Path | None,
        preload: str,
    ) -> None:
        self.command, self.folder, self.launch, self.out = command, folder, launch, out
        self.worker_variables, self.preload = worker_variables, preload
        self.agent: subprocess.Popen[bytes] | None = None
        self.stop_request = StopRequest(supervised=is_supervised())
        self.reported_attempts = 0
        """Number of worker starts whose end was reported."""
        self.hang_lines: list[str] = []
        """Log lines about the newest hang."""
        self.agent_restarts = 0
        """Restarts of the agent, which may have ended before it started workers."""

    def run(self) -> int:
        previous_handlers: dict[signal.Signals, Any] = {}
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                previous_handlers[signum] = signal.signal(signum, self._forward_signal)
        try:
            while True:
                code = self._run_agent()
                is_lost = code == relaunch.EXIT_RENDEZVOUS_LOST and not self._has_user_error()
                can_restart = (code < 0 or is_lost) and not self._is_excluded()
                if can_restart and -code in STOP_SIGNALS:  # a signal to the whole process group
                    self.stop_request.classify_signal(-code)
                if not can_restart or self.stop_request.first_signal or self._count_restarts_left() < 1:
                    return self._decide_exit_code(128 - code if code < 0 else code)
                reason = f"killed by {signal.Signals(-code).name}" if code < 0 else self._read_lost_reason()
                log.warn(f"the launcher's agent has ended ({reason}): starting again, {self._format_restarts_left()}")
                self.reported_attempts = max(
                    self.reported_attempts, len(worker_reports.list_attempt_folders(self.folder))
                )
                self.agent_restarts += 1
        finally:
            SIGNAL_LISTENER.hold_signals()  # they were sent to the workers too, and must not change the exit code
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)

    def _has_user_error(self) -> bool:
        """Return whether a worker ended with a user error, which the other machines may have met first."""
        attempts = worker_reports.list_attempt_folders(self.folder)
        codes = worker_reports.read_worker_report(attempts[-1]).codes if attempts else {}
        return relaunch.EXIT_USER_ERROR in codes.values()

    def _is_excluded(self) -> bool:
        """Return whether the job refused or replaced this machine, so that another attempt would not help."""
        return any(
            (self.folder / name).is_file() for name in (worker_reports.REFUSED_FILE, worker_reports.REPLACED_FILE)
        )

    def _raise_if_excluded(self) -> None:
        """Raise why the job refused or replaced this machine, if it did.

        Raises:
            ConfigError: the machines run different jobs.
            Failure: another machine has taken its place.
        """
        refused_path = self.folder / worker_reports.REFUSED_FILE
        if refused_path.is_file():
            lines = refused_path.read_text(encoding="utf-8").splitlines()
            raise ConfigError(
                f"the machines run different jobs: {'; '.join(lines[:3])}{', and more' if len(lines) > 3 else ''}",
                f"give the same recipe, options and {job_secret.VARIABLE} on every machine",
            )
        replaced_path = self.folder / worker_reports.REPLACED_FILE
        if replaced_path.is_file():
            raise Failure(
                f"machine {self.launch.node_rank} has come again, from"
                f" {replaced_path.read_text(encoding='utf-8')}: that one takes part in its place",
                "end what is left here; machines that are to take part both need their own --node-rank",
            )

    def _count_restarts_left(self) -> int:
        """Return how many restarts are left."""
        spent = sum(
            not worker_reports.read_restart_reason(folder)
            for folder in worker_reports.list_attempt_folders(self.folder)[:-1]
        )
        return self.launch.max_restarts - max(spent, self.agent_restarts)

    def _format_restarts_left(self) -> str:
        return f"{self._count_restarts_left() - 1} of {self.launch.max_restarts} restarts left"

    def _forward_signal(self, signum: int, frame: FrameType | None) -> None:
        action = STOP_NOW if signum == signal.SIGQUIT else self.stop_request.classify_signal(signum)
        self.stop_request.first_signal = self.stop_request.first_signal or signum
        if self.agent is None or action == REPEATED_SIGNAL:
            return
        # The agent handles only SIGINT and SIGTERM.
        forwarded_signal = signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM
        self.agent.send_signal(signal.SIGKILL if action == STOP_NOW else forwarded_signal)

    def _run_agent(self) -> int:
        """Run one agent to its end; return its exit code, negative for a signal."""
        command = rendezvous_endpoint.build_agent_command(self.launch, max(self._count_restarts_left(), 0))
        command += ["-m", "anabatic", *self.command, "-c", str(self.folder / "job.yaml")]
        self.agent = subprocess.Popen(command, env=self._build_agent_environment(), start_new_session=True)
        if self.stop_request.first_signal:  # a signal arrived before the agent was started
            self.agent.terminate()
        watchdog: HangWatchdog | None = None
        while True:
            try:
                return self.agent.wait(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                watchdog = self._check_workers(watchdog)

    def _check_workers(self, watchdog: HangWatchdog | None) -> HangWatchdog | None:
        attempts = worker_reports.list_attempt_folders(self.folder)
        while self.reported_attempts < len(attempts) - 1:
            self._log_restart(attempts[self.reported_attempts])
            self.reported_attempts += 1
        if not attempts:
            return None
        if watchdog is None or watchdog.folder != attempts[-1]:
            watchdog = HangWatchdog(attempts[-1], self.launch.hang_seconds, self.launch.join_seconds)
        if watchdog.is_hung():
            self._kill_hung_workers(watchdog)
        return watchdog

    def _kill_hung_workers(self, watchdog: HangWatchdog) -> None:
        hung_processes = watchdog.dump_stacks_and_kill()
        self.hang_lines = [process.describe_position() for process in hung_processes]
        log.warn(f"no process has moved for {watchdog.limit_seconds:g} s: they are ended")
        for line in self.hang_lines:
            log.warn(line)
        if self.out is not None and self.out.is_dir():
            path = self.out / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            write_atomic(
                path, "\n".join(f"{process.describe_position()}\n{process.stack}" for process in hung_processes)
            )
            log.warn(f"all their stacks are in {path}")

    def _log_restart(self, folder: Path) -> None:
        restart_number = int(folder.name.partition("-")[2]) + 1
        report = worker_reports.read_worker_report(folder)
        if reason := worker_reports.read_restart_reason(folder):
            log.warn(f"{reason}: all processes start again")
            return
        log.warn(
            f"{report.summarize_failure()}: all processes start again, restart {restart_number} of"
            f" {self.launch.max_restarts}"
        )
        if hint := report.failure_hint() or worker_reports.explain_failure(folder, report):
            log.info(hint)
        self._log_last_lines(folder, report, 1)

    def _log_last_lines(self, folder: Path, report: worker_reports.WorkerReport, count: int) -> None:
        """Log the last lines of ranks without a message, with an explanation; append native output to all rank logs."""
        for rank in report.silent_ranks:
            stderr = worker_reports.read_stderr_tail(folder, rank)
            lines = [line for line in stderr.splitlines() if line.strip()][-count:]
            if not lines and self.out is not None:
                lines = worker_reports.read_last_log_lines(folder, RunFolder(self.out).log_path(rank), count)
            for line in lines:
                log.info(f"[rank {rank}] {line[:_MAX_LINE_CHARS]}")
            if explanation := worker_reports.explain_stderr(stderr):
                log.info(explanation)
        worker_reports.append_to_rank_logs(folder, report.ranks, self.out)

    def _build_agent_environment(self) -> dict[str, str]:
        # torch's agent reads PET_ variables, which Kubernetes operators set, as its own options.
        variables = {
            name: value for name, value in relaunch.build_child_environment().items() if not name.startswith("PET_")
        }
        variables[relaunch.REPORTS_VARIABLE] = str(self.folder)
        if self.preload:
            variables[forkserver.PRELOAD_VARIABLE] = self.preload
        if device_replacement.has_visible_devices(os.environ):
            variables[device_replacement.FIXED_DEVICES_VARIABLE] = "1"
        variables.update(self.worker_variables)
        variables.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its stores warn of every connection that ends
        for name, value in rendezvous_endpoint.interface_variables(self.launch).items():
            variables.setdefault(name, value)
        return variables

    def _read_lost_reason(self) -> str:
        path = self.folder / worker_reports.LOST_FILE
        return path.read_text(encoding="utf-8") if path.is_file() else "it has lost the other machines"

    def _decide_exit_code(self, code: int) -> int:
        """Print each distinct message once; return the workers' exit code rather than the agent's."""
        attempts = worker_reports.list_attempt_folders(self.folder)
        self._raise_if_excluded()
        if (self.folder / worker_reports.UNUSED_FILE).is_file():
            log.info("the job has ended: this machine was a spare, and was not needed")
            return 0
        if self.stop_request.first_signal and not attempts:
            return self._log_stopped("before the processes had begun")
        # Machine 0 was faster to stop, or to fail of the same error: what the workers did here counts.
        is_followed = bool(self.stop_request.first_signal) or self._has_user_error()
        if not attempts or (code == relaunch.EXIT_RENDEZVOUS_LOST and not is_followed):
            raise Failure(*self._explain_missing_workers(code))
        report = worker_reports.read_worker_report(attempts[-1])
        if stop_code := report.stop_exit_code():
            return stop_code
        for line in report.format_messages():
            sys.stderr.write(f"{line}\n")
        if not report.failure_hint() and (hint := worker_reports.explain_failure(attempts[-1], report)):
            sys.stderr.write(f"{hint}\n")
        self._log_last_lines(attempts[-1], report, _SHOWN_LOG_LINES)
        first_codes = [report.codes[rank] for rank in report.failed if report.codes.get(rank)]
        failed_codes = first_codes or [exit_code for exit_code in report.codes.values() if exit_code]
        if failed_codes and not report.silent_ranks:
            return max(
                failed_codes, key=lambda exit_code: exit_code == relaunch.EXIT_USER_ERROR
            )  # a user error, which causes failures of the other ranks
        if len(report.codes) == len(report.ranks):
            return 0  # the agent was asked to stop, too
        if not code:
            return code
        if self.stop_request.first_signal:
            return self._log_stopped("before the processes could save, or a second Ctrl-C")
        silent_codes = report.silent_ranks or {rank: -(code - 128) for rank in report.ranks if rank not in report.codes}
        ranks = ", ".join(map(str, silent_codes))
        rank_count = "" if self.launch.is_multi_node else f" of {len(report.ranks)}"
        raise DeviceError(
            f"rank {ranks}{rank_count} ended without a message ({self._describe_silent_end(silent_codes)})",
            "killed from outside, for example for its memory: see `dmesg`, and rank-N.log in the run folder",
        )

    def _log_stopped(self, phase: str) -> int:
        log.info(f"{signal.Signals(self.stop_request.first_signal).name} {phase}: ended")
        return get_exit_code(self.stop_request.first_signal)

    def _describe_silent_end(self, silent_codes: dict[int, int]) -> str:
        return f"hung: {self.hang_lines[0]}" if self.hang_lines else worker_reports.describe_exit_codes(silent_codes)

    def _explain_missing_workers(self, code: int) -> tuple[str, str]:
        endpoint = f"{self.launch.master_addr}:{self.launch.master_port}"
        if not self.launch.is_multi_node:
            return f"the launcher's agent ended with exit code {code}", "add --debug for its messages"
        return (
            f"the machines did not meet at {endpoint}, or lost each other ({self._read_lost_reason()})",
            "start the same command on every machine with the same --nnodes, --master-addr and --master-port, and let"
            " that port through their firewalls",
        )
