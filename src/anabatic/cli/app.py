"""The `anabatic` command: a table of lazy commands, and one style for every error."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

from anabatic import __version__
from anabatic.cli import error_report, help_examples
from anabatic.config.loading import command_table
from anabatic.core import affinity, log, relaunch
from anabatic.core.errors import ConfigError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.stop_signals import SIGNAL_LISTENER

TRAIN_GROUP = Group("Train", sort_key=1)
USE_GROUP = Group("Use", sort_key=2)
MACHINE_GROUP = Group("Machine", sort_key=3)
RECIPES_GROUP = Group("Recipes", sort_key=4)
OPTIONS_GROUP = Group("Options", sort_key=5)

_JOB_COMMANDS = {
    TRAIN_GROUP: ("pretrain", "sft", "dpo", "rl", "reward"),
    USE_GROUP: ("merge", "export", "eval", "infer", "chat", "serve"),
}
"""Rows of `command_table` at the top of the help, by its groups."""

_JOB_GROUPS = {
    "tokenizer": "Train or compare tokenizers.",
    "classify": "Classify vessel trajectories.",
}
"""First word of two, and its help: all rows of `command_table` that begin with it stand below it."""

_JOB_MODULE = "anabatic.cli.job_command"
"""Asked for an attribute called like a command, it makes the function behind it."""

_ALL_SETTINGS = "--all"
"""Beside `--help`: the settings that are seldom changed, too."""

_CONVERT_PROGRAMS = (
    ("swift", "Print the recipe for a command of ms-swift."),
    ("llamafactory", "Print the recipe for a file or command of LLaMA-Factory."),
    ("deepspeed", "Print the recipe for a DeepSpeed file, or a script under a launcher."),
    ("nanochat", "Print the recipe or pipeline for commands of nanochat."),
)
"""Program, and the help of `config from-PROGRAM`."""

_DOCTOR_HELP = "Check this machine: chips, driver, CANN, torch, variables, network."
_CHECKPOINT_HELP = "List, verify or export the checkpoints of a run."
_BENCH_HELP = "Measure training, answers, tokens, collectives, files, or another program."
_ENV_HELP = "Print the variables that this machine needs, for eval."


def build_app(show_all: bool = False) -> App:
    """Return the application. A command's module is imported when the command is named.

    Args:
        show_all: the help of a command lists all of its settings, not the common ones alone.
    """
    app = App(
        name="anabatic",
        help="Train language models on Ascend NPUs, NVIDIA GPUs and CPUs.",
        help_epilogue=help_examples.GENERAL_EPILOGUE,
        version=__version__,
        version_flags=["--version", "-V"],
        result_action="return_value",
        default_parameter=None,
        # It would end the process without a message; `error_report.run_with_error_report` reports one.
        suppress_keyboard_interrupt=False,
    )
    app.command("anabatic.cli.run:run", name="run", help=command_table.get_command("run").help, group=TRAIN_GROUP)
    _add_job_commands(app, show_all)
    app.command("anabatic.cli.doctor:doctor", name="doctor", help=_DOCTOR_HELP, group=MACHINE_GROUP)
    app.command("anabatic.cli.env:env", name="env", help=_ENV_HELP, group=MACHINE_GROUP)
    app.command(
        "anabatic.cli.explain:explain", name="explain", help="Say what the errors in logs mean.", group=MACHINE_GROUP
    )
    app.command(
        "anabatic.cli.launch.command:app",
        name="launch",
        help="Run a training command in several processes or machines.",
        group=TRAIN_GROUP,
    )
    app.command(
        "anabatic.cli.plan:plan", name="plan", help="Say what memory and time a training needs.", group=TRAIN_GROUP
    )
    app.command("anabatic.cli.bench:app", name="bench", help=_BENCH_HELP, group=MACHINE_GROUP)
    app.command("anabatic.cli.checkpoint:app", name="checkpoint", help=_CHECKPOINT_HELP, group=USE_GROUP)
    app.command("anabatic.cli.sim:app", name="sim", help="Run any command on simulated NPUs.", group=MACHINE_GROUP)
    app.command(
        "anabatic.cli.monitor:monitor",
        name="monitor",
        help="Look at devices, and at a run beside them.",
        group=MACHINE_GROUP,
    )
    config = App(name="config", help="Show, check or convert recipes.", group=RECIPES_GROUP)
    config.command("anabatic.cli.config:show", name="show", help="Print a recipe with its settings explained.")
    config.command("anabatic.cli.config:check", name="check", help="Check recipes without running them.")
    for name, about in _CONVERT_PROGRAMS:
        function = f"anabatic.cli.convert:from_{name}"
        config.command(function, name=f"from-{name}", help=about)
    app.command(config)
    for flag in ("--help", "--version"):
        app[flag].group = OPTIONS_GROUP
    return app


def _add_job_commands(app: App, show_all: bool) -> None:
    """Add the commands whose options are the settings of their job."""
    suffix = f" {_ALL_SETTINGS}" if show_all else ""
    for group, names in _JOB_COMMANDS.items():
        for name in names:
            help_line = command_table.get_command(name).help
            app.command(f"{_JOB_MODULE}:{name}{suffix}", name=name, help=help_line, group=group)
    for first, about in _JOB_GROUPS.items():
        below = App(name=first, help=about, group=TRAIN_GROUP)
        for name, row in command_table.COMMANDS.items():
            if name.startswith(f"{first} "):
                below.command(f"{_JOB_MODULE}:{name}{suffix}", name=name.partition(" ")[2], help=row.help)
        app.command(below)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 2 for the user's mistake, 1 for a failure, 130 when interrupted."""
    _reopen_closed_streams()
    if (reports := relaunch.get_reports_folder()) is not None:
        relaunch.die_with_parent()
        affinity.bind_to_cores()
        relaunch.redirect_native_stderr(reports / relaunch.NATIVE_STDERR_FILE.format(log.get_rank()))
        HEARTBEAT.open()
    tokens = list(sys.argv[1:] if argv is None else argv)
    border = tokens.index("--") if "--" in tokens else len(tokens)  # what follows belongs to the command of `sim`
    if "--debug" in tokens[:border]:
        os.environ["ANABATIC_DEBUG"] = "1"  # workers and stages follow
    debug = bool(os.environ.get("ANABATIC_DEBUG"))
    tokens = [token for token in tokens[:border] if token != "--debug"] + tokens[border:]
    # Read by libgomp when torch is loaded: threads that spin for long lose 10x when a core is busy elsewhere, and
    # gain nothing on an idle machine (measured, docs/dev).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    log.setup_logging(debug)
    code = error_report.run_with_error_report(lambda: _run_command(tokens, reports is not None), debug)
    if (
        code == relaunch.EXIT_RESTART or SIGNAL_LISTENER.is_stopped
    ):  # others may be in a collective that Python's own end would wait for
        relaunch.exit_process(code)
    sys.exit(code)


