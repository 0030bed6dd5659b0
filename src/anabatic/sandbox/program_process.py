"""A program inside its process: it gives up what it has, then the source runs here, in a warm interpreter."""

from __future__ import annotations

import ast
import builtins
import linecache
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Literal, NoReturn

from anabatic.sandbox.limits import MIB, ResourceLimits

ProgramScope = dict[str, Any]
TestReport = Literal["", "touched", "shadowed"]
"""Of tests that have passed: nothing; something that they use is not as it was; they used Python's own built-in
functions, of which the program defines some, and are to pass with the program's, too."""
ScopeStep = Callable[[ProgramScope], TestReport | None]
PROGRAM_NAME = "<program>"
"""Name of the source in tracebacks."""
OUT_OF_MEMORY = b"memory"
_CPU_GRACE_SECONDS = 2
"""Seconds of processor time between the signal that a program may catch and the one that it may not."""


def apply_limits(limits: ResourceLimits, processes: int | None) -> None:
    """Obey the limits from now on (setrlimit(2)); `processes` counts those of the zygote too, None: another guard."""
    memory, file = limits.memory_mib * MIB, limits.file_mib * MIB
    rows = [
        (resource.RLIMIT_CPU, limits.cpu_seconds, limits.cpu_seconds + _CPU_GRACE_SECONDS),
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, file, file),
        (resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ]
    if processes is not None:
        rows.append((resource.RLIMIT_NPROC, processes, processes))
    for name, soft, hard in rows:
        ceiling = resource.getrlimit(name)[1]
        limits_in_force = [value for value in (hard, ceiling) if value != resource.RLIM_INFINITY]
        resource.setrlimit(name, (min([soft, *limits_in_force]), min(limits_in_force, default=hard)))


def run_program(
    source: str,
    report: int,
    nonce: bytes,
    before: ScopeStep | None = None,
    after: ScopeStep | None = None,
    program: ast.Module | None = None,
) -> NoReturn:
    """Run the source as `__main__` and leave; `report` hears the nonce when the last line was reached, and what `after`
    returns.

    Ends the process: 0, what `sys.exit` was given, or 1 after an exception, whose traceback is on stderr.

    Args:
        source: Python.
        report: handle.
        nonce: a program that looks for it in its own process finds it: proof of nothing but for tests (`judge`).
        before, after: get the names of `__main__` before the source runs, and when it has run.
        program: what is run instead of the source.
    """
    code, last = 1, b""
    _let_children_be_terminated()
    try:
        try:
            text = source if program is None else program
            said = _execute_source(compile(text, PROGRAM_NAME, "exec", dont_inherit=True), source, before, after)
            last, code = nonce + said.encode(), 0
        except SystemExit as stop:
            code = _exit_code(stop.code)
        _end_threads()
    except MemoryError:
        last, code = OUT_OF_MEMORY, 1
    except BaseException as error:  # whatever an unread program raises is shown, and is its own
        last, code = b"", 1
        _print_traceback(error)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(report, last)
    except BaseException:  # it has closed what it writes to
        code = code or 1
    finally:
        os._exit(code)


def _let_children_be_terminated() -> None:
    """Give SIGTERM its meaning back in what the program forks: the zygote skips it, `Pool.terminate` needs it.

    Blocked meanwhile: one that came between the fork and the change would be lost, and the parent would wait forever.
    """

    def after_in_child() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
        after_in_child=after_in_child,
    )


def _execute_source(code: CodeType, source: str, before: ScopeStep | None, after: ScopeStep | None) -> TestReport:
    module = type(sys)("__main__")
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # the module `site` would
    scope: dict[str, Any] = module.__dict__
    scope.update(__builtins__=builtins, __file__=PROGRAM_NAME)
    sys.modules["__main__"] = module
    sys.argv[:] = [PROGRAM_NAME]
    for name in [name for name in sys.modules if name.partition(".")[0] == "anabatic"]:
        del sys.modules[name]
    linecache.cache[PROGRAM_NAME] = (len(source), None, source.splitlines(keepends=True), PROGRAM_NAME)
    if before is not None:
        before(scope)
    exec(code, scope)
    return (after(scope) or "") if after is not None else ""


def _exit_code(given: object) -> int:
    """Return the exit code that Python derives from the argument of `sys.exit`."""
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    sys.stderr.write(f"{given}\n")
    return 1


def _end_threads() -> None:
    """Do what the interpreter does at its end: wait for threads, call what is registered to be called."""
    import atexit

    if threading := sys.modules.get("threading"):
        threading._shutdown()
    atexit._run_exitfuncs()


def _print_traceback(error: BaseException) -> None:
    """Write the traceback from the program's own first line on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != PROGRAM_NAME:
        frames = frames.tb_next
    try:
        traceback.print_exception(type(error), error, frames)
    except BaseException:  # its own __str__ raises, or stderr is closed
        os.write(2, f"{type(error).__name__}\n".encode())


def open_standard_files(stdin: int, stdout: int, stderr: int) -> None:
    """Put pipes in the place of the standard files, and make Python's streams anew."""
    for number, handle in enumerate((stdin, stdout, stderr)):
        os.dup2(handle, number)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def write_files(files: Mapping[str, str]) -> None:
    """Write a program's files into the current folder."""
    for name, text in files.items():
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
