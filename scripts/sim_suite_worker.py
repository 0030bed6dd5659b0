"""Inside a simulation: run test files, each in a process forked from one that has imported torch and torch_npu.

A job is a line of JSON on stdin, its answer a line on stdout. Results are lines of JSON in the job's file: one when a
test starts, one when it has ended, so that a process that dies or hangs costs one test, not a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import unittest
import zlib
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

PRELOAD = (
    "torch",
    "torch_npu",
    "torch_npu.testing.testcase",
    "torch.testing._internal.common_modules",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
    "torch.distributed.fsdp",
    "scipy",
    "pytest",
    "_pytest.unittest",
    "_pytest.assertion.rewrite",
)
"""What most files import, 5 s of CPU time for each of them. None of it may start the device: files are forked."""
ERROR_CHARACTERS = 1500
MOST_RESTARTS = 40
GRACE_SECONDS = 30
"""How much longer than the limit of a test a process may be silent: collecting a large file takes that."""
COLLECT_SECONDS = 240


class _TestTimeout(BaseException):
    """Not an Exception: tests that expect any error must not swallow it."""


def _raise_timeout(number: int, frame: FrameType | None) -> NoReturn:
    raise _TestTimeout("the test ran longer than its limit")


class Recorder:
    """A pytest plugin: drops tests that have a result, limits each test, and writes what becomes of it."""

    def __init__(self, results: TextIO, done: set[str], seconds: float, most: int, only: str) -> None:
        self._results, self._done, self._seconds, self._most, self._only = results, done, seconds, most, only
        self._started = 0.0
        self._outcome: dict[str, Any] = {}

    def write(self, **values: Any) -> None:
        """Write one line, at once."""
        self._results.write(json.dumps(values) + "\n")
        self._results.flush()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Choose the tests: a sample that does not depend on the order, without those that have a result."""
        items[:] = [item for item in items if _has_arguments(item)]
        total = len(items)
        chosen = items
        if 0 < self._most < total:
            ranked = sorted(items, key=lambda item: zlib.crc32(_short_name(item.nodeid).encode()))
            kept = {item.nodeid for item in ranked[: self._most]}
            chosen = [item for item in items if item.nodeid in kept]
        self.write(collected=total, chosen=len(chosen))
        items[:] = [item for item in chosen if _short_name(item.nodeid) not in self._done and self._only in item.nodeid]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say that a test starts; its time runs."""
        self._started, self._outcome = time.monotonic(), {}
        self.write(start=_short_name(nodeid))
        signal.signal(signal.SIGALRM, _raise_timeout)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the worst of set-up, call and clean-up."""
        if report.failed or (report.skipped and self._outcome.get("outcome") != "failed"):
            text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext
            outcome = "skipped" if report.skipped else "failed"
            if "_TestTimeout" in text:
                outcome = "timeout"
            self._outcome = {"outcome": outcome, "error": text[-ERROR_CHARACTERS:]}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write the result."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = round(time.monotonic() - self._started, 2)
        self.write(test=_short_name(nodeid), seconds=seconds, **(self._outcome or {"outcome": "passed"}))

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is one failure."""
        if report.failed or (report.skipped and report.nodeid):
            outcome = "failed" if report.failed else "skipped"
            text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.write(test="(collect)", outcome=outcome, seconds=0, error=text[-ERROR_CHARACTERS:])


def _has_arguments(item: Any) -> bool:
    """False for a function of a program, such as `def test_step(mesh)`, that no test runner could call."""
    info = item._fixtureinfo
    return all(name in info.name2fixturedefs or name == "request" for name in info.argnames)


def _short_name(nodeid: str) -> str:
    return nodeid.split("::", 1)[-1]


def _read_results(path: Path) -> tuple[set[str], str]:
    """Return the tests with a result, and the one that had started last without one."""
    done, running = set(), ""
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):  # torn by a killed process
            row = json.loads(line)
            running = row.get("start", running)
            if "test" in row:
                done.add(row["test"])
    return done, running if running not in done else ""


class WarmProcess(multiprocessing.get_context("forkserver").Process):  # type: ignore[name-defined,misc]
    """A rank that a test spawns: forked from a server that has imported torch and nothing else."""

    def start(self) -> None:
        """Start with the variables of this process, as `spawn` does: the server has others."""
        self._variables = dict(os.environ)
        super().start()

    def _bootstrap(self, *args: Any, **kwargs: Any) -> int:
        os.environ.clear()
        os.environ.update(self._variables)
        return int(super()._bootstrap(*args, **kwargs))


def _start_server() -> int:
    """Start the server that ranks are forked from; return its process id."""
    forkserver.set_forkserver_preload(["torch", "torch_npu", "torch_npu.testing.testcase"])
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server.ensure_running()
    server.ensure_running = lambda: None  # the processes of tests use it as well, and cannot wait for it
    return int(server._forkserver_pid)


def _spawn_warm() -> None:
    """Let `spawn` mean the server: each rank would import torch anew.

    It does not import torch itself: the file may set variables that torch reads then.
    """
    original = multiprocessing.get_context
    warm = original("forkserver")
    warm.Process = WarmProcess  # type: ignore[assignment,misc]

    def get_context(method: str | None = None) -> Any:
        return warm if method == "spawn" else original(method)

    for module in (multiprocessing, sys.modules.get("torch.multiprocessing")):
        if module:  # torch takes the name from multiprocessing when it is imported
            setattr(module, "get_context", get_context)  # noqa: B010 - mypy rejects the assignment


def _end_ranks(server: int) -> None:
    """Kill what a test has left of its ranks: they are children of the server."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = status.read_text().rpartition(")")[2].split()
            if int(words[1]) == server:
                os.kill(int(status.parent.name), signal.SIGKILL)


CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
"""linux/sched.h, linux/sockios.h, linux/if.h."""


def _isolate_network() -> None:
    """Give this machine a loopback of its own where we have the right to: many tests use port 29500."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        sys.stderr.write("files share the ports of this machine: no right to a network namespace\n")
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", IFF_UP_RUNNING, b""))


def _collect_like_unittest() -> None:
    """Let pytest ask a class for an instance with one of its tests: some have no `runTest`, for which pytest asks."""
    from _pytest import unittest as pytest_unittest

    original = pytest_unittest.UnitTestCase.newinstance

    def newinstance(self: Any) -> Any:
        try:
            return original(self)
        except AttributeError:
            return self.obj(unittest.defaultTestLoader.getTestCaseNames(self.obj)[0])

    pytest_unittest.UnitTestCase.newinstance = newinstance  # type: ignore[method-assign]


def _run_tests(job: dict[str, Any]) -> int:
    """In the forked process: the tests of one file."""
    import pytest

    _collect_like_unittest()

    file, results = Path(job["file"]), Path(job["results"])
    os.chdir(file.parent)
    if 'os.environ["BACKEND"]' in file.read_text(encoding="utf-8", errors="replace"):
        os.environ |= {"BACKEND": "hccl", "INIT_METHOD": "env://", "TEMP_DIR": tempfile.mkdtemp(), "WORLD_SIZE": "2"}
    for folder in (file.parent, Path(job["root"])):
        sys.path.insert(0, str(folder))
    sys.argv = [str(file)]
    log = os.open(results.with_suffix(".log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    done, _ = _read_results(results)
    if job["warm"]:
        _spawn_warm()
    with open(results, "a", encoding="utf-8") as stream:
        recorder = Recorder(stream, done, job["seconds"], job["most"], job["only"])
        words = [
            "-q",
            "--no-header",
            "-c",
            os.devnull,
            "--rootdir",
            job["root"],
            "--import-mode=importlib",
            "-o",
            "python_functions=test_*",  # as unittest, which torch_npu uses: no function that is called testcase_configs
        ]
        # Warnings are the tests' own business: some count them.
        for plugin in ("cacheprovider", "xdist", "timeout", "randomly", "warnings"):
            words += ["-p", f"no:{plugin}"]
        code = int(pytest.main([*words, str(file)], plugins=[recorder]))
        recorder.write(end=code)
    return code


def _sets_variables(file: Path) -> bool:
    """True for a file that sets variables when it is imported: torch may read them when it is loaded."""
    return re.search(r"^(os\.)?environ\b", file.read_text(encoding="utf-8", errors="replace"), re.M) is not None


def _watch(pid: int, results: Path, job: dict[str, Any], deadline: float) -> tuple[int | None, str]:
    """Wait for the process; kill it when it is silent for too long. Return its status and why it was killed."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, ""
        now = time.time()
        silent = now - results.stat().st_mtime
        why = "the file's time is over" if now > deadline else ""
        if silent > job["seconds"] + GRACE_SECONDS and (silent > COLLECT_SECONDS or _read_results(results)[1]):
            why = "timeout"
        if why:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None, why
        time.sleep(0.2)


def _run_file(job: dict[str, Any], server: int) -> dict[str, Any]:
    results = Path(job["results"])
    results.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.time() + job["file_seconds"]
    for _ in range(MOST_RESTARTS):
        results.touch()
        os.utime(results)
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.setpgid(0, 0)  # a group that can be killed
                if _sets_variables(Path(job["file"])):
                    os.execv(sys.executable, [sys.executable, __file__, json.dumps(job)])
                code = _run_tests(job)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        status, why = _watch(pid, results, job, deadline)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have started
        _end_ranks(server)
        _, running = _read_results(results)
        ended = status is not None and os.WIFEXITED(status)
        with open(results, "a", encoding="utf-8") as stream:
            if why == "the file's time is over":
                stream.write(json.dumps({"end": "time", "running": running}) + "\n")
                return {"file": job["file"], "end": "time"}
            if running and not (ended and os.WEXITSTATUS(status or 0) in (0, 1, 2, 5)):
                signal_name = signal.Signals(os.WTERMSIG(status)).name if status and os.WIFSIGNALED(status) else "exit"
                outcome = "timeout" if why == "timeout" else "crashed"
                error = why or f"the process ended by {signal_name}"
                stream.write(json.dumps({"test": running, "outcome": outcome, "seconds": 0, "error": error}) + "\n")
                continue
            if not ended:
                row = {"test": "(collect)", "outcome": "crashed", "seconds": 0, "error": why or "the process died"}
                stream.write(json.dumps(row) + "\n" + json.dumps({"end": "died"}) + "\n")
        return {"file": job["file"], "end": "ran"}
    return {"file": job["file"], "end": "restarts"}


def main() -> int:
    """Serve jobs until stdin ends; with a job as argument, run it in this process."""
    if len(sys.argv) > 1:
        return _run_tests(json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints
    _isolate_network()
    server = _start_server()
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy what it looks at
    for line in sys.stdin:
        answers.write(json.dumps(_run_file(json.loads(line), server)) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
