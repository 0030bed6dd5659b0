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

from anabatic.config.loading import command_table, validation
from anabatic.core import log, paths
from anabatic.core.errors import TRACEBACK_HINT, AnabaticError, ConfigError, Failure
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import RunFolder
from anabatic.core.relaunch import EXIT_INTERRUPTED, EXPLAIN_VARIABLE, REPORTS_VARIABLE
from anabatic.core.stop_signals import SIGNAL_LISTENER, StopSignal

BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of our output has left, as `head` does."""
_MAX_CAUSES = 20
_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_with_error_report(call: Callable[[], int], debug: bool) -> int:
    """Run `call`; turn whatever it raises into one or two lines on stderr and an exit code.

    A worker's message is shown whatever its rank, because the user cannot know whose log to open. When our
    own launcher started the workers, it collects the messages and shows equal ones once.
    """
    try:
        code = _run_and_report_errors(call, debug)
    except StopSignal as stopped:  # it came between an error and what holds signals back
        code = stopped.exit_code
    if folder := os.environ.get(REPORTS_VARIABLE):
        paths.write_atomic(Path(folder) / f"rank-{log.get_rank()}.code", str(code))
    return code


def _run_and_report_errors(call: Callable[[], int], debug: bool) -> int:
    try:
        return call()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return EXIT_INTERRUPTED
    except StopSignal as stopped:
        log.info(f"{signal.Signals(stopped.number).name} before the first step: there is nothing to save")
        return stopped.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        SIGNAL_LISTENER.hold_signals()  # a launcher ends the others by SIGTERM when one of them has failed
        trace = traceback.format_exc()
        shown = to_user_error(error)
        _write_trace_to_log_files(trace)
        if debug:
            sys.stderr.write(trace)
        if os.environ.get(REPORTS_VARIABLE):
            _print_error(shown)  # before the explanation takes its time: a watchdog may end this process meanwhile
        _print_error(shown, "" if isinstance(error, AnabaticError) else _explain_error(error))
        return shown.exit_code


def to_user_error(error: Exception) -> AnabaticError:
    """Return `error` as one of ours, with a hint."""
    if isinstance(error, AnabaticError):
        return error
    if isinstance(error, MemoryError):
        return Failure("not enough memory", "lower batch.micro_batch_tokens, or close other programs")
    if isinstance(error, OSError) and error.filename is not None:
        path = Path(os.fsdecode(error.filename))
        if error.errno in _DISK_ERRNOS:
            return paths.make_write_error(path, error)
        return Failure(f"{path}: {error.strerror or error}", "check the path and its permissions")
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        hint = "free some space; everything saved before is still whole"
        return Failure(f"cannot write: {error.strerror}", hint)
    text = " ".join(str(error).split()) or "no message"
    return Failure(f"unexpected {type(error).__name__}: {text}", TRACEBACK_HINT)


def _explain_error(error: BaseException) -> str:
    """Return a hint from what `anabatic explain` knows of the messages of `error` and of its causes."""
    if os.environ.get(EXPLAIN_VARIABLE) == "0":
        return ""
    messages: list[str] = []
    one: BaseException | None = error
    while one is not None and len(messages) < _MAX_CAUSES:
        messages.insert(0, f"{type(one).__name__}: {one}")
        one = one.__cause__ or one.__context__
    try:
        from anabatic.doctor import knowledge_base, language
        from anabatic.doctor.explain import diagnosis, rendering

        report = diagnosis.explain_text("\n".join(messages), knowledge_base.load_knowledge())
        return rendering.format_hint(report, language.choose_language(None, os.environ))
    except Exception as failed:  # a hint must never take the place of the error
        return f"hint: `anabatic explain` failed: {' '.join(str(failed).split())}"


def _print_error(error: AnabaticError, explained: str = "") -> None:
    rank = log.get_rank()
    text = f"{error.render()}\n{explained}" if explained else error.render()
    if folder := os.environ.get(REPORTS_VARIABLE):
        paths.write_atomic(Path(folder) / f"rank-{rank}.error", text)
        return
    who = f"[rank {rank}] " if rank else ""
    sys.stderr.write(f"{who}{text}\n")


def _write_trace_to_log_files(trace: str) -> None:
    for handler in log.LOGGER.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(logging.LogRecord(log.LOGGER.name, logging.ERROR, "", 0, trace, None, None))


_COMMANDS_WITH_SEPARATOR = ("anabatic sim", "anabatic launch", "anabatic plan") + tuple(
    f"anabatic bench {kind}" for kind in ("train", "scaling", "compare")
)
"""Commands that are given another one behind --."""
_BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off")
"""What people type behind a switch."""


def translate_usage_error(error: CycloptsError, tokens: Sequence[str]) -> ConfigError:
    """Return the CLI library's error in our words; `tokens` are the words of the whole line."""
    from anabatic.cli import foreign_commands, usage_hints  # they read the tables of other programs: for mistakes alone
    from anabatic.config.loading import common_settings

    if isinstance(error, UnknownCommandError):
        found = foreign_commands.explain_unknown_command(error, tokens)
    else:
        found = usage_hints.explain_usage_error(error, tokens)
    if found is not None:
        return found
    name = " ".join(error.command_chain or ())
    words = f"anabatic {name}".strip()
    shown = common_settings.format_help_command(name) if name in command_table.COMMANDS else f"{words} --help"
    hint = f"see `{shown}`"
    if isinstance(error, UnusedCliTokensError) and (error.unused_tokens or [""])[0].lower() in _BOOLEAN_WORDS:
        hint = "a switch is typed alone, --x or --no-x (in a section --a.no-x), or with its value, --x=false"
    if words in _COMMANDS_WITH_SEPARATOR:
        hint = f"the command to run and its options stand after --; {hint}"
    for kind, describe in _USAGE_DESCRIBERS:
        if isinstance(error, kind):
            return ConfigError(describe(error), hint)
    return ConfigError(" ".join(str(error).split()).rstrip("."), hint)


