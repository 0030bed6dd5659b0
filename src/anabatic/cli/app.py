"""The `anabatic` command: finds the command, prints help, and reports every error in one format.

Nothing is imported that the command does not need: the start is what a user waits for with every command.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from anabatic import __version__
from anabatic.cli import command_tree
from anabatic.cli.parsing import help_page
from anabatic.cli.parsing.command_line import SEPARATOR, Interface, ParsedLine, UsageError, split_at_separator
from anabatic.config.loading.command_package import GROUPS, CommandEntry
from anabatic.core import cpu_info, log, relaunch
from anabatic.core.errors import ConfigError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.paths import write_atomic
from anabatic.core.stop_signals import SIGNAL_LISTENER, StopSignal

DESCRIPTION = "Train language models on Ascend NPUs, NVIDIA GPUs and CPUs."
_DEBUG_HINT = "Add --debug for the traceback of an error."
_ALL_SETTINGS = "--all"
"""Option that makes `--help` also list the rarely used settings."""


def render_help(name: str, show_all: bool = False, *, width: int = 80, use_bold: bool = False) -> str:
    """Return the help of a command, of a group of commands, or with an empty name of the program.

    Args:
        name: words as typed.
        show_all: also list the rarely used settings of a job.
        width: columns.
        use_bold: for terminals.
    """
    entry = command_tree.COMMANDS.get(name)
    if entry is None:
        blocks = [
            (group, "", [(each.name, each.help) for each in command_tree.list_subcommands("") if each.group == group])
            for group in GROUPS
        ]
        options = [("--help, -h", "Print this page; behind a command, that of the command."), ("--version, -V", "")]
        blocks.append(("Options", "", options))
        epilogue = ["Every command: anabatic COMMAND --help", _DEBUG_HINT]
        return help_page.render_page(
            ["anabatic COMMAND"], DESCRIPTION, blocks, epilogue, width=width, use_bold=use_bold
        )
    usage, description, blocks = [], entry.help, []
    interface = Interface()
    if subcommands := command_tree.list_subcommands(name):
        usage.append(f"anabatic {name} {'|'.join(each.name.rpartition(' ')[2] for each in subcommands)} [OPTIONS]")
        rows = [(each.last_word, each.help) for each in subcommands]
        blocks.append(("Commands", "", rows))
    if command_tree.is_callable(name):
        interface = command_tree.load_command(name, show_all).interface
        usage.insert(0, help_page.format_usage(name, interface))
        description = interface.description
        blocks += help_page.make_option_blocks(interface)
    return help_page.render_page(
        usage, description, blocks, _make_epilogue(entry, show_all), width=width, use_bold=use_bold
    )


def _make_epilogue(entry: CommandEntry, show_all: bool) -> list[str]:
    if not command_tree.is_callable(entry.name):
        return [f"Every command: anabatic {entry.name} COMMAND --help"]
    lines = [f"For example: anabatic {entry.name} {entry.example}".strip(), _DEBUG_HINT]
    if command_tree.is_job(entry) and not show_all:
        from anabatic.config.loading import common_settings

        if number := common_settings.count_further_settings(entry.name):
            lines.append(f"{number} more settings: anabatic {entry.name} --help {_ALL_SETTINGS}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 2 for a user error, 1 for a failure, 130 when interrupted."""
    _reopen_closed_streams()
    if reports_folder := os.environ.get(relaunch.REPORTS_VARIABLE):
        relaunch.die_with_parent()
        cpu_info.bind_to_cores()
        relaunch.redirect_native_stderr(Path(reports_folder, relaunch.NATIVE_STDERR_FILE.format(log.get_rank())))
        HEARTBEAT.open()
    tokens = list(sys.argv[1:] if argv is None else argv)
    separator = tokens.index("--") if "--" in tokens else len(tokens)  # the rest belongs to the command of `sim`
    if "--debug" in tokens[:separator]:
        os.environ["ANABATIC_DEBUG"] = "1"  # inherited by workers and stages
    debug = bool(os.environ.get("ANABATIC_DEBUG"))
    tokens = [token for token in tokens[:separator] if token != "--debug"] + tokens[separator:]
    # Read by libgomp when torch is loaded: threads that spin for long are 10x slower when a core is busy, and gain
    # nothing on an idle machine (measured, docs/dev).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    log.setup_logging(debug)
    code = run_with_error_report(lambda: _run_command(tokens, bool(reports_folder)), debug)
    if (
        code == relaunch.EXIT_RESTART or SIGNAL_LISTENER.is_stopped
    ):  # other threads may be in a collective that the interpreter's shutdown would wait for
        relaunch.exit_process(code)
    sys.exit(code)


