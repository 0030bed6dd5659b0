"""The commands of the program: name -> help, group, example and where it is implemented. Modules are named, not
imported: only that of the command that is called is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from anabatic.cli.parsing.command_line import (
    Command,
    ParsedLine,
    UnknownCommandError,
    UnknownOptionError,
    UsageError,
    is_option,
    parse_tokens,
    split_at_separator,
)
from anabatic.config.loading import command_table
from anabatic.config.loading.command_package import (
    MACHINE,
    RECIPES,
    TRAIN,
    USE,
    CommandEntry,
    CommandPackage,
    CommandTable,
    import_attribute,
)


def _job(name: str, group: str = "", example: str = "") -> CommandEntry:
    return CommandEntry(name, command_table.COMMANDS[name].help, group, example)


_ENTRIES = (
    CommandEntry("run", command_table.COMMANDS["run"].help, TRAIN, "demo", "anabatic.cli.run:run"),
    _job("pretrain", TRAIN, "--tokenizer runs/mine/tokenizer --data corpus/ --model.depth 6"),
    _job("sft", TRAIN, "--model Qwen/Qwen2.5-0.5B --data chats.jsonl --tuner lora --out runs/mine"),
    _job("dpo", TRAIN, "--model runs/mine --data pairs.jsonl --out runs/dpo"),
    _job("rl", TRAIN, "--model runs/mine --data task:arithmetic --out runs/rl"),
    _job("reward", TRAIN, "--model runs/mine --data pairs.jsonl --out runs/reward"),
    CommandEntry("tokenizer", "Train or compare tokenizers.", TRAIN),
    _job("tokenizer train", example="--data.train corpus/ --vocab-size 16384 --out runs/mine/tokenizer"),
    _job("tokenizer eval", example="--tokenizers runs/mine/tokenizer models/other --data.valid unseen.txt"),
    CommandEntry("data", "Look at, measure and check data before a training reads it.", TRAIN),
    _job("data preview", example="chats.jsonl -m Qwen/Qwen2.5-0.5B"),
    _job("data stats", example="chats.jsonl -m Qwen/Qwen2.5-0.5B --seq-len 2048"),
    _job("data check", example="chats.jsonl --held-out unseen.jsonl"),
    _job("data tokenize", example="corpus/ --tokenizer runs/mine/tokenizer --engine ray"),
    CommandEntry("vision", "Draw pictures with questions, build a small model that sees, score its answers.", TRAIN),
    _job("vision draw", example="--out runs/pictures"),
    _job("vision build", example="--tokenizer runs/mine/tokenizer --out runs/untrained"),
    _job("vision score", example="--rows held_out.jsonl --answers answers.jsonl --without answers_text.jsonl"),
    CommandEntry(
        "plan",
        "Estimate the memory and time of a training job.",
        TRAIN,
        "--chip 910B3 --npus 8 --nodes 2 -- sft -c recipe.yaml",
        "anabatic.cli.plan:plan",
    ),
    CommandEntry(
        "launch",
        "Run a training command in several processes or machines.",
        TRAIN,
        "--nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc 8 -- sft -c recipe.yaml",
        "anabatic.cli.launch.command:run",
    ),
    CommandEntry(
        "launch slurm",
        "Print a batch script for Slurm that runs COMMAND, or submit it.",
        example="--nnodes 2 --nproc 8 --submit -- sft -c recipe.yaml",
        target="anabatic.cli.launch.command:slurm",
    ),
    CommandEntry(
        "launch k8s",
        "Write a Volcano Job or PyTorchJob, or submit it.",
        example="--image my/anabatic --nnodes 2 --nproc 8 -- sft -c recipe.yaml",
        target="anabatic.cli.launch.k8s:K8S",
    ),
    CommandEntry(
        "launch ray",
        "Run COMMAND on the nodes of a Ray cluster.",
        example="--nnodes 2 --nproc 8 -- sft -c recipe.yaml",
        target="anabatic.cli.launch.ray:ray",
    ),
    _job("chat", USE, '-m runs/mine -p "What did you read?"'),
    _job("infer", USE, "-m runs/mine rows.jsonl -o answers.jsonl"),
    _job("eval", USE, "runs/mine --data.valid unseen.txt"),
    _job("serve", USE, "runs/mine --port 8000"),
    CommandEntry(
        "report",
        "Write the report of a run again, or compare several runs on one page.",
        USE,
        "runs/one runs/two",
        "anabatic.cli.report:report",
    ),
    _job("merge", USE, "--model runs/mine --out runs/merged"),
    _job("export", USE, "runs/mine --out exported"),
    _job("push", USE, "runs/mine --to OWNER/NAME"),
    CommandEntry("checkpoint", "List, verify or export the checkpoints of a run.", USE),
    CommandEntry(
        "checkpoint list", "List the checkpoints of a run.", "", "runs/mine", "anabatic.cli.checkpoint:list_checkpoints"
    ),
    CommandEntry(
        "checkpoint verify",
        "Compare every file with its size and checksum.",
        example="runs/mine",
        target="anabatic.cli.checkpoint:verify",
    ),
    _job("checkpoint export", example="runs/mine --out model"),
    CommandEntry(
        "doctor",
        "Check this machine: chips, driver, CANN, torch, variables, network.",
        MACHINE,
        "--bundle doctor.tar.gz",
        "anabatic.cli.doctor:doctor",
    ),
    CommandEntry(
        "env", "Print the variables that this machine needs, for eval.", MACHINE, "--explain", "anabatic.cli.env:env"
    ),
    CommandEntry("explain", "Explain the errors in logs.", MACHINE, "runs/mine", "anabatic.cli.explain:explain"),
    CommandEntry(
        "monitor",
        "Monitor devices and a training run.",
        MACHINE,
        "--run runs/mine",
        "anabatic.cli.monitor:monitor",
    ),
    CommandEntry(
        "bench",
        "Benchmark training, inference, tokenization, collectives, file access, or another program.",
        MACHINE,
    ),
    CommandEntry(
        "bench train",
        "Measure steps of COMMAND, one that trains.",
        example="-- sft -c recipe.yaml",
        target="anabatic.cli.bench:TRAIN",
    ),
    _job("bench infer", example="--model runs/mine --requests 32"),
    _job("bench tokenize", example="--tokenizer runs/mine/tokenizer --data corpus/"),
    _job("bench collective", example="--nproc 8 --mib 1 16 256"),
    CommandEntry(
        "bench scaling",
        "Measure COMMAND on more and more devices of this machine.",
        example="--npus 1,2,4,8 -- sft -c recipe.yaml",
        target="anabatic.cli.bench:SCALING",
    ),
    _job("bench io", example="--model runs/mine --out /mnt/disk/bench"),
    CommandEntry(
        "bench compare",
        "Measure a command of ours and COMMAND, any program, in turn.",
        example='--ours "sft -c recipe.yaml --out {out}" -- python peer.py',
        target="anabatic.cli.bench:COMPARE",
    ),
    CommandEntry("recipes", "List, show or copy the recipes of the package.", RECIPES),
    CommandEntry("recipes list", "List the recipes of the package.", target="anabatic.cli.recipes:list_recipes"),
    CommandEntry(
        "recipes show",
        "Print a recipe of the package, with its comments.",
        example="qwen-lora",
        target="anabatic.cli.recipes:show",
    ),
    CommandEntry(
        "recipes copy",
        "Copy a recipe of the package, to change it.",
        example="demo mine.yaml",
        target="anabatic.cli.recipes:copy",
    ),
    CommandEntry(
        "help",
        "Print a page of the documentation, or search it.",
        MACHINE,
        "fine-tuning",
        "anabatic.cli.help_topics:help_",
    ),
    CommandEntry(
        "completion",
        "Print a script that makes a shell complete commands and options.",
        MACHINE,
        "bash",
        "anabatic.cli.completion:completion",
    ),
    CommandEntry(
        "completion words",
        "Print what may stand in place of the last word: what the scripts ask for.",
        example="-- sft --optim.",
        target="anabatic.cli.completion:print_words",
    ),
    CommandEntry("config", "Show, check or convert recipes.", RECIPES),
    CommandEntry(
        "config show",
        "Print a recipe with its settings explained.",
        example="sft",
        target="anabatic.cli.config:show",
    ),
    CommandEntry(
        "config check",
        "Check recipes without running them.",
        example="recipe.yaml",
        target="anabatic.cli.config:check",
    ),
    CommandEntry(
        "config schema",
        "Print the JSON schema of a command's recipes, for editors.",
        example="sft",
        target="anabatic.cli.config:schema",
    ),
    CommandEntry(
        "config from-swift",
        "Print the recipe for a command of ms-swift.",
        example="'swift sft --model Qwen/Qwen2.5-7B --dataset rows.jsonl'",
        target="anabatic.cli.convert:from_swift",
    ),
    CommandEntry(
        "config from-llamafactory",
        "Print the recipe for a file or command of LLaMA-Factory.",
        example="examples/train_lora/llama3_lora_sft.yaml",
        target="anabatic.cli.convert:from_llamafactory",
    ),
    CommandEntry(
        "config from-deepspeed",
        "Print the recipe for a DeepSpeed file, or a script under a launcher.",
        example="ds_z3_config.json",
        target="anabatic.cli.convert:from_deepspeed",
    ),
    CommandEntry(
        "config from-nanochat",
        "Print the recipe or pipeline for commands of nanochat.",
        example="speedrun.sh",
        target="anabatic.cli.convert:from_nanochat",
    ),
)


def _list_entries(package: CommandPackage) -> list[CommandEntry]:
    helps = {command.name: command.help for command in package.commands}
    return [replace(entry, help=entry.help or helps[entry.name]) for entry in package.entries]


COMMANDS = CommandTable(_ENTRIES, _list_entries)


def is_job(entry: CommandEntry) -> bool:
    """Return whether a command runs a job of `command_table`: its options are the job's settings."""
    return not entry.target and entry.name in command_table.COMMANDS