def _describe_unknown_option(error: UnknownOptionError) -> str:
    from anabatic.cli import usage_hints

    word = (error.token.keyword or error.token.value).split("=", 1)[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    return f'unknown option "{word}".{usage_hints.suggest_option(word, known)}'


def _describe_unknown_command(error: UnknownCommandError) -> str:
    word = (error.unused_tokens or [""])[0]
    if word.startswith("-"):
        return f'unknown option "{word}"'
    known = [name for name in error.app or () if not name.startswith("-")]
    guess = did_you_mean(word, known) or f" Commands: {', '.join(known)}"
    return f'unknown command "{word}".{guess}'


def _describe_missing_value(error: MissingArgumentError) -> str:
    name = error.keyword or (error.argument.name if error.argument else "an option")
    return f"{name} needs a value"


def _describe_unused_words(error: UnusedCliTokensError) -> str:
    words = list(error.unused_tokens or ())
    option = next((f"{name} {word}" for word in words if (name := _guess_option(word, error))), None)
    guess = f" Did you mean {option}?" if option else ""
    return f"{' '.join(words)} does not belong to an option.{guess}"


def _guess_option(word: str, error: UnusedCliTokensError) -> str:
    """Return the option that a word without one may be for; empty where none is likely."""
    name = " ".join(error.command_chain or ())
    known = (
        {key for key, _ in validation.iter_settings(command_table.get_command(name).import_job_class())}
        if name in command_table.COMMANDS
        else set()
    )
    if word.endswith((".yaml", ".yml")):
        return "-c"
    if (Path(word) / "config.json").is_file() or RunFolder(Path(word)).final_model.is_dir():
        return "--model" if "model" in known else ""
    return "--data" if "data.train" in known and Path(word).exists() else ""


def _describe_repeated_option(error: RepeatArgumentError) -> str:
    return f"{error.token.keyword} is given twice"


def _describe_bad_value(error: CoercionError) -> str:
    if error.token is None or error.token.keyword is None:
        return " ".join(str(error).split()).rstrip(".")
    return f'{error.token.keyword} is "{error.token.value}", expected true or false'


_USAGE_DESCRIBERS: tuple[tuple[type, Callable[..., str]], ...] = (
    (UnknownOptionError, _describe_unknown_option),
    (UnknownCommandError, _describe_unknown_command),
    (MissingArgumentError, _describe_missing_value),
    (UnusedCliTokensError, _describe_unused_words),
    (RepeatArgumentError, _describe_repeated_option),
    (CoercionError, _describe_bad_value),
)
