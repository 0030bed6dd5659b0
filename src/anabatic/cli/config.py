"""`anabatic config show|check`: explain and check recipes without running them."""

from __future__ import annotations

import sys
from typing import Any

from anabatic.config.loading import command_table, settings, shipped_recipes
from anabatic.convert.file_detection import OWN_PROGRAM, accepts_settings, detect_tree, is_complete_job
from anabatic.core.errors import ConfigError


def show(
    *words: str,
    all_: bool = False,
    resolved: bool = False,
    chip: str | None = None,
    npus: str | None = None,
    nodes: str | None = None,
) -> None:
    """Print a recipe of COMMAND: its common settings, their defaults and meanings.

    With --resolved, print the settings a training will run with, and where each value comes from.

    Parameters
    ----------
    words
        Command, for example `pretrain` or `tokenizer train`; with --resolved followed by its options, after `--`.
    all_
        Print every setting.
    resolved
        Print the settings a training will run with: config show --resolved -- sft -c recipe.yaml
    chip
        Target chip for --resolved; default: this machine's.
    npus
        Devices per machine, for --resolved; default: the command's device.nproc.
    nodes
        Number of machines, for --resolved; default: 1.
    """
    if not words:
        raise ConfigError("which command?", f"one of: {', '.join(command_table.COMMANDS)}")
    if resolved:
        sys.stdout.write(_render_resolved(list(words), chip, npus, nodes))
        return
    if chip or npus or nodes:
        raise ConfigError("--chip, --npus and --nodes go with --resolved", "add --resolved, or leave them out")
    render = settings.render_template if all_ else settings.render_common_template
    sys.stdout.write(render(" ".join(words)))


def _render_resolved(words: list[str], chip: str | None, npus: str | None, nodes: str | None) -> str:
    from anabatic.cli.launch import option_parsing
    from anabatic.plan import model_facts
    from anabatic.recipes import plan_command, resolved_settings
    from anabatic.recipes.prechecks import jobs

    row, options = option_parsing.parse_training_command(words)
    job = options.load_job(row.name)
    if (name := model_facts.model_name(job)) and (missing := jobs.find_missing_model(name, getattr(job, "hub", None))):
        raise missing
    count = job.device.nproc if npus is None else option_parsing.parse_positive_int("npus", npus)
    machines = 1 if nodes is None else option_parsing.parse_positive_int("nodes", nodes)
    machine = plan_command.find_machine(job, chip or plan_command.LOCAL_CHIP, count, machines)
    return resolved_settings.render_resolved(job, machine, options.find_origins())


def check(*files: str, command: str | None = None) -> None:
    """Check recipes without running them.

    Parameters
    ----------
    files
        Recipe files (YAML).
    command
        Command the recipes are for; default: detected from their keys.
    """
    if not files:
        raise ConfigError("which file?", "give one or more recipes")
    for file in files:
        tree = shipped_recipes.read_recipe(file).tree
        detected = None if command else detect_tree(tree)
        if detected is not None and detected.program != OWN_PROGRAM:
            from anabatic.cli.usage import usage_hints  # reads the tables of other programs

            raise usage_hints.explain_misplaced_file(file, "")
        names = [command] if command else _find_matching_commands(tree)
        commands = [f"`anabatic {name}{_check_recipe(file, name)}`" for name in names]
        sys.stdout.write(f"{file}: a good recipe for {', '.join(commands)}\n")


def schema(*words: str) -> None:
    """Print the JSON schema of COMMAND's recipes, for validation and completion in editors.

    The recipes in the package refer to their schema in a line for editors with YAML support: # yaml-language-server

    Parameters
    ----------
    words
        Command, for example `sft` or `tokenizer train`.
    """
    from anabatic.config.loading import json_schema

    if not words:
        raise ConfigError("which command?", f"one of: {', '.join(command_table.COMMANDS)}")
    sys.stdout.write(json_schema.render_schema(" ".join(words)))


def _check_recipe(file: str, name: str) -> str:
    """Check one recipe; return the options that the user must still set."""
    job = settings.load_job(name, [file])
    if name != "run":
        return ""
    from anabatic.recipes.pipeline import runner

    empty = [key for key, value in job.vars.items() if not value]
    runner.plan_stages(job, {key: f"value-of-{key}" for key in empty})
    return "".join(f" --set {key}=..." for key in empty)


def _find_matching_commands(tree: dict[str, Any]) -> list[str]:
    """Return the commands that accept `tree`; if none does, the one that accepts most of its keys."""
    num_accepted = {
        name: sum(accepts_settings(name, {key: value}) for key, value in tree.items())
        for name in command_table.COMMANDS
    }
    complete = [name for name in command_table.COMMANDS if is_complete_job(name, tree)]
    return complete or [max(num_accepted, key=lambda name: num_accepted[name])]
