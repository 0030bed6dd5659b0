"""A stage for `launch --hosts`: a script in place of `ssh`, a small program in place of our package on the machines."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from anabatic import __version__
from anabatic.config.sections.launch import LaunchSettings
from anabatic.launch.hosts import hostfile, multi_host
from anabatic.launch.hosts.remote_machine import RemoteJob

SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
case $host in
  dead) echo "ssh: connect to host dead port 22: Connection refused" >&2; exit 255 ;;
  stranger) echo "me@stranger: Permission denied (publickey)." >&2; exit 255 ;;
  noisy) echo "Welcome to noisy!" ;;
esac
FAKE_HOST=$host exec sh -c "$last"
"""
JOB = """
import json, os, signal, sys, time
words = sys.argv[1:]
host = os.environ.get("FAKE_HOST") or "ab"[int(words[words.index("--node-rank") + 1])]
with open(words[-1]) as file:
    recipe = file.read()
print(json.dumps({"words": words[:-1], "recipe": recipe, "token": os.environ.get("TOKEN"), "pid": os.getpid()}))
print(f"hello from {host}", file=sys.stderr, flush=True)
sys.stdout.flush()
does = json.loads(os.environ["HF_DOES"]).get(host, 0)
if isinstance(does, dict):  # a code, and the machines that have begun before
    while not all(os.path.exists(os.path.join(os.environ["HF_FOLDER"], one)) for one in does["after"]):
        time.sleep(0.01)
    does = does["code"]
if does != "wait":
    sys.exit(does)
def leave(code):
    print(f"{host} saves", file=sys.stderr, flush=True)
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: leave(143))
signal.signal(signal.SIGINT, lambda *_: leave(130))
open(os.path.join(os.environ["HF_FOLDER"], host), "w").write(str(os.getpid()))
time.sleep(100)
"""


class Site:
    """Machines that are all this one, and a job of theirs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(SSH)
        (folder / "bin" / "ssh").chmod(0o755)
        self.package(__version__)
        (folder / "pids").mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        monkeypatch.setattr(multi_host, "_GRACE_SECONDS", 0.1)

    def package(self, version: str) -> None:
        """Give the machines a package of that version."""
        package = self.folder / "site" / "anabatic"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (package / "__main__.py").write_text(JOB)

    def run(self, text: str, does: dict[str, object], nodes: tuple[int, int] | None = None, **more: object) -> int:
        """Run the job on the machines of a text; `does` maps a machine to what it does: see JOB."""
        found = hostfile.parse_hostfile(text, "hosts")
        least, most = nodes or (len(found), len(found))
        variables = {"PYTHONPATH": str(self.folder / "site"), "TOKEN": "s3cret", "HF_DOES": json.dumps(does)}
        variables["HF_FOLDER"] = str(self.folder / "pids")
        launch = LaunchSettings(nproc=2, min_nodes=least, max_nodes=most, master_addr="127.0.0.1", master_port=29713)
        given: dict[str, object] = {"nproc": None, "python": sys.executable, "folder": str(self.folder), **more}
        job = RemoteJob("classify train", "seed: 1\n", launch, environment=variables, out=self.folder / "out", **given)  # type: ignore[arg-type]
        return multi_host.run(found, job)

    def begun(self, host: str) -> bool:
        """Whether the job waits on a machine."""
        path = self.folder / "pids" / host
        return path.exists() and path.read_text() != ""

    def leave(self, host: str) -> None:
        """Ask the job of a machine to end."""
        os.kill(int((self.folder / "pids" / host).read_text()), signal.SIGTERM)

    def cut(self, host: str) -> None:
        """Kill the connection to a machine."""
        far = psutil.Process(int((self.folder / "pids" / host).read_text())).parent()
        assert far is not None
        far.kill()

    def gone(self, host: str) -> bool:
        """Whether the job that waited has ended."""
        return not psutil.pid_exists(int((self.folder / "pids" / host).read_text()))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.01)


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[None]:
    """Do something in a thread."""
    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()
