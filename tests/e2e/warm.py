"""Programs forked from a process that has imported what they need: importing is most of a short command's work.

Each is its own process, with its own arguments, variables, output, signals and exit code, and runs a module or a
file as `python` does from its beginning; only the libraries are in memory already. A process that it starts in turn
with the same interpreter (a launcher's agent, the command of `anabatic sim`) is forked as well as long as nothing but
the calling thread lives, because a fork copies that one alone. What starts cold, as on a user's machine: whatever a
shell (the scripts of several machines) or torchrun starts, programs with variables of their own, and the commands whose
start itself is the test.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

PRELOAD = (
    "anabatic.cli.app",
    "anabatic.recipes.tokenizer_commands",
    *(f"anabatic.recipes.training.{name}" for name in ("pretrain", "sft", "dpo")),
    *(f"anabatic.recipes.export.{name}" for name in ("merge", "run_checkpoint")),
    "anabatic.recipes.chat.session",
    "anabatic.recipes.evaluate",
    *(f"anabatic_vessels.commands.{name}" for name in ("train_classifier", "predict_classes")),
    "anabatic.train.report.page",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
)
FIRST = ("PYTHON", "LD_", "OMP_", "MKL_", "HF_", "TRANSFORMERS_")
"""How variables begin that are read when Python or a library is loaded: who has others starts cold."""


def same_start(variables: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """True when a process with these variables would load what one with the others has loaded."""
    one, two = ({key: value for key, value in each.items() if key.startswith(FIRST)} for each in (variables, other))
    return one == two


class Warm:
    """A forked program, with the part of `subprocess.Popen` that tests use; its output goes to files."""

    def __init__(self, server: Server, words: Sequence[str], variables: Mapping[str, str], folder: Path) -> None:
        self.args, self._server = list(words), server
        self.returncode: int | None = None
        self._files = [os.memfd_create("output"), os.memfd_create("error")]
        for number in self._files:  # ranks write at once, and the kernel guards no offset of such a file
            fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)
        self._texts: list[str] = []
        given = {"words": self.args, "variables": dict(variables), "folder": str(folder)}
        self.pid: int = server.ask(given, self._files)
        self._ended = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            self.returncode = self._server.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it did not come in time.
        """
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return the standard output and the standard error."""
        self.wait(timeout)
        for number in self._files:
            os.lseek(number, 0, os.SEEK_SET)
            with open(number, encoding="utf-8") as file:
                self._texts.append(file.read())
        self._files.clear()
        return self._texts[0], self._texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the end of the process is known."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless its end is known."""
        self.send_signal(signal.SIGKILL)


class Server:
    """Our end: forks programs on request, until this process ends.

    Args:
        variables: those of the server, so what its programs find loaded.
        outer: those of the processes that are asked for.
    """

    def __init__(self, variables: Mapping[str, str], outer: Mapping[str, str]) -> None:
        self._outer = dict(outer)
        self._line, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**variables, "GOMP_SPINCOUNT": "1000", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._answers = self._line.makefile("r", encoding="utf-8")
        atexit.register(self.close)

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: Path) -> Warm | None:
        """Start a program of Python's; None where it must be started cold."""
        forked = program(words)
        return Warm(self, forked, variables, folder) if forked and same_start(variables, self._outer) else None

    def close(self) -> None:
        """Let the server end, and wait for it."""
        self._answers.close()
        self._line.close()
        self._process.wait()

    def ask(self, what: Mapping[str, Any], files: Sequence[int] = ()) -> int:
        """Send a request and return the answer."""
        socket.send_fds(self._line, [(json.dumps(what) + "\n").encode()], files)
        answer = self._answers.readline()
        assert answer, "the process that forks programs has ended"
        return int(answer)

    @property
    def ended(self) -> bool:
        """Whether a program under test has ended the server with itself."""
        return self._process.poll() is not None


def plain() -> Server:
    """The server of this process."""
    return _alive(_plain)


def simulated(cache: Path) -> Server:
    """One for `anabatic sim`, whose programs find torch_npu loaded; `cache` holds the simulator."""
    return _alive(_simulated, cache)


def _alive(make: Any, *args: Path) -> Server:
    server: Server = make(*args)
    if server.ended:
        make.cache_clear()
        server = make(*args)
    return server


@functools.cache
def _plain() -> Server:
    return Server(os.environ, os.environ)


@functools.cache
def _simulated(cache: Path) -> Server:
    from anabatic_sim import session
    from anabatic_sim.libraries import native_build

    old = os.environ.get("ANABATIC_CACHE")
    os.environ["ANABATIC_CACHE"] = str(cache)
    try:
        built = native_build.prepare_build()
    finally:
        os.environ.pop("ANABATIC_CACHE")
        if old is not None:
            os.environ["ANABATIC_CACHE"] = old
    return Server(session.build_environment(os.environ, built, "each program has its own"), os.environ)


