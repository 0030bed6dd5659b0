"""The processes of a pipeline's stages: started one after another, or forked from one that has imported torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from anabatic.core import log, relaunch
from anabatic.core.errors import Failure
from anabatic.core.process_info import wait_for_exit
from anabatic.core.stop_signals import FIRST_SIGNAL, STOP_NOW, STOP_SIGNALS, StopRequest, is_supervised
from anabatic.launch.local import forkserver
from anabatic.launch.local.forkserver import ForkedWorker, Forkserver
from anabatic.recipes.pipeline.stage_plan import StagePlan


def can_be_forked(stage: StagePlan) -> bool:
    """Return whether a stage computes in its own process, on the CPU."""
    device = getattr(stage.job, "device", None)
    return device is not None and getattr(device, "nproc", 1) == 1 and forkserver.is_forkable(device.type)


def list_preload_modules(stages: Sequence[StagePlan]) -> str:
    """Return the modules to import before stages are forked, with commas; empty: importing once saves nothing."""
    modules = [stage.command.recipe.partition(":")[0] for stage in stages if can_be_forked(stage)]
    return ",".join(dict.fromkeys([*modules, "anabatic.cli.app"])) if len(modules) > 1 else ""


class StageProcess:
    """Context manager that holds the signal handlers; `run` starts a child and waits for it.

    Args:
        program: how to start `anabatic`.
        preload: modules to import once for all stages that can be forked, while the first ones run; empty: none.
    """

    def __init__(self, program: Sequence[str], preload: str) -> None:
        self.program = list(program)
        self._preload = preload if self.program == list(relaunch.PROGRAM_COMMAND) else ""
        self._forkserver: Forkserver | None = None
        self.exit_code_if_interrupted = 0
        """128 + the first signal we received; 0 when none came."""
        self._stop_request = StopRequest(supervised=is_supervised())
        self._signal_forwarded = False
        self._child_process: subprocess.Popen[bytes] | ForkedWorker | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StageProcess:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: so do we
                self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        if self._preload:
            self._forkserver = Forkserver(self._preload)
        return self

    def __exit__(self, *unused: object) -> None:
        if self._forkserver is not None:
            self._forkserver.close()
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], recipe: Path, can_fork: bool) -> int:
        """Run a command on a recipe with its output going straight through; return its exit code.

        A child killed by a signal has 128 + the signal, as shells count.

        Raises:
            Failure: the program cannot be started.
        """
        if self.exit_code_if_interrupted:
            return self.exit_code_if_interrupted
        arguments = [*command, "-c", str(recipe)]
        variables = {**relaunch.build_child_environment(), relaunch.SUPERVISED_VARIABLE: "1"}
        forked = self._forkserver.fork_worker(arguments, variables) if self._forkserver and can_fork else None
        self._child_process = forked or self._start(arguments, variables)
        self._forward_signal()  # a signal may have come between the test above and the start
        code = wait_for_exit(self._child_process)
        self._child_process = None
        return code if code >= 0 else 128 - code

    def _start(self, arguments: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [*self.program, *arguments], stdin=subprocess.DEVNULL, start_new_session=True, env=variables
            )
        except OSError as error:
            hint = "is the environment whole?"
            raise Failure(f"cannot start {self.program[0]}: {error.strerror}", hint) from error

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        what = self._stop_request.classify_signal(number)
        if what == STOP_NOW and self._child_process is not None and self._child_process.returncode is None:
            for one in psutil.Process(self._child_process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            os.killpg(self._child_process.pid, signal.SIGKILL)
        if what != FIRST_SIGNAL:
            return
        self.exit_code_if_interrupted = 128 + number
        if self._child_process is not None:
            log.info(f"{signal.Signals(number).name}: waiting for the stage to save; a second Ctrl-C kills it")
        self._forward_signal()

    def _forward_signal(self) -> None:
        """Send the first signal we got to the child, once (`send_signal` spares one that is known to have ended)."""
        if self.exit_code_if_interrupted and self._child_process is not None and not self._signal_forwarded:
            self._signal_forwarded = True
            number = self.exit_code_if_interrupted - 128
            self._child_process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
