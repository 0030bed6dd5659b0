"""The `anabatic` command: a table of lazily imported commands, and one format for all errors."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from itertools import takewhile

from cyclopts import App, CycloptsError, Group

from anabatic import __version__
from anabatic.cli import error_report
from anabatic.config.loading import command_table
from anabatic.core import cpu_info, log, relaunch
from anabatic.core.errors import ConfigError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.core.stop_signals import SIGNAL_LISTENER

HELP_FLAGS = frozenset({"--help", "-h"})
GENERAL_EPILOGUE = "Every command: `anabatic COMMAND --help`. Add `--debug` for the traceback of an error."

COMMAND_EXAMPLES = {
    "run": "demo",
    "pretrain": "--tokenizer runs/mine/tokenizer --data corpus/ --model.depth 6",
    "sft": "--model Qwen/Qwen2.5-0.5B --data chats.jsonl --tuner lora --out runs/mine",
    "dpo": "--model runs/mine --data pairs.jsonl --out runs/dpo",
    "rl": "--model runs/mine --data task:arithmetic --out runs/rl",
    "reward": "--model runs/mine --data pairs.jsonl --out runs/reward",
    "merge": "--model runs/mine --out runs/merged",
    "export": "runs/mine --out exported",
    "eval": "runs/mine --data.valid unseen.txt",
    "infer": "-m runs/mine rows.jsonl -o answers.jsonl",
    "chat": '-m runs/mine -p "What did you read?"',
    "serve": "runs/mine --port 8000",
    "studio": "runs",
    "tokenizer train": "--data.train corpus/ --vocab-size 16384 --out runs/mine/tokenizer",
    "tokenizer eval": "--tokenizers runs/mine/tokenizer models/other --data.valid unseen.txt",
    "data preview": "chats.jsonl -m Qwen/Qwen2.5-0.5B",
    "classify words": "ais/ -o words.jsonl",
    "classify pretrain": "--data words.jsonl --out runs/vessel-words",
    "classify train": "--data words.jsonl --out runs/vessel",
    "classify predict": "others.csv -m runs/vessel -o predictions.jsonl",
    "classify eval": "-m runs/vessel --data others.csv",
    "classify map": "predictions.jsonl ais.csv -o map.html",
    "doctor": "--bundle doctor.tar.gz",
    "env": "--explain",
    "explain": "runs/mine",
    "launch": "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc 8 -- sft -c recipe.yaml",
    "launch slurm": "--nnodes 2 --nproc 8 --submit -- sft -c recipe.yaml",
    "launch k8s": "--image my/anabatic --nnodes 2 --nproc 8 -- sft -c recipe.yaml",
    "launch ray": "--nnodes 2 --nproc 8 -- sft -c recipe.yaml",
    "plan": "--chip 910B3 --npus 8 --nodes 2 -- sft -c recipe.yaml",
    "bench train": "-- sft -c recipe.yaml",
    "bench infer": "--model runs/mine --requests 32",
    "bench tokenize": "--tokenizer runs/mine/tokenizer --data corpus/",
    "bench collective": "--nproc 8 --mib 1 16 256",
    "bench scaling": "--npus 1,2,4,8 -- sft -c recipe.yaml",
    "bench io": "--model runs/mine --out /mnt/disk/bench",
    "bench compare": '--ours "sft -c recipe.yaml --out {out}" -- python peer.py',
    "checkpoint list": "runs/mine",
    "checkpoint verify": "runs/mine",
    "checkpoint export": "runs/mine --out model",
    "sim": "--npus 8 --chip 910B3 -- torchrun --nproc_per_node 8 train.py",
    "sim status": "",
    "sim clean": "",
    "monitor": "--run runs/mine",
    "recipes list": "",
    "recipes show": "qwen-lora",
    "recipes copy": "demo mine.yaml",
    "config show": "sft",
    "config check": "recipe.yaml",
    "config from-swift": "'swift sft --model Qwen/Qwen2.5-7B --dataset rows.jsonl'",
    "config from-llamafactory": "examples/train_lora/llama3_lora_sft.yaml",
    "config from-deepspeed": "ds_z3_config.json",
    "config from-nanochat": "speedrun.sh",
}
"""Command -> example arguments."""


def make_epilogue(tokens: Sequence[str], show_all: bool = False) -> str:
    """Return the epilogue of the help of a command.

    Args:
        tokens: arguments of the command line.
        show_all: the help lists all settings; otherwise the last line says how many are missing.
    """
    leading = list(takewhile(lambda token: not token.startswith("-"), tokens))
    name = next((name for name in (" ".join(leading[:2]), *leading[:1]) if name in COMMAND_EXAMPLES), "")
    if not name:
        return GENERAL_EPILOGUE
    epilogue = (
        f"For example: `anabatic {f'{name} {COMMAND_EXAMPLES[name]}'.strip()}`\n\nAdd `--debug` for the "
        f"traceback of an error."
    )
    if show_all or name not in command_table.COMMANDS or HELP_FLAGS.isdisjoint(tokens):
        return epilogue
    from anabatic.config.loading import common_settings  # the general help has none

    num_further = common_settings.count_further_settings(name)
    return f"{epilogue}\n\n{num_further} more settings: `anabatic {name} --help --all`" if num_further else epilogue


TRAIN_GROUP = Group("Train", sort_key=1)
USE_GROUP = Group("Use", sort_key=2)
MACHINE_GROUP = Group("Machine", sort_key=3)
RECIPES_GROUP = Group("Recipes", sort_key=4)
OPTIONS_GROUP = Group("Options", sort_key=5)

_JOB_COMMANDS = {
    TRAIN_GROUP: ("pretrain", "sft", "dpo", "rl", "reward"),
    USE_GROUP: ("merge", "export", "eval", "infer", "chat", "serve", "studio"),
}
"""Top-level commands of `command_table`, by help group."""

_JOB_GROUPS = {
    "tokenizer": "Train or compare tokenizers.",
    "classify": "Classify vessel trajectories.",
    "data": "Look at rows before a training reads them.",
}
"""Command group -> help: its subcommands are the rows of `command_table` that start with it."""

_JOB_MODULE = "anabatic.cli.job_command"
"""Module whose `__getattr__` returns the function of a command by its name."""

_ALL_SETTINGS = "--all"
"""Option that makes `--help` also list the rarely used settings."""

_CONVERT_PROGRAMS = (
    ("swift", "Print the recipe for a command of ms-swift."),
    ("llamafactory", "Print the recipe for a file or command of LLaMA-Factory."),
    ("deepspeed", "Print the recipe for a DeepSpeed file, or a script under a launcher."),
    ("nanochat", "Print the recipe or pipeline for commands of nanochat."),
)
"""(program, help of `config from-PROGRAM`)."""

_DOCTOR_HELP = "Check this machine: chips, driver, CANN, torch, variables, network."
_CHECKPOINT_HELP = "List, verify or export the checkpoints of a run."
_BENCH_HELP = "Benchmark training, inference, tokenization, collectives, file access, or another program."
_ENV_HELP = "Print the variables that this machine needs, for eval."


def build_app(show_all: bool = False) -> App:
    """Return the application. The module of a command is imported when the command is called.

    Args:
        show_all: the help of a command lists all of its settings, not only the common ones.
    """
    app = App(
        name="anabatic",
        help="Train language models on Ascend NPUs, NVIDIA GPUs and CPUs.",
        help_epilogue=GENERAL_EPILOGUE,
        version=__version__,
        version_flags=["--version", "-V"],
        result_action="return_value",
        default_parameter=None,
        # The default ends the process without a message; `error_report.run_with_error_report` reports one.
        suppress_keyboard_interrupt=False,
    )
    app.command("anabatic.cli.run:run", name="run", help=command_table.get_command("run").help, group=TRAIN_GROUP)
    _add_job_commands(app, show_all)
    app.command("anabatic.cli.doctor:doctor", name="doctor", help=_DOCTOR_HELP, group=MACHINE_GROUP)
    app.command("anabatic.cli.env:env", name="env", help=_ENV_HELP, group=MACHINE_GROUP)
    app.command("anabatic.cli.explain:explain", name="explain", help="Explain the errors in logs.", group=MACHINE_GROUP)
    app.command(
        "anabatic.cli.launch.command:app",
        name="launch",
        help="Run a training command in several processes or machines.",
        group=TRAIN_GROUP,
    )
    app.command(
        "anabatic.cli.plan:plan", name="plan", help="Estimate the memory and time of a training job.", group=TRAIN_GROUP
    )
    app.command("anabatic.cli.bench:app", name="bench", help=_BENCH_HELP, group=MACHINE_GROUP)
    app.command("anabatic.cli.checkpoint:app", name="checkpoint", help=_CHECKPOINT_HELP, group=USE_GROUP)
    app.command("anabatic.cli.sim:app", name="sim", help="Run any command on simulated NPUs.", group=MACHINE_GROUP)
    app.command(
        "anabatic.cli.monitor:monitor",
        name="monitor",
        help="Monitor devices and a training run.",
        group=MACHINE_GROUP,
    )
    recipes = App(name="recipes", help="List, show or copy the recipes of the package.", group=RECIPES_GROUP)
    recipes.command("anabatic.cli.recipes:list_", name="list", help="List the recipes of the package.")
    recipes.command("anabatic.cli.recipes:show", name="show", help="Print a recipe of the package, with its comments.")
    recipes.command("anabatic.cli.recipes:copy", name="copy", help="Copy a recipe of the package, to change it.")
    app.command(recipes)
    config = App(name="config", help="Show, check or convert recipes.", group=RECIPES_GROUP)
    config.command("anabatic.cli.config:show", name="show", help="Print a recipe with its settings explained.")
    config.command("anabatic.cli.config:check", name="check", help="Check recipes without running them.")
    for name, help_text in _CONVERT_PROGRAMS:
        function = f"anabatic.cli.convert:from_{name}"
        config.command(function, name=f"from-{name}", help=help_text)
    app.command(config)
    for flag in ("--help", "--version"):
        app[flag].group = OPTIONS_GROUP
    return app


def _add_job_commands(app: App, show_all: bool) -> None:
    """Add the commands with the settings of their job as options."""
    suffix = f" {_ALL_SETTINGS}" if show_all else ""
    for group, names in _JOB_COMMANDS.items():
        for name in names:
            help_line = command_table.get_command(name).help
            app.command(f"{_JOB_MODULE}:{name}{suffix}", name=name, help=help_line, group=group)
    for group_name, help_text in _JOB_GROUPS.items():
        group_app = App(name=group_name, help=help_text, group=TRAIN_GROUP)
        for name, row in command_table.COMMANDS.items():
            if name.startswith(f"{group_name} "):
                group_app.command(f"{_JOB_MODULE}:{name}{suffix}", name=name.partition(" ")[2], help=row.help)
        app.command(group_app)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0, 2 for a user error, 1 for a failure, 130 when interrupted."""
    _reopen_closed_streams()
    if (reports_folder := relaunch.get_reports_folder()) is not None:
        relaunch.die_with_parent()
        cpu_info.bind_to_cores()
        relaunch.redirect_native_stderr(reports_folder / relaunch.NATIVE_STDERR_FILE.format(log.get_rank()))
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
    code = error_report.run_with_error_report(lambda: _run_command(tokens, reports_folder is not None), debug)
    if (
        code == relaunch.EXIT_RESTART or SIGNAL_LISTENER.is_stopped
    ):  # other threads may be in a collective that the interpreter's shutdown would wait for
        relaunch.exit_process(code)
    sys.exit(code)


