"""The same command again in several processes, through the elastic agent of torch, kept alive.

The agent (`elastic_agent.py`) picks the ports, sets RANK, LOCAL_RANK and WORLD_SIZE, stops the others when one fails,
and starts all again as often as asked. It runs in a session of its own: a signal reaches it once, from here. Each
worker leaves its message, exit code and heartbeat in a folder that is read here, so that the user sees the cause and
not the agent's traceback, and sees it once when all ranks say the same. An agent that was killed, or has lost the other
machines, is started again as well.
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
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import json_reader, log, relaunch
from anabatic.core.errors import ConfigError, DeviceError, Failure
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.core.stop_signals import REPEATED_SIGNAL, STOP_NOW, STOP_SIGNALS, StopRequest, get_exit_code
from anabatic.launch import rendezvous, rendezvous_endpoint
from anabatic.launch.local import device_replacement, forkserver, native_stderr, placement, worker_reports
from anabatic.launch.local.watchdog import HangWatchdog
from anabatic.launch.schedulers import requeue

SAVE_SECONDS = 600
"""The agent kills workers that take longer than this to save after a signal."""
_SIGNALS = (*STOP_SIGNALS, signal.SIGQUIT)
"""SIGQUIT ends at once: it comes from those who start launchers on other machines, and know that a job is lost."""
_POLL_SECONDS = 0.25
"""Seconds between two looks at the workers."""
_MAX_LINE_CHARS = 300
"""Characters of a line that is repeated."""
_SHOWN_LOG_LINES = 3
"""Lines that are shown of the log of a rank that left no message, when the job ends with it."""


def run(command: str, recipe: str, launch: LaunchSettings, out: Path | None = None) -> int:
    """Run `anabatic COMMAND` in the processes that `launch` asks for and return the exit code.

    Args:
        command: for example `pretrain`.
        recipe: the resolved settings, as YAML.
        out: run folder, for the stacks of processes that hang.

    Raises:
        ConfigError: the machines were given different jobs, or the meeting point cannot be reached or is taken.
        DeviceError: a process ended without a message, for example killed for its memory, or hung.
        Failure: the other machines did not come, or went; or the job is started again and again in vain.
    """
    if launch.is_multi_node and out is not None and _is_finished(RunFolder(out), recipe):
        log.info(f"{out} holds this job, finished: nothing is left to do")
        return 0
    if out is not None:
        requeue.require_progress(out, launch.max_requeues, launch.node_rank in (None, 0), os.environ)
    with tempfile.TemporaryDirectory(prefix="anabatic-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(recipe, encoding="utf-8")
        settings = yaml.safe_load(recipe)
        if launch.has_fixed_nodes:
            own = rendezvous.collect_job_facts(rendezvous.flatten_settings(settings))
            place = {"host": launch.master_addr, "port": launch.master_port, "number": launch.node_rank}
            machine = {**place, "job": launch.job_id, "size": launch.max_nodes, "own": own}
            (folder / worker_reports.MACHINE_FILE).write_text(json.dumps(machine), encoding="utf-8")
        if launch.is_multi_node and not rendezvous_endpoint.is_rendezvous_host(launch):
            meeting = {"host": launch.master_addr, "port": launch.master_port, "seconds": launch.join_seconds}
            (folder / worker_reports.RENDEZVOUS_FILE).write_text(json.dumps(meeting), encoding="utf-8")
        processes = "1 process" if launch.nproc == 1 else f"{launch.nproc} processes"
        log.info(f"starting {processes}{f' on each of {launch.max_nodes} machines' if launch.is_multi_node else ''}")
        where = placement.place_workers(settings["device"], launch.nproc, os.environ, launch.is_multi_node)
        module, _, _ = command_table.get_command(command).recipe.partition(":")
        preload = forkserver.list_preload_modules(settings["device"]["type"], module)
        return _Supervisor(command.split(), folder, launch, where, out, preload).run()


def _is_finished(folder: RunFolder, recipe: str) -> bool:
    """True when this very job has come to its end: a machine that was away then must not wait for the others."""
    try:
        done = json_reader.read_json_file(folder.summary)["finished"]
        before = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return False
    return done is True and before == yaml.safe_load(recipe) and folder.final_model.is_dir()


class _Supervisor:
    """Starts agents until the job has ended."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        launch: LaunchSettings,
        where: dict[str, str],
        out: Path | None,
        preload: str,
    ) -> None:
        self.command, self.folder, self.launch, self.out = command, folder, launch, out
        self.worker_variables, self.preload = where, preload
        self.agent: subprocess.Popen[bytes] | None = None
        self.stop_request = StopRequest(supervised=relaunch.is_supervised())
        self.reported_attempts = 0
        """Starts of the workers whose end was reported."""
        self.hang_lines: list[str] = []
        """What the newest standstill looked like."""
        self.agent_restarts = 0
        """Restarts spent on agents, some of which left no start of the workers behind."""

    def run(self) -> int:
        old: dict[signal.Signals, Any] = {}
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, self._forward_signal)
        try:
            while True:
                code = self._run_agent()
                again = (code < 0 or code == relaunch.EXIT_RENDEZVOUS_LOST) and not self._is_excluded()
                if again and -code in STOP_SIGNALS:  # one that was sent to all of us
                    self.stop_request.classify_signal(-code)
                if not again or self.stop_request.first_signal or self._count_restarts_left() < 1:
                    return self._decide_exit_code(128 - code if code < 0 else code)
                why = f"killed by {signal.Signals(-code).name}" if code < 0 else self._read_lost_reason()
                log.warn(f"the launcher's agent has ended ({why}): starting again, {self._format_restarts_left()}")
                self.reported_attempts = max(
                    self.reported_attempts, len(worker_reports.list_attempt_folders(self.folder))
                )
                self.agent_restarts += 1
        finally:
            for number, handler in old.items():  # told to end: a second signal must not take our exit code away
                signal.signal(number, signal.SIG_IGN if self.stop_request.first_signal else handler)

    def _is_excluded(self) -> bool:
        """True when the others do not want this machine, or have another in its place: coming again would not help."""
        return any(
            (self.folder / name).is_file() for name in (worker_reports.REFUSED_FILE, worker_reports.REPLACED_FILE)
        )

    def _count_restarts_left(self) -> int:
        """How many restarts are left."""
        spent = sum(
            not worker_reports.read_restart_reason(folder)
            for folder in worker_reports.list_attempt_folders(self.folder)[:-1]
        )
        return self.launch.max_restarts - max(spent, self.agent_restarts)

    def _format_restarts_left(self) -> str:
        return f"{self._count_restarts_left() - 1} of {self.launch.max_restarts} restarts left"

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        what = STOP_NOW if number == signal.SIGQUIT else self.stop_request.classify_signal(number)
        self.stop_request.first_signal = self.stop_request.first_signal or number
        if self.agent is None or what == REPEATED_SIGNAL:
            return
        # All but Ctrl-C arrive as SIGTERM: the agent takes no other.
        wish = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.agent.send_signal(signal.SIGKILL if what == STOP_NOW else wish)

    def _run_agent(self) -> int:
        """Run one agent to its end; return its exit code, negative for a signal."""
        words = rendezvous_endpoint.build_agent_command(self.launch, max(self._count_restarts_left(), 0))
        words += ["-m", "anabatic", *self.command, "-c", str(self.folder / "job.yaml")]
        self.agent = subprocess.Popen(words, env=self._build_agent_environment(), start_new_session=True)
        if self.stop_request.first_signal:  # a signal came before there was an agent to hand it to
            self.agent.terminate()
        watch: HangWatchdog | None = None
        while True:
            try:
                return self.agent.wait(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                watch = self._check_workers(watch)

    def _check_workers(self, watch: HangWatchdog | None) -> HangWatchdog | None:
        started = worker_reports.list_attempt_folders(self.folder)
        while self.reported_attempts < len(started) - 1:
            self._log_restart(started[self.reported_attempts])
            self.reported_attempts += 1
        if not started:
            return None
        if watch is None or watch.folder != started[-1]:
            watch = HangWatchdog(started[-1], self.launch.hang_seconds, self.launch.join_seconds)
        if watch.is_hung():
            self._kill_hung_workers(watch)
        return watch

    def _kill_hung_workers(self, watch: HangWatchdog) -> None:
        stands = watch.dump_stacks_and_kill()
        self.hang_lines = [stand.describe_position() for stand in stands]
        log.warn(f"no process has moved for {watch.limit_seconds:g} s: they are ended")
        for line in self.hang_lines:
            log.warn(line)
        if self.out is not None and self.out.is_dir():
            path = self.out / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            write_atomic(path, "\n".join(f"{stand.describe_position()}\n{stand.stack}" for stand in stands))
            log.warn(f"all their stacks are in {path}")

    def _log_restart(self, folder: Path) -> None:
        number = int(folder.name.partition("-")[2]) + 1
        told = worker_reports.read_worker_report(folder)
        if wish := worker_reports.read_restart_reason(folder):
            log.warn(f"{wish}: all processes start again")
            return
        log.warn(
            f"{told.summarize_failure()}: all processes start again, restart {number} of {self.launch.max_restarts}"
        )
        if why := told.failure_hint() or native_stderr.explain_failure(folder, told):
            log.info(why)
        self._log_last_lines(folder, told, 1)

    def _log_last_lines(self, folder: Path, told: worker_reports.WorkerReport, count: int) -> None:
        """Show what ranks that left no message had written before, and what it means; keep what all have written."""
        for rank in told.silent_ranks:
            written = native_stderr.read_stderr_tail(folder, rank)
            lines = [line for line in written.splitlines() if line.strip()][-count:]
            if not lines and self.out is not None:
                lines = worker_reports.read_last_log_lines(folder, RunFolder(self.out).log_path(rank), count)
            for line in lines:
                log.info(f"[rank {rank}] {line[:_MAX_LINE_CHARS]}")
            if why := native_stderr.explain_stderr(written):
                log.info(why)
        native_stderr.append_to_rank_logs(folder, told.ranks, self.out)

    def _build_agent_environment(self) -> dict[str, str]:
        # torch's agent takes PET_ variables, which operators of Kubernetes set, for options of its own.
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
        # torch 2.13 would hand the workers of the next start the store of those before, whose keys tell old addresses.
        variables.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its stores warn of every connection that ends
        for name, value in rendezvous_endpoint.interface_variables(self.launch).items():
            variables.setdefault(name, value)
        return variables

    def _read_lost_reason(self) -> str:
        path = self.folder / worker_reports.LOST_FILE
        return path.read_text(encoding="utf-8") if path.is_file() else "it has lost the other machines"

    def _decide_exit_code(self, code: int) -> int:
        """Show each different message once; return the workers' own exit code rather than the agent's."""
        started = worker_reports.list_attempt_folders(self.folder)
        refused = self.folder / worker_reports.REFUSED_FILE
        if refused.is_file():
            lines = refused.read_text(encoding="utf-8").splitlines()
            raise ConfigError(
                f"the machines run different jobs: {'; '.join(lines[:3])}{', and more' if len(lines) > 3 else ''}",
                "give the same recipe and options on every machine",
            )
        replaced = self.folder / worker_reports.REPLACED_FILE
        if replaced.is_file():
            raise Failure(
                f"machine {self.launch.node_rank} has come again, from {replaced.read_text(encoding='utf-8')}: that one"
                " takes part in its place",
                "end what is left here; machines that are to take part both need a --node-rank of their own",
            )
        if self.stop_request.first_signal and not started:
            return self._log_stopped("before the processes had begun")
        if code == relaunch.EXIT_RENDEZVOUS_LOST or not started:
            raise Failure(*self._explain_missing_workers(code))
        told = worker_reports.read_worker_report(started[-1])
        if left := told.stop_exit_code():
            return left
        for line in told.format_messages():
            sys.stderr.write(f"{line}\n")
        if not told.failure_hint() and (why := native_stderr.explain_failure(started[-1], told)):
            sys.stderr.write(f"{why}\n")
        self._log_last_lines(started[-1], told, _SHOWN_LOG_LINES)
        first = [told.codes[rank] for rank in told.failed if told.codes.get(rank)]
        failed = first or [ended for ended in told.codes.values() if ended]
        if failed and not told.silent_ranks:
            return max(
                failed, key=lambda ended: ended == relaunch.EXIT_USER_ERROR
            )  # the user's mistake, which others follow with a failure
        if len(told.codes) == len(told.ranks):
            return 0  # the agent, too, was asked to end
        if not code:
            return code
        if self.stop_request.first_signal:
            return self._log_stopped("before the processes could save, or a second Ctrl-C")
        silent = told.silent_ranks or {rank: -(code - 128) for rank in told.ranks if rank not in told.codes}
        ranks = ", ".join(map(str, silent))
        everybody = "" if self.launch.is_multi_node else f" of {len(told.ranks)}"
        raise DeviceError(
            f"rank {ranks}{everybody} ended without a message ({self._describe_silent_end(silent)})",
            "killed from outside, for example for its memory: see `dmesg`, and rank-N.log in the run folder",
        )

    def _log_stopped(self, when: str) -> int:
        log.info(f"{signal.Signals(self.stop_request.first_signal).name} {when}: ended")
        return get_exit_code(self.stop_request.first_signal)

    def _describe_silent_end(self, silent: dict[int, int]) -> str:
        return f"hung: {self.hang_lines[0]}" if self.hang_lines else worker_reports.describe_exit_codes(silent)

    def _explain_missing_workers(self, code: int) -> tuple[str, str]:
        place = f"{self.launch.master_addr}:{self.launch.master_port}"
        if not self.launch.is_multi_node:
            return f"the launcher's agent ended with exit code {code}", "add --debug for its messages"
        return (
            f"the machines did not meet at {place}, or lost each other ({self._read_lost_reason()})",
            "start the same command on every machine with the same --nnodes, --master-addr and --master-port, and let"
            " that port through their firewalls",
        )
