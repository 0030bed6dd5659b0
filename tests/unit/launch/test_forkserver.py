"""Workers are forked from a process that has imported what they need, and end as any other process."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from anabatic.launch.local import forkserver
from anabatic.launch.local.forkserver import Forkserver
from anabatic.launch.local.simulated_torchrun import list_program_imports
from unit.launch.stage import until


@pytest.fixture(scope="module")
def server() -> Iterator[Forkserver]:
    """One that imports next to nothing."""
    made = Forkserver("json")
    yield made
    made.close()


def variables(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


@pytest.mark.process
def test_a_worker_runs_the_command_with_its_own_variables_and_code(server: Forkserver, tmp_path: Path) -> None:
    """The code is also left in the folder of reports, as by any worker."""
    worker = server.fork_worker(["config", "show", "nope"], variables(RANK="3", ANABATIC_REPORTS=str(tmp_path)))
    assert worker is not None
    assert worker.wait(timeout=240) == 2
    assert (tmp_path / "rank-3.code").read_text() == "2"
    assert "nope" in (tmp_path / "rank-3.error").read_text()


@pytest.mark.process
def test_a_worker_is_named_killed_and_counted_as_killed(server: Forkserver, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # reading it lasts for ever
    worker = server.fork_worker(["config", "check", str(pipe)], variables(RANK="1"))
    assert worker is not None and worker.poll() is None
    while psutil.Process(worker.pid).name() != "python rank 1":
        time.sleep(0.01)
    os.killpg(worker.pid, signal.SIGKILL)  # its own group, as the agent ends it
    assert worker.wait(timeout=240) == -signal.SIGKILL == worker.poll()


@pytest.mark.process
def test_a_worker_can_be_signalled_at_once(server: Forkserver) -> None:
    """The agent signals the group, which exists when the worker's number is known."""
    for _ in range(20):
        worker = server.fork_worker(["--version"], variables())
        assert worker is not None
        os.killpg(worker.pid, signal.SIGKILL)
        assert worker.wait(60) in (-signal.SIGKILL, 0)


@pytest.mark.process
def test_a_worker_keeps_its_number_until_its_end_is_known(server: Forkserver) -> None:
    """The agent signals the groups of workers that it takes for running: their numbers must be theirs."""
    worker = server.fork_worker(["--version"], variables())
    assert worker is not None
    process = psutil.Process(worker.pid)
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    time.sleep(0.5)  # a server that reaps by itself has done so by now
    os.killpg(worker.pid, signal.SIGTERM)
    assert worker.wait(60) == 0
    until(lambda: not process.is_running())


@pytest.mark.process
def test_a_worker_may_end_before_its_number_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Forkserver("json")
    read = server._read_messages

    def read_late(timeout: float | None) -> bool:
        until(lambda: server._socket.recv(65536, socket.MSG_PEEK).count(b"\n") == 2)
        monkeypatch.undo()
        return read(timeout)

    monkeypatch.setattr(server, "_read_messages", read_late)
    worker = server.fork_worker(["--version"], variables())
    assert worker is not None and worker.wait(60) == 0
    server.close()


@pytest.mark.process
def test_workers_end_with_their_server(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    server = Forkserver("json")
    worker = server.fork_worker(["config", "check", str(pipe)], variables(RANK="0", ANABATIC_REPORTS=str(tmp_path)))
    assert worker is not None
    while not (tmp_path / "rank-0.beat").exists():
        time.sleep(0.01)
    server._process.kill()
    assert worker.wait(timeout=240) == -signal.SIGKILL
    assert server.fork_worker([], variables()) is None
    server.close()


@pytest.mark.process
def test_a_server_that_cannot_import_forks_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    server = Forkserver("anabatic.nothing_of_that_name")
    assert server.fork_worker([], variables()) is None
    server.close()
    assert "nothing_of_that_name" in capfd.readouterr().err


def test_training_on_a_real_accelerator_does_not_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forkserver.list_preload_modules("cpu", "a.b").startswith("a.b,")
    for device in ("npu", "cuda", "mps"):
        assert not forkserver.list_preload_modules(device, "a.b")
    monkeypatch.setattr(forkserver, "_ACCELERATOR_FILES", ("null",))  # a device that is there
    assert not forkserver.list_preload_modules("auto", "a.b")


def test_training_on_simulated_devices_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forkserver.SIMULATION_VARIABLE, "some machine")
    for device in ("auto", "npu"):
        assert forkserver.list_preload_modules(device, "a.b").startswith("a.b,")
    assert not forkserver.list_preload_modules("cuda", "a.b")


def run_program(server: Forkserver, folder: Path, text: str, *words: str, **more: str) -> int:
    program = folder / "program.py"
    program.write_text(text, encoding="utf-8")
    worker = server.fork_worker([str(program), *words], variables(**more), is_program=True)
    assert worker is not None
    return worker.wait(timeout=240)


@pytest.mark.process
def test_a_program_runs_as_with_its_own_python(server: Forkserver, tmp_path: Path) -> None:
    """Arguments, variables, its folder for imports, a main module whose classes can be pickled, and its exit code."""
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n", encoding="utf-8")
    text = """
import os, pickle, sys
import neighbour

class Own:
    pass

pickle.loads(pickle.dumps(Own()))
assert __name__ == "__main__" and sys.argv[1:] == ["--word"] and os.environ["RANK"] == "5"
sys.exit(neighbour.VALUE)
"""
    assert run_program(server, tmp_path, text, "--word", RANK="5") == 7


@pytest.mark.process
def test_a_program_that_fails_shows_its_own_lines(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = Forkserver("json")
    assert run_program(server, tmp_path, "def broken():\n    raise ValueError('no')\n\nbroken()\n") == 1
    server.close()
    printed = capfd.readouterr().err
    assert printed.startswith("Traceback (most recent call last):\n") and printed.endswith("ValueError: no\n")
    assert "forkserver" not in printed and "runpy" not in printed and printed.count("File ") == 2


def test_what_a_program_imports_first_is_found() -> None:
    source = '''"""Docstring."""
from __future__ import annotations
import os, torch
from transformers import AutoModel, AutoTokenizer
import mine
os.environ["X"] = "1"
import peft
'''
    found = ["torch", "transformers:AutoModel", "transformers:AutoTokenizer", "transformers.modeling_utils"]
    assert list_program_imports(source) == found
    assert list_program_imports("import torch\ndef (") == []
