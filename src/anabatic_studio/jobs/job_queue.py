"""Runs queued jobs one after the other on the free devices of this machine.

A job is a process of its own session: it goes on when the studio ends, and a studio that starts later finds it again by
its process id and start time.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from anabatic.config.loading import settings
from anabatic.core import log, process_info
from anabatic.core.errors import AnabaticError, ConfigError, DeviceError
from anabatic.core.paths import write_atomic
from anabatic.launch.local import device_selection
from anabatic_studio import pipelines
from anabatic_studio.jobs import store as states
from anabatic_studio.jobs.store import JobRecord, StudioStore

POLL_SECONDS = 0.5
MAX_LOG_BYTES = 64 << 10
EXIT_STOPPED = (130, 143)
"""Exit codes of a job that a signal stopped."""
_TERMINAL_VARIABLES = ("COLUMNS", "LINES")

DeviceSelector = Callable[[str, int, list[int]], device_selection.DeviceSelection | None]
"""(device.type, number of devices, devices of other jobs) -> devices; None: the job runs on the processor."""


def select_free_devices(device_type: str, count: int, reserved: list[int]) -> device_selection.DeviceSelection | None:
    """Return free accelerators for a job; None if it runs on the processor.

    Raises:
        DeviceError: there are too few free ones now.
    """
    return device_selection.select_devices(device_type, count, os.environ, reserved=reserved)


class JobQueue:
    """The queue and its processes; one thread starts and watches jobs.

    Args:
        folder: for recipes, logs and exit codes of jobs; it exists.
        concurrent_jobs: jobs at the same time on the processor.
        select_devices: chooses accelerators.
        reserved_devices: returns devices that others of this studio use.
    """

    def __init__(
        self,
        store: StudioStore,
        folder: Path,
        concurrent_jobs: int = 1,
        select_devices: DeviceSelector = select_free_devices,
        reserved_devices: Callable[[], list[int]] = list,
    ) -> None:
        self._store, self._folder = store, folder
        self._concurrent_jobs = concurrent_jobs
        self._select_devices, self._reserved_devices = select_devices, reserved_devices
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="anabatic-queue", daemon=True)

    def start(self) -> None:
        """Find jobs that still run, and begin to start queued ones."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching; jobs go on."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(10)

    def submit_job(self, command: str, text: str, name: str = "") -> JobRecord:
        """Append a job.

        Args:
            text: YAML of its settings.

        Raises:
            ConfigError: there is no such command, or a setting is wrong.
        """
        job = build_job(command, text)
        out = str(getattr(job, "out", None) or "")
        record = self._store.add_job(command, name or Path(out).name or command, text, out, str(Path.cwd()))
        self._wake.set()
        return record

    def stop_job(self, job_id: int) -> JobRecord:
        """Stop a job: a queued one is not started; a running one saves and ends, at the second request at once.

        Raises:
            KeyError: there is no such job.
            ConfigError: it has ended.
        """
        with self._lock:
            record = self._store.get_job(job_id)
            if record.state == states.QUEUED:
                return self._store.update_job(record, state=states.STOPPED, ended=time.time(), message="")
            if record.state not in states.ACTIVE_STATES:
                raise ConfigError(f"job {job_id} has ended", "choose a running job")
            if record.state == states.RUNNING:
                _signal_process(record, signal.SIGTERM)
                return self._store.update_job(record, state=states.STOPPING, message="")
            _kill_session(record)
            return record

    def restart_job(self, job_id: int) -> JobRecord:
        """Queue an ended job again with the same settings: a training continues from its last checkpoint.

        Raises:
            KeyError: there is no such job.
            ConfigError: it has not ended.
        """
        with self._lock:
            record = self._store.get_job(job_id)
            if record.state not in states.ENDED_STATES:
                raise ConfigError(f"job {job_id} is {record.state}", "stop it first")
            self._get_exit_file(job_id).unlink(missing_ok=True)
            changed = self._store.update_job(
                record, state=states.QUEUED, exit_code=None, message="", pid=0, process_start=0, devices=[], ended=None
            )
        self._wake.set()
        return changed

    def remove_job(self, job_id: int) -> None:
        """Remove an ended or queued job from the list; what it wrote stays.

        Raises:
            KeyError: there is no such job.
            ConfigError: it runs.
        """
        with self._lock:
            record = self._store.get_job(job_id)
            if record.state in states.ACTIVE_STATES:
                raise ConfigError(f"job {job_id} is {record.state}", "stop it first")
            self._store.remove_job(job_id)
            for path in (self._get_exit_file(job_id), self._get_recipe_file(job_id), self.get_log_file(job_id)):
                path.unlink(missing_ok=True)

    def move_job(self, job_id: int, before: int | None) -> None:
        """Move a queued job before another one, or to the end.

        Raises:
            KeyError: there is no such job.
        """
        with self._lock:
            record = self._store.get_job(job_id)
            others = [other for other in self._store.list_jobs() if other.id != job_id]
            if before is None:
                position = max((other.position for other in others), default=0.0) + 1
            else:
                index = next((index for index, other in enumerate(others) if other.id == before), None)
                if index is None:
                    raise KeyError(before)
                lower = others[index - 1].position if index else others[0].position - 2
                position = (lower + others[index].position) / 2
            self._store.update_job(record, position=position)
        self._wake.set()

    def get_log_file(self, job_id: int) -> Path:
        """Return the file with what a job prints."""
        return self._folder / f"{job_id}.log"

    def read_log(self, job_id: int, offset: int) -> tuple[str, int]:
        """Return what a job printed after `offset` (at most the last 64 KiB), and the new offset.

        Raises:
            KeyError: there is no such job.
        """
        self._store.get_job(job_id)
        try:
            with open(self.get_log_file(job_id), "rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = offset if 0 <= offset <= size else 0
                start = max(start, size - MAX_LOG_BYTES)
                file.seek(start)
                data = file.read(MAX_LOG_BYTES)
        except FileNotFoundError:
            return "", 0
        # A character may be half written: its bytes are read with the next ones.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)
        pending = len(decoder.getstate()[0])
        return text, start + len(data) - pending

    def list_assigned_devices(self) -> list[int]:
        """Return the devices of running jobs."""
        return [index for record in self._store.list_jobs(states.ACTIVE_STATES) for index in record.devices]

    def poll_jobs(self) -> None:
        """Record ended jobs and start those for which there are devices."""
        with self._lock:
            for record in self._store.list_jobs(states.ACTIVE_STATES):
                self._check_running(record)
            for record in self._store.list_jobs((states.QUEUED,)):
                if not self._try_start(record):
                    break  # the order is kept: a large job at the head must not wait forever behind small ones

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self.poll_jobs()
            except Exception as error:  # the queue must survive a full disk or an unreadable device
                log.warn(f"the queue failed, it tries again: {error!r}")
                self._wake.wait(5)
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _check_running(self, record: JobRecord) -> None:
        with suppress(ChildProcessError):  # started by an earlier studio
            os.waitpid(record.pid, os.WNOHANG)
        if _is_running(record):
            return
        code = self._read_exit_code(record.id)
        if record.state == states.STOPPING and code in (None, 128 + signal.SIGKILL):
            state, message = states.STOPPED, "killed"
        elif code is None:
            state, message = states.LOST, "the process ended without an exit code: killed, or the machine restarted"
        elif code == 0:
            state, message = states.FINISHED, ""
        elif code in EXIT_STOPPED:
            state, message = states.STOPPED, ""
        else:
            state, message = states.FAILED, self._find_error_line(record.id)
        self._store.update_job(record, state=state, exit_code=code, ended=time.time(), message=message, devices=[])

    def _read_exit_code(self, job_id: int) -> int | None:
        try:
            return int(self._get_exit_file(job_id).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _find_error_line(self, job_id: int) -> str:
        text, _ = self.read_log(job_id, 0)
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        return lines[-1].removeprefix("error: ")[:500] if lines else ""

    def _try_start(self, record: JobRecord) -> bool:
        """Start a job; False: it has to wait."""
        try:
            job = build_job(record.command, record.recipe)
            selection = self._choose_devices(record.command, job)
        except DeviceError as error:
            self._store.update_job(record, message=str(error))
            return False
        except AnabaticError as error:
            self._store.update_job(record, state=states.FAILED, ended=time.time(), message=str(error))
            return True
        if selection is None and self._count_processor_jobs() >= self._concurrent_jobs:
            self._store.update_job(record, message="")
            return False
        self._start(record, selection)
        return True

    def _choose_devices(self, command: str, job: Any) -> device_selection.DeviceSelection | None:
        device = pipelines.find_device_settings(job) if command == "run" else getattr(job, "device", None)
        if device is None:
            return None
        reserved = [*self.list_assigned_devices(), *self._reserved_devices()]
        return self._select_devices(device.type, max(1, device.nproc), reserved)

    def _count_processor_jobs(self) -> int:
        return sum(not record.devices for record in self._store.list_jobs(states.ACTIVE_STATES))

    def _start(self, record: JobRecord, selection: device_selection.DeviceSelection | None) -> None:
        recipe, log_file = self._get_recipe_file(record.id), self.get_log_file(record.id)
        write_atomic(recipe, record.recipe)
        self._get_exit_file(record.id).unlink(missing_ok=True)
        exit_file = str(self._get_exit_file(record.id).absolute())
        command = [sys.executable, "-m", "anabatic_studio.jobs.job_process", exit_file, record.folder]
        command += [sys.executable, "-m", "anabatic", *record.command.split(), "-c", str(recipe.absolute())]
        variables = dict(selection.variables) if selection is not None else {}
        environ = {name: value for name, value in os.environ.items() if name not in _TERMINAL_VARIABLES}
        pid = os.posix_spawn(
            sys.executable,
            command,
            {**environ, "PYTHONUNBUFFERED": "1", **variables},
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log_file), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self._store.update_job(
            record,
            state=states.RUNNING,
            pid=pid,
            process_start=process_info.read_start_time(pid),
            devices=list(selection.indices) if selection is not None else [],
            started=time.time(),
            message="",
        )

    def _get_exit_file(self, job_id: int) -> Path:
        return self._folder / f"{job_id}.exit"

    def _get_recipe_file(self, job_id: int) -> Path:
        return self._folder / f"{job_id}.yaml"


def build_job(command: str, text: str) -> Any:
    """Return the settings of a job from YAML.

    Raises:
        ConfigError: there is no such command, the text is not YAML, or a setting is wrong.
    """
    return settings.parse_job(command, text, "recipe")


def _is_running(record: JobRecord) -> bool:
    return process_info.is_alive(record.pid, record.process_start)


def _signal_process(record: JobRecord, number: int) -> None:
    if _is_running(record):
        with suppress(ProcessLookupError):
            os.kill(record.pid, number)


def _kill_session(record: JobRecord) -> None:
    """Kill a job and all its processes, also those with a session of their own (the agent of several processes)."""
    if not _is_running(record):
        return
    for pid in [*reversed(_list_descendants(record.pid)), record.pid]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _list_descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