def run_with_error_report(call: Callable[[], int], debug: bool) -> int:
    """Run `call`; convert its exceptions to one or two lines on stderr and an exit code.

    Workers of all ranks print their message, because the user cannot know which log to open. If this program's
    launcher started the workers, it collects the messages and prints equal ones once.
    """
    try:
        code = _run_and_report_errors(call, debug)
        SIGNAL_LISTENER.hold_signals()  # a scheduler signals a launcher whose workers have stopped already
    except StopSignal as stopped:  # arrived before signals were held
        code = stopped.exit_code
    except KeyboardInterrupt:
        code = relaunch.EXIT_INTERRUPTED
    if folder := os.environ.get(relaunch.REPORTS_VARIABLE):
        write_atomic(Path(folder) / f"rank-{log.get_rank()}.code", str(code))
    return code


def _run_and_report_errors(call: Callable[[], int], debug: bool) -> int:
    try:
        return call()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        return relaunch.EXIT_INTERRUPTED
    except StopSignal as stopped:
        log.info(f"{signal.Signals(stopped.number).name} before the first step: there is nothing to save")
        return stopped.exit_code
    except BrokenPipeError:
        from anabatic.cli import error_report

        error_report.discard_output()
        return error_report.BROKEN_PIPE
    except Exception as error:
        from anabatic.cli import error_report

        return error_report.report_error(error, debug)


def _reopen_closed_streams() -> None:
    """Open the null device for closed standard streams: otherwise the next opened file gets their descriptor."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
        else:
            if getattr(sys, name) is not None:
                continue
            fd = os.open(os.devnull, os.O_RDWR)  # the interpreter itself has opened a file in the stream's place
        stream = open(fd, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream)


def _run_command(tokens: list[str], is_worker: bool) -> int:
    if is_worker:
        SIGNAL_LISTENER.start_listening()
    try:
        result = run_tokens(tokens)
    except UsageError as error:
        from anabatic.cli.usage import usage_errors

        raise usage_errors.translate_usage_error(error, tokens) from error
    except ConfigError as error:
        from anabatic.cli.usage import usage_hints

        raise usage_hints.explain_misread_settings(error, tokens) from error
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def run_tokens(tokens: Sequence[str]) -> object:
    """Run the command of a command line, or print the help or version that it asks for; return what the command does.

    Raises:
        UsageError: there is no such command, or it does not accept these options or arguments.
    """
    if list(tokens[:1]) in (["--help"], ["-h"]):  # anabatic --help sft
        tokens = [*tokens[1:], tokens[0]]
    name, rest = command_tree.find_command(tokens)
    asked = command_tree.find_information_option(rest)
    if asked == "version":
        sys.stdout.write(f"{__version__}\n")
        return 0
    if asked == "help" or not (rest or command_tree.is_callable(name)):
        show_all = _ALL_SETTINGS in split_at_separator(rest)[0]
        use_bold = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write(render_help(name, show_all, width=help_page.get_width(), use_bold=use_bold))
        return 0
    if not command_tree.is_callable(name):
        command_tree.reject_option(name, rest[0])
    command, line = command_tree.parse_command(name, rest)
    if command_tree.COMMANDS[name].needs_separator and SEPARATOR not in rest:
        _reject_words(name, line, tokens)
    try:
        return command.run(line)
    except UsageError as error:
        error.command = error.command or name
        raise


def _reject_words(name: str, line: ParsedLine, tokens: Sequence[str]) -> None:
    """Reject `sim stat`."""
    if line.words:
        command = list(tokens[tokens.index(line.words[0]) :])
        subcommands = " nor ".join(f"`{each.last_word}`" for each in command_tree.list_subcommands(name))
        raise ConfigError(
            f'"{command[0]}" is neither {subcommands}, and a command to run stands after --',
            shlex.join(["anabatic", *tokens[: -len(command)], "--", *command]),
        )