def _reopen_closed_streams() -> None:
    """Open the null device for closed standard streams: otherwise the next opened file gets their descriptor."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            stream = open(fd, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def _run_command(tokens: list[str], is_worker: bool) -> int:
    if is_worker:
        SIGNAL_LISTENER.start_listening()
    tokens, show_all = _take_all_settings(tokens)
    app = build_app(show_all)
    app.help_epilogue = make_epilogue(tokens, show_all)
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
    """Return the tokens without the `--all` of `--help`, and whether it was given."""
    separator = tokens.index("--") if "--" in tokens else len(tokens)
    own_tokens = tokens[:separator]
    if _ALL_SETTINGS not in own_tokens or HELP_FLAGS.isdisjoint(own_tokens):
        return tokens, False
    return [*(token for token in own_tokens if token != _ALL_SETTINGS), *tokens[separator:]], True


def _require_command_separator(app: App, tokens: list[str]) -> None:
    """Reject `sim stat`: a mistyped subcommand must not start a program of that name."""
    function, bound, _, _ = app.parse_known_args(tokens)
    if function.__name__ == "run" and bound.args:
        command = tokens[tokens.index(bound.args[0]) :]
        raise ConfigError(
            f'"{command[0]}" is neither `status` nor `clean`, and a command to run stands after --',
            shlex.join(["anabatic", *tokens[: -len(command)], "--", *command]),
        )
