"""An inference server that a training starts, keeps running, and ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

from anabatic.core import log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.relaunch import tie_to_parent
from anabatic.infer.remote.inference_servers import InferenceServer
from anabatic.infer.remote.json_client import RequestFailure

START_SECONDS = 1800.0
"""Seconds until a server that was started answers: large models load for minutes, and are compiled then."""
MAX_STARTS = 5
"""Starts after which a server that ends each time is given up."""
_END_SECONDS = 20.0
_POLL_SECONDS = 0.5


class ServerProcess:
    """The process of a command; without one, nothing.

    Args:
        command: as a shell would read its words; None: servers are others' business, or another rank's.
        log_file: gets what it writes.

    Raises:
        ConfigError: there is no such program.
    """

    def __init__(self, command: str | None, log_file: Path) -> None:
        self._command, self._log_file, self._starts = command, log_file, 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.keep_running()
        return self

    def keep_running(self) -> None:
        """Start it, or start it again where it has ended. The same thread calls this each time: it ends with that.

        Raises:
            Failure: it has ended five times.
        """
        if self._command is None or (self._process is not None and self._process.poll() is None):
            return
        if self._process is not None:
            code = self._process.returncode
            if self._starts >= MAX_STARTS:
                what = f"the command of rollout.command has ended {self._starts} times, with exit code {code}"
                raise Failure(what, f"read {self._log_file}")
            log.warn(f"the server has ended with exit code {code}; it is started again ({self._log_file})")
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        try:
            with self._log_file.open("ab") as output:
                self._process = subprocess.Popen(
                    shlex.split(self._command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=tie_to_parent,
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"rollout.command cannot be started: {error}", "try it in a shell") from error

    def wait_until_ready(self, server: InferenceServer) -> None:
        """Wait until the server answers; ranks that have not started it wait as well.

        Raises:
            Failure: it does not for half an hour, or ends time and again.
        """
        since = time.monotonic()
        while True:
            try:
                server.require_ready()
                return
            except RequestFailure as error:
                if time.monotonic() - since > START_SECONDS:
                    raise Failure(f"the server does not answer: {error}", f"read {self._log_file}") from error
            self.keep_running()
            time.sleep(_POLL_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
