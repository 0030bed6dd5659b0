"""`anabatic plan`: estimate memory and time of a training."""

from __future__ import annotations

from typing import Annotated

from anabatic.cli.launch.option_parsing import parse_positive_int, resolve_training_job
from anabatic.cli.parsing.function_command import OptionNames
from anabatic.core import log
from anabatic.core.errors import ConfigError


def plan(
    *command: str,
    chip: str = "910B3",
    npus: Annotated[str | None, OptionNames(("--npus", "--nproc"))] = None,
    nodes: Annotated[str, OptionNames(("--nodes", "--nnodes"))] = "1",
    tokens: str | None = None,
    sweep: bool = False,
    layouts: bool = False,
    scale: str | None = None,
    assume: str | None = None,
    plot: str | None = None,
    json: bool = False,
) -> int:
    """Estimate the memory and time of a training COMMAND before it is queued.

    Parameters
    ----------
    command
        Command and options, after `--`: sft -c recipe.yaml
    chip
        Target chip: 910B3, 910B4, 910C, H100 and others. No device is needed; `here` uses this machine's.
    npus
        Devices per machine; default: the command's device.nproc, with --scale those of a server with this chip.
    nodes
        Number of machines.
    tokens
        Tokens of one epoch, if the recipe sets no number of steps: 20000000
    sweep
        List all strategies, recomputations and micro-batches that fit, fastest first.
    layouts
        List every mesh (pipeline, replicate, context, expert, tensor) that fits, with its fastest settings.
    scale
        Estimate speed-up and efficiency on 1, 2, 4 and more devices, up to this number.
    assume
        Losses for --scale (slow machines, links, checkpoints, failures): restart_minutes=30,contention=0.3 or ideal.
    plot
        SVG file to draw: memory and speed of all settings that fit, or the scaling.
    json
        Print one JSON object, in bytes and seconds.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic plan --chip 910B3 --npus 8 -- sft -c recipe.yaml")
    row, job = resolve_training_job(list(command))
    from anabatic.config.rl import RlJob
    from anabatic.plan import scale_losses
    from anabatic.recipes import plan_command
    from anabatic.recipes.prechecks import jobs

    epoch_tokens = parse_positive_int("tokens", tokens) if tokens is not None else None
    plot_file = svg_file(plot) if plot is not None else None
    if assume is not None and scale is None:
        raise ConfigError("--assume goes with --scale", "add --scale 4096, or leave out --assume")
    warnings = jobs.require_to_plan(row.name, job)
    if layouts and (sweep or isinstance(job, RlJob)):
        raise ConfigError(
            "--layouts goes without --sweep" if sweep else "--layouts does not list those of rl",
            "leave out --sweep" if sweep else "leave it out: rl has whole weights on every device, or tensor ranks",
        )
    if scale is not None:
        if sweep or layouts or nodes != "1" or chip == plan_command.LOCAL_CHIP:
            raise ConfigError(
                "--scale goes with --chip NAME and --npus alone", "leave out --sweep, --layouts, --nodes, --chip here"
            )
        devices_per_machine = (
            parse_positive_int("npus", npus) if npus is not None else plan_command.devices_per_server(chip)
        )
        cluster = plan_command.find_machine(job, chip, devices_per_machine, 1)
        code = plan_command.print_scaling(
            job,
            cluster,
            parse_positive_int("scale", scale),
            epoch_tokens,
            json,
            plot_file,
            scale_losses.parse_assumptions(assume or ""),
        )
    else:
        devices = parse_positive_int("npus", npus) if npus is not None else job.device.nproc
        cluster = plan_command.find_machine(job, chip, devices, parse_positive_int("nodes", nodes))
        code = plan_command.run(job, cluster, epoch_tokens, json, sweep, plot_file, layouts)
    for warning in warnings:
        log.warn(warning)
    return code


def svg_file(text: str) -> str:
    """Check that a file name ends in `.svg`, and return it."""
    if not text.lower().endswith(".svg"):
        raise ConfigError(f"--plot is {text!r}", "the picture is an SVG file: --plot plan.svg")
    return text
