"""The same command again in several processes, through the elastic agent of torch, kept alive.

The agent (`agent.py`) picks the ports, sets RANK, LOCAL_RANK and WORLD_SIZE, stops the others when one fails, and
starts all again as often as asked. It runs in a session of its own: a signal reaches it once, from here. Each worker
leaves its message, exit code and heartbeat in a folder that is read here, so that the user sees the cause and not the
agent's traceback, and sees it once when all ranks say the same. An agent that was killed, or has lost the other
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

from anabatic.config import commands
from anabatic.config.launch import Launch
from anabatic.core import child, json_text, log
from anabatic.core.errors import ConfigError, DeviceError, Failure
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.core.stopping import AGAIN, NOW, SIGNALS, Wish, code_of
from anabatic.launch import cluster, forkserver, native, reports, requeue, roll, seats, spare
from anabatic.launch.watch import Watch

SAVE_SECONDS = 600
"""The agent kills workers that take longer than this to save after a signal."""
_SIGNALS = (*SIGNALS, signal.SIGQUIT)
"""SIGQUIT ends at once: it comes from those who start launchers on other machines, and know that a job is lost."""
_LOOK = 0.25
"""Seconds between two looks at the workers."""
_WIDTH = 300
"""Characters of a line that is repeated."""
_LAST = 3
"""Lines that are shown of the log of a rank that left no message, when the job ends with it."""


def run(command: str, recipe: str, launch: Launch, out: Path | None = None) -> int:
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
    if launch.several and out is not None and _finished(RunFolder(out), recipe):
        log.info(f"{out} holds this job, finished: nothing is left to do")
        return 0
    if out is not None:
        requeue.require_progress(out, launch.max_requeues, launch.node_rank in (None, 0), os.environ)
    with tempfile.TemporaryDirectory(prefix="anabatic-") as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(recipe, encoding="utf-8")
        settings = yaml.safe_load(recipe)
        if launch.fixed:
            own = roll.facts(roll.flat(settings))
            place = {"host": launch.master_addr, "port": launch.master_port, "number": launch.node_rank}
            machine = {**place, "job": launch.job_id, "size": launch.max_nodes, "own": own}
            (folder / reports.MACHINE).write_text(json.dumps(machine), encoding="utf-8")
        if launch.several and not cluster.is_meeting(launch):
            meeting = {"host": launch.master_addr, "port": launch.master_port, "seconds": launch.join_seconds}
            (folder / reports.MEETING).write_text(json.dumps(meeting), encoding="utf-8")
        processes = "1 process" if launch.nproc == 1 else f"{launch.nproc} processes"
        log.info(f"starting {processes}{f' on each of {launch.max_nodes} machines' if launch.several else ''}")
        where = seats.variables(settings["device"], launch.nproc, os.environ, launch.several)
        module, _, _ = commands.get(command).recipe.partition(":")
        preload = forkserver.preload(settings["device"]["type"], module)
        return _Supervisor(command.split(), folder, launch, where, out, preload).run()


def _finished(folder: RunFolder, recipe: str) -> bool:
    """True when this very job has come to its end: a machine that was away then must not wait for the others."""
    try:
        done = json_text.read(folder.summary)["finished"]
        before = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError):
        return False
    return done is True and before == yaml.safe_load(recipe) and folder.final_model.is_dir()


class _Supervisor:
    """Starts agents until the job has ended."""

    def __init__(
        self, command: list[str], folder: Path, launch: Launch, where: dict[str, str], out: Path | None, preload: str
    ) -> None:
        self.command, self.folder, self.launch, self.out = command, folder, launch, out
        self.seats, self.preload = where, preload
        self.agent: subprocess.Popen[bytes] | None = None
        self.wish = Wish(supervised=child.is_supervised())
        self.told = 0
        """Starts of the workers whose end was told."""
        self.hung: list[str] = []
        """What the newest standstill looked like."""
        self.extra = 0
        """Restarts spent on agents, some of which left no start of the workers behind."""

    def run(self) -> int:
        old: dict[signal.Signals, Any] = {}
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, self._forward)
        try:
            while True:
                code = self._agent()
                again = (code < 0 or code == child.LOST) and not self._is_sent_away()
                if again and -code in SIGNALS:  # one that was sent to all of us
                    self.wish.take(-code)
                if not again or self.wish.number or self._restarts() < 1:
                    return self._outcome(128 - code if code < 0 else code)
                why = f"killed by {signal.Signals(-code).name}" if code < 0 else self._lost()
                log.warn(f"the launcher's agent has ended ({why}): starting again, {self._left()}")
                self.told = max(self.told, len(reports.tries(self.folder)))
                self.extra += 1
        finally:
            for number, handler in old.items():  # told to end: a second signal must not take our exit code away
                signal.signal(number, signal.SIG_IGN if self.wish.number else handler)

    def _is_sent_away(self) -> bool:
        """True when the others do not want this machine, or have another in its place: coming again would not help."""
        return any((self.folder / name).is_file() for name in (reports.REFUSED, reports.REPLACED))

    def _restarts(self) -> int:
        """How many restarts are left."""
        spent = sum(not reports.wished(folder) for folder in reports.tries(self.folder)[:-1])
        return self.launch.max_restarts - max(spent, self.extra)

    def _left(self) -> str:
        return f"{self._restarts() - 1} of {self.launch.max_restarts} restarts left"

    def _forward(self, number: int, frame: FrameType | None) -> None:
        what = NOW if number == signal.SIGQUIT else self.wish.take(number)
        self.wish.number = self.wish.number or number
        if self.agent is None or what == AGAIN:
            return
        # All but Ctrl-C arrive as SIGTERM: the agent takes no other.
        wish = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.agent.send_signal(signal.SIGKILL if what == NOW else wish)

    def _agent(self) -> int:
        """Run one agent to its end; return its exit code, negative for a signal."""
        words = cluster.arguments(self.launch, max(self._restarts(), 0))
        words += ["-m", "anabatic", *self.command, "-c", str(self.folder / "job.yaml")]
        self.agent = subprocess.Popen(words, env=self._environment(), start_new_session=True)
        if self.wish.number:  # a signal came before there was an agent to hand it to
            self.agent.terminate()
        watch: Watch | None = None
        while True:
            try:
                return self.agent.wait(timeout=_LOOK)
            except subprocess.TimeoutExpired:
                watch = self._look(watch)

    def _look(self, watch: Watch | None) -> Watch | None:
        started = reports.tries(self.folder)
        while self.told < len(started) - 1:
            self._tell_restart(started[self.told])
            self.told += 1
        if not started:
            return None
        if watch is None or watch.folder != started[-1]:
            watch = Watch(started[-1], self.launch.hang_seconds, self.launch.join_seconds)
        if watch.hung():
            self._end_hung(watch)
        return watch

    def _end_hung(self, watch: Watch) -> None:
        stands = watch.end()
        self.hung = [stand.line() for stand in stands]
        log.warn(f"no process has moved for {watch.limit:g} s: they are ended")
        for line in self.hung:
            log.warn(line)
        if self.out is not None and self.out.is_dir():
            path = self.out / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
            write_atomic(path, "\n".join(f"{stand.line()}\n{stand.stack}" for stand in stands))
            log.warn(f"all their stacks are in {path}")

    def _tell_restart(self, folder: Path) -> None:
        number = int(folder.name.partition("-")[2]) + 1
        told = reports.read(folder)
        if wish := reports.wished(folder):
            log.warn(f"{wish}: all processes start again")
            return
        log.warn(f"{told.brief()}: all processes start again, restart {number} of {self.launch.max_restarts}")
        if why := told.why() or native.explained(folder, told):
            log.info(why)
        self._tell_last_lines(folder, told, 1)

    def _tell_last_lines(self, folder: Path, told: reports.Told, count: int) -> None:
        """Show what ranks that left no message had written before, and what it means; keep what all have written."""
        for rank in told.silent:
            written = native.text(folder, rank)
            lines = [line for line in written.splitlines() if line.strip()][-count:]
            if not lines and self.out is not None:
                lines = reports.last_lines(folder, RunFolder(self.out).log(rank), count)
            for line in lines:
                log.info(f"[rank {rank}] {line[:_WIDTH]}")
            if why := native.hint(written):
                log.info(why)
        native.keep(folder, told.ranks, self.out)

    def _environment(self) -> dict[str, str]:
        # torch's agent takes PET_ variables, which operators of Kubernetes set, for options of its own.
        variables = {name: value for name, value in child.environment().items() if not name.startswith("PET_")}
        variables[child.REPORTS] = str(self.folder)
        if self.preload:
            variables[forkserver.PRELOAD] = self.preload
        if spare.chosen(os.environ):
            variables[spare.FIXED] = "1"
        variables.update(self.seats)
        variables.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
        # torch 2.13 would hand the workers of the next start the store of those before, whose keys tell old addresses.
        variables.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # its stores warn of every connection that ends
        for name, value in cluster.variables(self.launch).items():
            variables.setdefault(name, value)
        return variables

    def _lost(self) -> str:
        path = self.folder / reports.LOST_WHY
        return path.read_text(encoding="utf-8") if path.is_file() else "it has lost the other machines"

    def _outcome(self, code: int) -> int:
        """Show each different message once; return the workers' own exit code rather than the agent's."""
        started = reports.tries(self.folder)
        refused = self.folder / reports.REFUSED
        if refused.is_file():
            lines = refused.read_text(encoding="utf-8").splitlines()
            raise ConfigError(
                f"the machines run different jobs: {'; '.join(lines[:3])}{', and more' if len(lines) > 3 else ''}",
                "give the same recipe and options on every machine",
            )
        replaced = self.folder / reports.REPLACED
        if replaced.is_file():
            raise Failure(
                f"machine {self.launch.node_rank} has come again, from {replaced.read_text(encoding='utf-8')}: that one"
                " takes part in its place",
                "end what is left here; machines that are to take part both need a --node-rank of their own",
            )
        if self.wish.number and not started:
            return self._told_to_end("before the processes had begun")
        if code == child.LOST or not started:
            raise Failure(*self._nobody(code))
        told = reports.read(started[-1])
        if left := told.leave():
            return left
        for line in told.lines():
            sys.stderr.write(f"{line}\n")
        if not told.why() and (why := native.explained(started[-1], told)):
            sys.stderr.write(f"{why}\n")
        self._tell_last_lines(started[-1], told, _LAST)
        first = [told.codes[rank] for rank in told.failed if told.codes.get(rank)]
        failed = first or [ended for ended in told.codes.values() if ended]
        if failed and not told.silent:
            return max(
                failed, key=lambda ended: ended == child.MISTAKE
            )  # the user's mistake, which others follow with a failure
        if len(told.codes) == len(told.ranks):
            return 0  # the agent, too, was told to end
        if not code:
            return code
        if self.wish.number:
            return self._told_to_end("before the processes could save, or a second Ctrl-C")
        silent = told.silent or {rank: -(code - 128) for rank in told.ranks if rank not in told.codes}
        ranks = ", ".join(map(str, silent))
        everybody = "" if self.launch.several else f" of {len(told.ranks)}"
        raise DeviceError(
            f"rank {ranks}{everybody} ended without a message ({self._how(silent)})",
            "killed from outside, for example for its memory: see `dmesg`, and rank-N.log in the run folder",
        )

    def _told_to_end(self, when: str) -> int:
        log.info(f"{signal.Signals(self.wish.number).name} {when}: ended")
        return code_of(self.wish.number)

    def _how(self, silent: dict[int, int]) -> str:
        return f"hung: {self.hung[0]}" if self.hung else reports.ending(silent)

    def _nobody(self, code: int) -> tuple[str, str]:
        place = f"{self.launch.master_addr}:{self.launch.master_port}"
        if not self.launch.several:
            return f"the launcher's agent ended with exit code {code}", "add --debug for its messages"
        return (
            f"the machines did not meet at {place}, or lost each other ({self._lost()})",
            "start the same command on every machine with the same --nnodes, --master-addr and --master-port, and let"
            " that port through their firewalls",
        )
