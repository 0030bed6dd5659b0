"""Models to chat with: each is served by its own `anabatic serve` on a loopback port."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core.errors import ConfigError, DeviceError
from anabatic.launch.local import device_selection
from anabatic_studio.jobs.job_queue import DeviceSelector, select_free_devices

STOP_SECONDS = 10.0
MAX_SERVERS = 8
_ADDRESS = re.compile(r"at http://127\.0\.0\.1:(\d+)")
_START_PROGRAM = (
    "from anabatic.core import relaunch; relaunch.tie_to_parent(); from anabatic.cli.app import main; main()"
)
"""The server ends with the studio, also when that is killed."""


@dataclass
class ModelServer:
    """One served model.

    Attributes:
        name: in requests.
        model: folder or hub name.
        port: 0 until it answers.
        key: its API key.
    """

    name: str
    model: str
    process: subprocess.Popen[bytes]
    log_file: Path
    key: str
    devices: list[int]
    started: float = field(default_factory=time.time)
    port: int = 0

    def find_port(self) -> int:
        """Return the port from the server's log once it listens; 0 before."""
        if not self.port and self.process.poll() is None:
            try:
                match = _ADDRESS.search(self.log_file.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                return 0
            self.port = int(match[1]) if match else 0
        return self.port

    def to_row(self) -> dict[str, Any]:
        """Return the row that the page shows: state is starting, ready or failed."""
        code = self.process.poll()
        state = "failed" if code is not None else "ready" if self.find_port() else "starting"
        message = self._read_error() if state == "failed" else ""
        return {
            "name": self.name,
            "model": self.model,
            "state": state,
            "devices": self.devices,
            "message": message,
            "started": self.started,
        }

    def close(self) -> None:
        """End the process and remove its log."""
        _end_process(self.process)
        self.log_file.unlink(missing_ok=True)

    def _read_error(self) -> str:
        try:
            lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (errors or lines or [""])[-1][:500]


class ModelServers:
    """The served models of this studio.

    Args:
        folder: for their logs; it exists.
        select_devices: chooses an accelerator.
    """

    def __init__(
        self,
        folder: Path,
        select_devices: DeviceSelector = select_free_devices,
    ) -> None:
        self._folder, self._select_devices = folder, select_devices
        self._reserved_devices: Callable[[], list[int]] = list
        self._servers: dict[str, ModelServer] = {}
        self._lock = threading.Lock()
        # A server is killed when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG): this thread stays.
        self._starter = ThreadPoolExecutor(1, "anabatic-servers")

    def reserve_devices_of(self, list_devices: Callable[[], list[int]]) -> None:
        """Leave out devices that `list_devices` returns: those of running jobs."""
        self._reserved_devices = list_devices

    def list_servers(self) -> list[dict[str, Any]]:
        """Return a row for each server, in the order of their starts."""
        return [server.to_row() for server in list(self._servers.values())]

    def list_devices(self) -> list[int]:
        """Return the devices of running servers."""
        return [
            index
            for server in list(self._servers.values())
            if server.process.poll() is None
            for index in server.devices
        ]

    def start(self, model: str, name: str = "") -> dict[str, Any]:
        """Start to serve a model; return its row.

        Raises:
            ConfigError: there are too many, or no device is free.
        """
        with self._lock:
            name = _make_name(name or model)
            old = self._servers.get(name)
            if old is not None and old.process.poll() is None:
                return old.to_row()
            if old is not None:
                old.close()
            running = [server for server in self._servers.values() if server.process.poll() is None]
            if len(running) >= MAX_SERVERS:
                raise ConfigError(f"{len(running)} models are loaded, the most at a time", "unload one first")
            try:
                selection = self._select_devices("auto", 1, [*self.list_devices(), *self._reserved_devices()])
            except DeviceError as error:
                raise ConfigError(str(error), "stop a job or unload a model") from error
            server = self._starter.submit(self._spawn, name, model, selection).result()
            self._servers[name] = server
            return server.to_row()

    def stop(self, name: str) -> None:
        """Stop a server.

        Raises:
            KeyError: there is none with this name.
        """
        with self._lock:
            server = self._servers.pop(name)
        server.close()

    def find_server(self, name: str) -> ModelServer:
        """Return the server that answers requests for a model.

        Raises:
            KeyError: there is none, or it does not answer yet.
        """
        server = self._servers[name]
        if not server.find_port() or server.process.poll() is not None:
            raise KeyError(name)
        return server

    def close(self) -> None:
        """Stop all servers."""
        with self._lock:
            servers = list(self._servers.values())
            self._servers.clear()
        for server in servers:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
        for server in servers:
            server.close()
        self._starter.shutdown()

    def _spawn(self, name: str, model: str, selection: device_selection.DeviceSelection | None) -> ModelServer:
        key = secrets.token_urlsafe(24)
        log_file = self._folder / f"serve-{len(self._servers)}-{secrets.token_hex(3)}.log"
        command = [
            sys.executable,
            "-c",
            _START_PROGRAM,
            "serve",
            f"{name}={model}",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
        ]
        variables = dict(selection.variables) if selection is not None else {}
        with open(log_file, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ANABATIC_API_KEYS": key, **variables},
            )
        return ModelServer(
            name, model, process, log_file, key, list(selection.indices) if selection is not None else []
        )


def _make_name(text: str) -> str:
    """Return a name for `serve NAME=FOLDER`, where `=` ends it."""
    return text.strip().lstrip("-").replace("=", "-") or "model"


def _end_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
