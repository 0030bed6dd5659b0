"""The `anabatic` command: a table of lazy commands, and one style for every error."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Group

from anabatic import __version__
from anabatic.cli import errors, examples
from anabatic.config import commands
from anabatic.core import affinity, child, log
from anabatic.core.errors import ConfigError
from anabatic.core.heart import HEART
from anabatic.core.stopping import LISTENER

TRAIN = Group("Train", sort_key=1)
USE = Group("Use", sort_key=2)
MACHINE = Group("Machine", sort_key=3)
HELP = Group("Recipes", sort_key=4)
OPTIONS = Group("Options", sort_key=5)

_LAZY = (
    ("run", "anabatic.cli.run:run", TRAIN),
    ("pretrain", "anabatic.cli.pretrain:pretrain", TRAIN),
    ("sft", "anabatic.cli.sft:sft", TRAIN),
    ("dpo", "anabatic.cli.dpo:dpo", TRAIN),
    ("rl", "anabatic.cli.rl:rl", TRAIN),
    ("reward", "anabatic.cli.reward:reward", TRAIN),
    ("merge", "anabatic.cli.merge:merge", USE),
    ("export", "anabatic.cli.export:export", USE),
    ("eval", "anabatic.cli.evaluate:evaluate", USE),
    ("infer", "anabatic.cli.infer:infer", USE),
    ("chat", "anabatic.cli.chat:chat", USE),
    ("serve", "anabatic.cli.serve:serve", USE),
)

_CLASSIFY = (
    ("words", "words"),
    ("pretrain", "pretrain"),
    ("train", "train"),
    ("predict", "predict"),
    ("eval", "evaluate"),
    ("map", "draw"),
)
"""Verb, and its name in `cli/classify.py`."""

_CONVERT = (
    ("swift", "Print the recipe for a command of ms-swift."),
    ("llamafactory", "Print the recipe for a file or command of LLaMA-Factory."),
    ("deepspeed", "Print the recipe for a DeepSpeed file, or a script under a launcher."),
    ("nanochat", "Print the recipe or pipeline for commands of nanochat."),
)
"""Program, and the help of `config from-PROGRAM`."""

_DOCTOR = "Check this machine: chips, driver, CANN, torch, variables, network."
_CHECKPOINT = "List, verify or export the checkpoints of a run."
_BENCH = "Measure training, answers, tokens, collectives, files, or another program."
_ENV = "Print the variables that this machine needs, for eval."


def build() -> App:
    """Return the application. A command's module is imported when the command is named."""
    app = App(
        name="anabatic",
        help="Train language models on Ascend NPUs, NVIDIA GPUs and CPUs.",
        help_epilogue=examples.GENERAL,
        version=__version__,
        version_flags=["--version", "-V"],
        result_action="return_value",
        default_parameter=None,
        suppress_keyboard_interrupt=False,  # it would end the process without a word; `errors.guard` says one
    )
    for name, path, group in _LAZY:
        app.command(path, name=name, help=commands.get(name).help, group=group)
    tokenizer = App(name="tokenizer", help="Train or compare tokenizers.", group=TRAIN)
    for verb, path in (
        ("train", "anabatic.cli.tokenizer:train"),
        ("eval", "anabatic.cli.tokenizer:evaluate"),
    ):
        tokenizer.command(path, name=verb, help=commands.get(f"tokenizer {verb}").help)
    app.command(tokenizer)
    app.command("anabatic.cli.doctor:doctor", name="doctor", help=_DOCTOR, group=MACHINE)
    app.command("anabatic.cli.env:env", name="env", help=_ENV, group=MACHINE)
    app.command("anabatic.cli.explain:explain", name="explain", help="Say what the errors in logs mean.", group=MACHINE)
    app.command(
        "anabatic.cli.launch:app", name="launch", help="Run a training command in several processes or machines.",
        group=TRAIN,
    )  # fmt: skip
    app.command("anabatic.cli.plan:plan", name="plan", help="Say what memory and time a training needs.", group=TRAIN)
    app.command("anabatic.cli.bench:app", name="bench", help=_BENCH, group=MACHINE)
    classify = App(name="classify", help="Classify vessel trajectories.", group=TRAIN)
    for verb, name in _CLASSIFY:
        classify.command(f"anabatic.cli.classify:{name}", name=verb, help=commands.get(f"classify {verb}").help)
    app.command(classify)
    app.command("anabatic.cli.checkpoint:app", name="checkpoint", help=_CHECKPOINT, group=USE)
    app.command("anabatic.cli.sim:app", name="sim", help="Run any command on simulated NPUs.", group=MACHINE)
    app.command(
        "anabatic.cli.monitor:monitor", name="monitor", help="Look at devices, and at a run beside them.", group=MACHINE
    )
    config = App(name="config", help="Show, check or convert recipes.", group=HELP)
    config.command("anabatic.cli.config:show", name="show", help="Print a recipe with every setting explained.")
    config.command("anabatic.cli.config:check", name="check", help="Check recipes without running them.")
    for name, about in _CONVERT:
        function = f"anabatic.cli.convert:from_{name}"
        config.command(function, name=f"from-{name}", help=about)
    app.command(config)
    for flag in ("--help", "--version"):
        app[flag].group = OPTIONS
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 2 for the user's mistake, 1 for a failure, 130 when interrupted."""
    _open_standard_files()
    if (reports := child.reports()) is not None:
        child.die_with_parent()
        affinity.take()
        child.keep_native_output(reports / child.NATIVE.format(log.rank()))
        HEART.open()
    tokens = list(sys.argv[1:] if argv is None else argv)
    border = tokens.index("--") if "--" in tokens else len(tokens)  # what follows belongs to the command of `sim`
    if "--debug" in tokens[:border]:
        os.environ["ANABATIC_DEBUG"] = "1"  # workers and stages follow
    debug = bool(os.environ.get("ANABATIC_DEBUG"))
    tokens = [token for token in tokens[:border] if token != "--debug"] + tokens[border:]
    # Read by libgomp when torch is loaded: threads that spin for long lose 10x when a core is busy elsewhere, and
    # gain nothing on an idle machine (measured, docs/dev/LOG.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    log.setup(debug)
    code = errors.guard(lambda: _call(tokens, reports is not None), debug)
    if code == child.AGAIN or LISTENER.ended:  # others may be in a collective that Python's own end would wait for
        child.leave(code)
    sys.exit(code)


def _open_standard_files() -> None:
    """Put the null device where a standard file is closed: the next file opened would take its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            stream = open(number, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def _call(tokens: list[str], is_worker: bool) -> int:
    if is_worker:
        LISTENER.start()
    app = build()
    app.help_epilogue = examples.epilogue(tokens)
    try:
        if tokens[:1] == ["sim"] and "--" not in tokens:
            _no_command_without_border(app, tokens)
        result = app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise errors.usage(error, tokens) from error
    except ConfigError as error:
        from anabatic.cli import habits

        raise habits.misread(error, tokens) from error
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _no_command_without_border(app: App, tokens: list[str]) -> None:
    """Refuse `sim stat`: a mistyped word of ours must not start some program of that name."""
    function, bound, _, _ = app.parse_known_args(tokens)
    if function.__name__ == "run" and bound.args:
        words = tokens[tokens.index(bound.args[0]) :]
        raise ConfigError(
            f'"{words[0]}" is neither `status` nor `clean`, and a command to run stands after --',
            shlex.join(["anabatic", *tokens[: -len(words)], "--", *words]),
        )
