"""`anabatic studio`: serves the pages until a signal ends it; running jobs go on."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import uvicorn

from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.paths import RunFolder, lock_folder, make_write_error
from anabatic.infer.server.listening import (
    allowed_host_names,
    can_others_read,
    ignore_reraised_signal,
    make_server_config,
    open_listening_socket,
    warn_of_open_secret,
)
from anabatic.monitor.sources.selection import MachineSource
from anabatic_studio.jobs.job_queue import JobQueue
from anabatic_studio.jobs.model_servers import ModelServers
from anabatic_studio.jobs.store import StudioStore
from anabatic_studio.routes import StudioParts, create_app
from anabatic_studio.run_browser import RunBrowser
from anabatic_studio.settings import TOKEN_VARIABLE, StudioJob

STATE_FOLDER = ".studio"
"""Folder inside that of the runs: database, recipes and logs of jobs."""
ADDRESS_FILE = "address"
"""File in it with the address that lets its reader in, for the owner alone, while the studio runs."""
_OTHER_FOLDER_HINT = "name another folder of runs: `anabatic studio RUNS`"
_HEAD_SECONDS = 15.0
_STDERR = 2
_SHUTDOWN_SECONDS = 3


def run(job: StudioJob) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port is taken, the token cannot be read, or the state belongs to another user.
        Failure: another studio uses the folder, or it cannot be written.
    """
    root = Path(job.runs).expanduser()
    with (
        open_listening_socket(job.host, job.port) as listening,
        lock_folder(_create_state_folder(root), "studio", _OTHER_FOLDER_HINT),
    ):
        state = root / STATE_FOLDER
        token = _read_token(job) if job.require_token else ""
        port = listening.getsockname()[1]
        parts = _make_parts(job, root, state)
        hosts = allowed_host_names(job.allowed_hosts, listening)
        app = create_app(parts, token, hosts, f"anabatic-studio-{port}")
        config = make_server_config(app, _HEAD_SECONDS, _SHUTDOWN_SECONDS)
        _tell_address(listening, token, state / ADDRESS_FILE)
        parts.queue.start()
        try:
            with ignore_reraised_signal():
                uvicorn.Server(config).run(sockets=[listening])
        finally:
            parts.queue.close()
            parts.servers.close()
            num_running = len(parts.store.list_jobs(("running", "stopping")))
            parts.store.close()
            (state / ADDRESS_FILE).unlink(missing_ok=True)
    log.info(f"studio ended{f'; {num_running} jobs go on' if num_running else ''}")
    return 0


def _create_state_folder(root: Path) -> Path:
    RunFolder(root).create_folder(_OTHER_FOLDER_HINT)
    state = root / STATE_FOLDER
    try:
        state.mkdir(mode=0o700, exist_ok=True)
        owner = state.stat().st_uid
        if owner != os.getuid():  # its queue would be run as this user
            raise ConfigError(f"{state} belongs to the user with id {owner}, not to {os.getuid()}", _OTHER_FOLDER_HINT)
        os.chmod(state, 0o700)  # recipes and logs may name private data
        (state / "jobs").mkdir(exist_ok=True)
    except OSError as error:
        raise make_write_error(state, error, _OTHER_FOLDER_HINT) from error
    return state


def _make_parts(job: StudioJob, root: Path, state: Path) -> StudioParts:
    store = StudioStore(state / "studio.sqlite3")
    servers = ModelServers(state / "jobs")
    queue = JobQueue(store, state / "jobs", job.concurrent_jobs, reserved_devices=servers.list_devices)
    servers.reserve_devices_of(queue.list_assigned_devices)
    return StudioParts(job, root, store, queue, servers, RunBrowser(root), MachineSource())


def _read_token(job: StudioJob) -> str:
    if job.token_file is not None:
        path = Path(job.token_file).expanduser()
        try:
            token = path.read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: cannot be read: {error}", "give a text file with the token in its first line"
            ) from error
        warn_of_open_secret(path)
        if not token:
            raise ConfigError(f"{path}: the first line is empty", "write the token there")
        return token
    return os.environ.get(TOKEN_VARIABLE, "").strip() or secrets.token_urlsafe(24)


def _tell_address(listening: socket.socket, token: str, file: Path) -> None:
    """Print the address; its token only where no other user reads it, such as in the log of a batch job."""
    host, port = listening.getsockname()[:2]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{port}/"
    whole = f"{address}?token={token}" if token else address
    _write_private_file(file, f"{whole}\n")
    is_shown = not token or not can_others_read(os.fstat(_STDERR).st_mode)
    log.info(f"studio at {whole if is_shown else address} (Ctrl-C ends; jobs go on)")
    if not is_shown:
        log.info(f"others may read this log, so the address with the token is in {file}")
    if not token:
        log.warn(f"whoever reaches {host}:{port} can run programs as you: leave out --no-require-token")


def _write_private_file(path: Path, text: str) -> None:
    try:
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise make_write_error(path, error, _OTHER_FOLDER_HINT) from error
