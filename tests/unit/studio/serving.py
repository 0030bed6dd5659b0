"""Studios on free ports of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from anabatic.config.serve import LOCAL_HOSTS
from anabatic.monitor.sources.selection import MachineSource
from anabatic_studio.jobs.job_queue import JobQueue
from anabatic_studio.jobs.model_servers import ModelServers
from anabatic_studio.jobs.store import StudioStore
from anabatic_studio.routes import StudioParts, create_app
from anabatic_studio.run_browser import RunBrowser
from anabatic_studio.settings import StudioJob
from unit.web_server import listening

TOKEN = "right-token"


@dataclass
class RunningStudio:
    """A studio that answers."""

    url: str
    root: Path
    parts: StudioParts

    def get(self, path: str) -> Any:
        """Return the JSON at a path."""
        answer = httpx2.get(self.url + path, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """Send JSON, return JSON."""
        answer = httpx2.post(self.url + path, json=body, timeout=120)
        assert answer.status_code == status, answer.text
        return answer.json()

    def wait_for(self, job: int, *states: str, seconds: float = 120) -> dict[str, Any]:
        """Return a job once it is in one of these states."""
        end = time.monotonic() + seconds
        while True:
            row = next(row for row in self.get("/api/jobs")["jobs"] if row["id"] == job)
            if row["state"] in states:
                return row
            assert time.monotonic() < end, (row, self.get(f"/api/jobs/{job}/log")["text"][-2000:])
            time.sleep(0.1)

    def wait_until(self, true: Callable[[], Any], seconds: float = 120) -> None:
        """Wait for a condition."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.1)


@contextmanager
def studio(root: Path, token: str = "", port: int = 0, **more: Any) -> Iterator[RunningStudio]:
    """Serve the runs of a folder; no `token`: for everybody; `port` 0 is a free one; `more`: arguments of the queue."""
    state = root / ".studio"
    state.mkdir(exist_ok=True)
    store = StudioStore(state / "studio.sqlite3")
    servers = ModelServers(state)
    queue = JobQueue(store, state, **more)
    servers.reserve_devices_of(queue.list_assigned_devices)
    parts = StudioParts(StudioJob(), root, store, queue, servers, RunBrowser(root), MachineSource())
    app = create_app(parts, token, list(LOCAL_HOSTS), "studio-test")
    queue.start()
    try:
        with listening(app, port) as url:
            yield RunningStudio(url, root, parts)
    finally:
        queue.close()
        servers.close()
        store.close()
