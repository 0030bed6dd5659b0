"""`anabatic studio`: serves the pages until a signal ends it; running jobs go on."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import uvicorn

from anabatic.config.studio import TOKEN_VARIABLE, StudioJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.paths import RunFolder, lock_folder
from anabatic.infer.server.listening import (
    allowed_host_names,
    ignore_reraised_signal,
    is_loopback,
    make_protocol_class,
    open_listening_socket,
)
from anabatic.monitor.sources.selection import MachineSource
from anabatic.studio.job_queue import JobQueue
from anabatic.studio.model_servers import ModelServers
from anabatic.studio.routes import StudioParts, create_app
from anabatic.studio.run_browser import RunBrowser
from anabatic.studio.store import StudioStore

STATE_FOLDER = ".studio"
"""Folder inside that of the runs: database, recipes and logs of jobs."""
_OTHER_FOLDER_HINT = "name another folder of runs: `anabatic studio RUNS`"
_HEAD_SECONDS = 15.0
_SHUTDOWN_SECONDS = 3


def run(job: StudioJob) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: the port is taken, or the token cannot be read.
        Failure: another studio uses the folder, or it cannot be written.
    """
    root = Path(job.runs).expanduser()
    with (
        open_listening_socket(job.host, job.port) as listening,
        lock_folder(_create_state_folder(root), "studio", _OTHER_FOLDER_HINT),
    ):
        state = root / STATE_FOLDER
        is_open = is_loopback(listening)
        needs_token = job.require_token if job.require_token is not None else not is_open
        token = _read_token(job) if needs_token else ""
        same_user = is_open and job.require_token is None
        port = listening.getsockname()[1]
        parts = _make_parts(job, root, state)
        app = create_app(
            parts, token, same_user, allowed_host_names(job.allowed_hosts, listening), f"anabatic-studio-{port}"
        )
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=30,
            http=make_protocol_class(_HEAD_SECONDS),
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        _log_address(job, listening, token, same_user)
        parts.queue.start()
        try:
            with ignore_reraised_signal():
                uvicorn.Server(config).run(sockets=[listening])
        finally:
            parts.queue.close()
            parts.servers.close()
            num_running = len(parts.store.list_jobs(("running", "stopping")))
            parts.store.close()
    log.info(f"studio ended{f'; {num_running} jobs go on' if num_running else ''}")
    return 0


def _create_state_folder(root: Path) -> Path:
    RunFolder(root).create_folder(_OTHER_FOLDER_HINT)
    state = root / STATE_FOLDER
    (state / "jobs").mkdir(parents=True, exist_ok=True)
    os.chmod(state, 0o700)  # recipes and logs may name private data
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
        if not token:
            raise ConfigError(f"{path}: the first line is empty", "write the token there")
        return token
    return os.environ.get(TOKEN_VARIABLE, "").strip() or secrets.token_urlsafe(24)


def _log_address(job: StudioJob, listening: socket.socket, token: str, same_user: bool) -> None:
    host, port = listening.getsockname()[:2]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    log.info(f"studio at http://{name}:{port}/{f'?token={token}' if token else ''} (Ctrl-C ends; jobs go on)")
    if same_user:
        log.info(f"only your own user is let in; from another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE")
    elif not token:
        log.warn(f"whoever reaches {host}:{port} can run programs as you: leave out --no-require-token")