def _reopen_closed_streams() -> None:
    """Put the null device where a standard file is closed: the next file opened would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            stream = open(number, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def _run_command(tokens: list[str], is_worker: bool) -> int:
    if is_worker:
        SIGNAL_LISTENER.start_listening()
    tokens, show_all = _take_all_settings(tokens)
    app = build_app(show_all)
    app.help_epilogue = help_examples.make_epilogue(tokens, show_all)
    try:
        if tokens[:1] == ["sim"] and "--" not in tokens:
            _require_command_separator(app, tokens)
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise error_report.translate_usage_error(error, tokens) from error
    except ConfigError as error:
        from anabatic.cli import usage_hints

        raise usage_hints.explain_misread_settings(error, tokens) from error
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _take_all_settings(tokens: list[str]) -> tuple[list[str], bool]:
    """Return the line without the `--all` that stands beside `--help`, and whether there was one."""
    border = tokens.index("--") if "--" in tokens else len(tokens)
    own = tokens[:border]
    if _ALL_SETTINGS not in own or help_examples.HELP_FLAGS.isdisjoint(own):
        return tokens, False
    return [*(word for word in own if word != _ALL_SETTINGS), *tokens[border:]], True


def _require_command_separator(app: App, tokens: list[str]) -> None:
    """Refuse `sim stat`: a mistyped word of ours must not start some program of that name."""
    function, bound, _, _ = app.parse_known_args(tokens)
    if function.__name__ == "run" and bound.args:
        words = tokens[tokens.index(bound.args[0]) :]
        raise ConfigError(
            f'"{words[0]}" is neither `status` nor `clean`, and a command to run stands after --',
            shlex.join(["anabatic", *tokens[: -len(words)], "--", *words]),
        )