def list_subcommands(name: str) -> list[CommandEntry]:
    """Return the commands one word below `name`; below the empty name those of the program."""
    prefix = f"{name} " if name else ""
    return [
        entry
        for entry in COMMANDS.values()
        if entry.name.startswith(prefix) and " " not in entry.name[len(prefix) :] and entry.name != name
    ]


def split_name(tokens: Sequence[str]) -> tuple[str, list[str]]:
    """Return the longest name of a command that the tokens begin with, and the tokens behind it."""
    name, rest = "", list(tokens)
    while rest and (longer := f"{name} {rest[0]}" if name else rest[0]) in COMMANDS:
        name, rest = longer, rest[1:]
    return name, rest


def find_command(tokens: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command that a command line begins with, and the tokens behind it.

    The name may be that of a group, or empty: then nothing but options is left.

    Raises:
        UnknownCommandError: the first word is not a command, or not one of its group.
    """
    name, rest = split_name(tokens)
    if not is_callable(name) and rest and not is_option(rest[0]):
        error = UnknownCommandError(rest[0], [entry.last_word for entry in list_subcommands(name)])
        error.command = name
        raise error
    return name, rest


_INFORMATION_OPTIONS = {"--help": "help", "-h": "help", "--version": "version", "-V": "version"}


def find_information_option(tokens: Sequence[str]) -> str:
    """Return `help` or `version` if an option before `--` asks for it, as it can with every command; else nothing."""
    own, _ = split_at_separator(tokens)
    return next((_INFORMATION_OPTIONS[token] for token in own if token in _INFORMATION_OPTIONS), "")


def is_callable(name: str) -> bool:
    """Return whether a command does something itself, and is not only a group."""
    entry = COMMANDS.get(name)
    return entry is not None and (bool(entry.target) or is_job(entry))


def reject_option(name: str, token: str) -> NoReturn:
    """Raise the error for an option behind a group of commands, which has none."""
    error = UnknownOptionError(token.partition("=")[0])
    error.command = name
    raise error


def load_command(name: str, show_all: bool = False) -> Command:
    """Import and return a command.

    Args:
        name: one of `COMMANDS` that is callable.
        show_all: its help lists the rarely used settings, too.
    """
    entry = COMMANDS[name]
    if is_job(entry):
        from anabatic.cli import job_command

        return job_command.make_job_command(name, show_all)
    target = import_attribute(entry.target)
    if isinstance(target, Command):
        return target
    from anabatic.cli.parsing.function_command import make_function_command

    return make_function_command(target)


def parse_command(name: str, tokens: Sequence[str]) -> tuple[Command, ParsedLine]:
    """Return a command and what the tokens behind its name say.

    Raises:
        UsageError: the command does not accept them.
    """
    command = load_command(name, show_all=True)  # which options are common only matters to a help page
    try:
        return command, parse_tokens(tokens, command.interface)
    except UsageError as error:
        error.command = name
        raise
