"""What a user sees when something goes wrong: `error:` and `hint:`, one line each, and an exit code."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cyclopts import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from anabatic.config import check, commands
from anabatic.core import log, paths
from anabatic.core.child import EXPLAIN, INTERRUPTED, REPORTS
from anabatic.core.errors import TRACEBACK, AnabaticError, ConfigError, Failure
from anabatic.core.paths import RunFolder
from anabatic.core.stopping import LISTENER, Stopped
from anabatic.core.text import did_you_mean

BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of our output has left, as `head` does."""
_MOST_CAUSES = 20
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def guard(call: Callable[[], int], debug: bool) -> int:
    """Run `call`; turn whatever it raises into one or two lines on stderr and an exit code.

    A worker's message is shown whatever its rank, because the user cannot know whose log to open. When our
    own launcher started the workers, it collects the messages and shows equal ones once.
    """
    try:
        code = _guarded(call, debug)
    except Stopped as stopped:  # it came between an error and what holds signals back
        code = stopped.code
    if folder := os.environ.get(REPORTS):
        paths.write_atomic(Path(folder) / f"rank-{log.rank()}.code", str(code))
    return code


def _guarded(call: Callable[[], int], debug: bool) -> int:
    try:
        return call()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return INTERRUPTED
    except Stopped as stopped:
        log.info(f"{signal.Signals(stopped.number).name} before the first step: there is nothing to save")
        return stopped.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        LISTENER.hold()  # a launcher ends the others by SIGTERM when one of them has failed
        trace = traceback.format_exc()
        shown = readable(error)
        _to_log_files(trace)
        if debug:
            sys.stderr.write(trace)
        if os.environ.get(REPORTS):
            _report(shown)  # before the explanation takes its time: a watchdog may end this process meanwhile
        _report(shown, "" if isinstance(error, AnabaticError) else _explained(error))
        return shown.exit_code


def readable(error: Exception) -> AnabaticError:
    """Return `error` as one of ours, with a hint."""
    if isinstance(error, AnabaticError):
        return error
    if isinstance(error, MemoryError):
        return Failure("not enough memory", "lower batch.micro_batch_tokens, or close other programs")
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if error.errno in _DISK:
            return paths.cannot_write(path, error)
        return Failure(f"{path}: {error.strerror or error}", "check the path and its permissions")
    if isinstance(error, OSError) and error.errno in _DISK:
        hint = "free some space; everything saved before is still whole"
        return Failure(f"cannot write: {error.strerror}", hint)
    text = " ".join(str(error).split()) or "no message"
    return Failure(f"unexpected {type(error).__name__}: {text}", TRACEBACK)


def _explained(error: BaseException) -> str:
    """Return a hint from what `anabatic explain` knows of the messages of `error` and of its causes."""
    if os.environ.get(EXPLAIN) == "0":
        return ""
    messages: list[str] = []
    one: BaseException | None = error
    while one is not None and len(messages) < _MOST_CAUSES:
        messages.insert(0, f"{type(one).__name__}: {one}")
        one = one.__cause__ or one.__context__
    try:
        from anabatic.doctor import explain, explain_show, knowledge, language

        report = explain.explain_text("\n".join(messages), knowledge.load())
        return explain_show.one_line(report, language.choose(None, os.environ))
    except Exception as failed:  # a hint must never take the place of the error
        return f"hint: `anabatic explain` failed: {' '.join(str(failed).split())}"


def _report(error: AnabaticError, explained: str = "") -> None:
    rank = log.rank()
    text = f"{error.render()}\n{explained}" if explained else error.render()
    if folder := os.environ.get(REPORTS):
        paths.write_atomic(Path(folder) / f"rank-{rank}.error", text)
        return
    who = f"[rank {rank}] " if rank else ""
    sys.stderr.write(f"{who}{text}\n")


def _to_log_files(trace: str) -> None:
    for handler in log.LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.LogRecord(log.LOGGER.name, logging.ERROR, "", 0, trace, None, None))


_STARTERS = ("anabatic sim", "anabatic launch", "anabatic plan") + tuple(
    f"anabatic bench {kind}" for kind in ("train", "scaling", "compare")
)
"""Commands that are given another one behind --."""
_SAID = ("true", "false", "yes", "no", "on", "off")
"""What people type behind a switch."""


def usage(error: CycloptsError, tokens: Sequence[str]) -> ConfigError:
    """Return the CLI library's error in our words; `tokens` are the words of the whole line."""
    from anabatic.cli import habits, other_programs  # they read the tables of other programs: for mistakes alone

    if isinstance(error, UnknownCommandError):
        found = other_programs.unknown_command(error, tokens)
    else:
        found = habits.usage(error, tokens)
    if found is not None:
        return found
    words = " ".join(("anabatic", *(error.command_chain or ())))
    hint = f"see `{words} --help`"
    if isinstance(error, UnusedCliTokensError) and (error.unused_tokens or [""])[0].lower() in _SAID:
        hint = "a switch is typed alone, --x or --no-x (in a section --a.no-x), or with its value, --x=false"
    if words in _STARTERS:
        hint = f"the command to run and its options stand after --; {hint}"
    for kind, describe in _USAGE:
        if isinstance(error, kind):
            return ConfigError(describe(error), hint)
    return ConfigError(" ".join(str(error).split()).rstrip("."), hint)


def _unknown_option(error: UnknownOptionError) -> str:
    from anabatic.cli import habits

    word = (error.token.keyword or error.token.value).split("=", 1)[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    return f'unknown option "{word}".{habits.own_guess(word, known)}'


def _unknown_command(error: UnknownCommandError) -> str:
    word = (error.unused_tokens or [""])[0]
    if word.startswith("-"):
        return f'unknown option "{word}"'
    known = [name for name in error.app or () if not name.startswith("-")]
    guess = did_you_mean(word, known) or f" Commands: {', '.join(known)}"
    return f'unknown command "{word}".{guess}'


def _missing(error: MissingArgumentError) -> str:
    name = error.keyword or (error.argument.name if error.argument else "an option")
    return f"{name} needs a value"


def _unused(error: UnusedCliTokensError) -> str:
    words = list(error.unused_tokens or ())
    option = next((f"{name} {word}" for word in words if (name := _option_of(word, error))), None)
    guess = f" Did you mean {option}?" if option else ""
    return f"{' '.join(words)} does not belong to an option.{guess}"


def _option_of(word: str, error: UnusedCliTokensError) -> str:
    """Return the option that a word without one may be for; empty where none is likely."""
    name = " ".join(error.command_chain or ())
    known = {key for key, _ in check.leaves(commands.get(name).job_class())} if name in commands.COMMANDS else set()
    if word.endswith((".yaml", ".yml")):
        return "-c"
    if (Path(word) / "config.json").is_file() or RunFolder(Path(word)).final_model.is_dir():
        return "--model" if "model" in known else ""
    return "--data" if "data.train" in known and Path(word).exists() else ""


def _repeated(error: RepeatArgumentError) -> str:
    return f"{error.token.keyword} is given twice"


def _value(error: CoercionError) -> str:
    if error.token is None or error.token.keyword is None:
        return " ".join(str(error).split()).rstrip(".")
    return f'{error.token.keyword} is "{error.token.value}", expected true or false'


_USAGE: tuple[tuple[type, Callable[..., str]], ...] = (
    (UnknownOptionError, _unknown_option),
    (UnknownCommandError, _unknown_command),
    (MissingArgumentError, _missing),
    (UnusedCliTokensError, _unused),
    (RepeatArgumentError, _repeated),
    (CoercionError, _value),
)
