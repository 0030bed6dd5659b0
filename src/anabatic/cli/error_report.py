"""Report errors to the user, `error:` and `hint:`, one line each."""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from pathlib import Path

from anabatic.core import log, paths
from anabatic.core.errors import TRACEBACK_HINT, AnabaticError, ConfigError, Failure
from anabatic.core.relaunch import EXPLAIN_VARIABLE, REPORTS_VARIABLE
from anabatic.core.stop_signals import SIGNAL_LISTENER

BROKEN_PIPE = 141
"""Exit code 128 + SIGPIPE: the reader of the output has closed the pipe, as `head` does."""
_MAX_CAUSES = 20
_NAME_LIMITS_HINT = "Linux takes names of up to 255 bytes and paths of up to 4,095: check what was typed"
"""NAME_MAX and PATH_MAX without the final zero (linux/limits.h)."""
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def report_error(error: Exception, debug: bool) -> int:
    """Report the error that is being handled; return the exit code."""
    try:
        sys.stdout.flush()
    except OSError:  # a full disk
        discard_output()
    SIGNAL_LISTENER.hold_signals()  # a launcher sends SIGTERM to the others when one worker has failed
    trace = traceback.format_exc()
    user_error = to_user_error(error)
    _write_trace_to_log_files(trace)
    if debug:
        sys.stderr.write(trace)
    if os.environ.get(REPORTS_VARIABLE):
        _print_error(user_error)  # before the slow explanation: a watchdog may end this process meanwhile
    _print_error(user_error, _explain_error(error) if user_error.hint == TRACEBACK_HINT else "")
    return user_error.exit_code


def discard_output() -> None:
    """Discard what is left in the buffer of stdout: it could not be written at Python's end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def to_user_error(error: Exception) -> AnabaticError:
    """Return `error` as an `AnabaticError` with a hint."""
    if isinstance(error, AnabaticError):
        return error
    if isinstance(error, MemoryError):
        return Failure("not enough memory", "lower batch.micro_batch_tokens, or close other programs")
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if error.errno == errno.ENAMETOOLONG:
            name = max(path.parts, key=lambda part: len(os.fsencode(part)))
            size = f"{len(os.fsencode(path)):,} bytes long, its longest name {len(os.fsencode(name)):,}"
            return ConfigError(f"the path {str(path)[:60]}... is {size}", _NAME_LIMITS_HINT)
        if error.errno in _DISK_ERRNOS:
            return paths.make_write_error(path, error)
        return Failure(f"{path}: {error.strerror or error}", "check the path and its permissions")
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return Failure(f"cannot write: {error.strerror}", "free some space, or write to another disk")
    text = " ".join(str(error).split()) or "no message"
    return Failure(f"unexpected {type(error).__name__}: {text}", TRACEBACK_HINT)


def _explain_error(error: BaseException) -> str:
    """Return a hint of `anabatic explain` for the messages of `error` and of its causes."""
    if os.environ.get(EXPLAIN_VARIABLE) == "0":
        return ""
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(messages) < _MAX_CAUSES:
        messages.insert(0, f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    try:
        from anabatic.core import language
        from anabatic.doctor import knowledge_base
        from anabatic.doctor.explain import diagnosis, rendering

        report = diagnosis.explain_text("\n".join(messages), knowledge_base.load_knowledge())
        return rendering.format_hint(report, language.choose_language(None, os.environ))
    except Exception as explain_error:  # a hint must never replace the error
        return f"hint: `anabatic explain` failed: {' '.join(str(explain_error).split())}"


def _print_error(error: AnabaticError, explanation: str = "") -> None:
    rank = log.get_rank()
    text = f"{error.render()}\n{explanation}" if explanation else error.render()
    if folder := os.environ.get(REPORTS_VARIABLE):
        paths.write_atomic(Path(folder) / f"rank-{rank}.error", text)
        return
    prefix = f"[rank {rank}] " if rank else ""
    sys.stderr.write(f"{prefix}{text}\n")


def _write_trace_to_log_files(trace: str) -> None:
    for handler in log.LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.LogRecord(log.LOGGER.name, logging.ERROR, "", 0, trace, None, None))