# --- the server's end -----------------------------------------------------------------------------------------------


def _serve(line: socket.socket) -> None:
    _preload()
    assert _alone(), "an import has started a thread, so nothing can be forked"
    gc.collect()
    gc.freeze()  # a collection would copy the pages that all share
    while True:
        request, files = _receive(line)
        if not request:
            return
        asked = json.loads(request)
        if "wait" in asked:
            line.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]))
            continue
        pid = os.fork()
        if pid == 0:
            line.close()
            for number, file in enumerate(files, start=1):
                os.dup2(file, number)
                os.close(file)
            _become(asked["words"], asked["variables"], asked["folder"])
        for file in files:
            os.close(file)
        line.sendall(b"%d\n" % pid)


def _preload() -> None:
    """Import, without opening a simulated device: which one is only known after the fork."""
    import torch

    devices = getattr(torch, "npu", None)
    asked = devices.is_available if devices is not None else None
    if devices is not None:
        devices.is_available = lambda: True  # accelerate and transformers ask when they are imported
    for name in PRELOAD:
        importlib.import_module(name)
    if devices is not None:
        devices.is_available = asked
    _fill_caches()


def _fill_caches() -> None:
    """Make once what every training makes once: transformers' table of renamed weights, the templates of the report."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from anabatic.train.report import localized_page

    get_checkpoint_conversion_mapping("qwen3")
    for template in localized_page.TEMPLATE_FOLDER.glob("*.j2"):
        localized_page._make_environment().get_template(template.name)


def _alone() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Return one line and the files that came with it; nothing when the other end is closed."""
    data, files, _, _ = socket.recv_fds(line, 1 << 16, 2)
    while data and not data.endswith(b"\n"):
        data += line.recv(1 << 16)
    return data, files


def program(words: Sequence[str]) -> list[str]:
    """Return the words behind `python` when a fork can run them: `-m MODULE ...` or `FILE.py ...`; else none.

    pytest cannot: it rewrites its plugins while they are imported, and complains about those that already are.
    """
    if words[:1] == ["anabatic"]:
        return ["-m", *words]
    if words[0] not in ("python", sys.executable):
        return []
    rest = list(words[2 if words[1:2] == ["-u"] else 1 :])
    if rest[:2] == ["-m", "pytest"]:
        return []
    return rest if rest[:1] == ["-m"] or rest[:1] and rest[0].endswith(".py") else []


def _become(words: list[str], variables: Mapping[str, str], folder: str | None) -> NoReturn:
    """Be `python WORDS`, and end as it does."""
    os.environ.clear()
    os.environ.update(variables)
    if folder is not None:
        os.chdir(folder)
    subprocess.Popen = _Forking  # type: ignore[misc]
    logging.disable(logging.NOTSET)  # the agent has silenced its own process, not those that it starts
    if words[:2] == ["-m", "anabatic.launch.local.elastic_agent"]:
        os.environ.setdefault("ANABATIC_PRELOAD", "anabatic.cli.app")  # its ranks are forked, on simulated devices too
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = os.getcwd()
        if words[1] != "anabatic":  # a module is run anew, and runpy warns of one that is imported already
            sys.modules.pop(words[1], None)
    else:
        sys.argv = words
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    code = 0
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End without Python's own end, which is that of the frames below as well.

    It also aborts the process if a thread of backward passes on a device is late: that thread drops its pass after its
    caller went on, and with it objects of Python's (docs/dev/measurements.md, "Abort at the end of a program").
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # What libraries have registered: the simulator writes its counters there. PyDLL keeps the lock, as torch_npu needs.
    ctypes.PyDLL(None).exit(code)
    raise AssertionError


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
"""Both ends of the standard streams of a program, by the names that `subprocess` gives them."""


class _Forking(subprocess.Popen):  # type: ignore[type-arg]
    """`Popen` that forks instead where the new process would load what is loaded already."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(start).bind(args, *rest).arguments
        words = program(args) if isinstance(args, (list, tuple)) else []
        variables = os.environ if given["env"] is None else given["env"]
        if not words or not _alone() or not same_start(variables, _started):
            start(args, *rest)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none may reach our handlers there
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            _child(words, variables, given, mask)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]


def _child(words: list[str], variables: Mapping[str, str], given: Mapping[str, Any], mask: set[Any]) -> NoReturn:
    """What lies between a fork and the new program: signals, session, files."""
    atexit._clear()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if given["start_new_session"]:
        os.setsid()
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if given[name] != -1:
            os.dup2(given[name], number)
    kept = sorted({0, 1, 2, *given["pass_fds"], 1 << 16})
    for low, high in zip(kept, kept[1:], strict=False):
        os.closerange(low + 1, high)
    for number in given["pass_fds"]:
        os.set_inheritable(number, True)
    _become(words, dict(variables), given["cwd"])


_started = dict(os.environ)

if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
