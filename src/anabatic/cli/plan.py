"""`anabatic plan`: a training on paper."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from anabatic.cli.launch_words import positive, training_job
from anabatic.core.errors import ConfigError

_Word = Annotated[str | None, Parameter(negative=(), show_default=False)]
_Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


def plan(
    *command: str,
    chip: Annotated[str, Parameter(negative=())] = "910B3",
    npus: Annotated[str | None, Parameter(name=("--npus", "--nproc"), negative=())] = None,
    nodes: Annotated[str, Parameter(name=("--nodes", "--nnodes"), negative=())] = "1",
    tokens: _Word = None,
    sweep: _Switch = False,
    json: _Switch = False,
) -> int:
    """Say what memory and time COMMAND, one that trains a language model, needs, before it is queued.

    Parameters
    ----------
    command
        The command and its options, after `--`: sft -c recipe.yaml
    chip
        Of the machine it is for: 910B3, 910B4, 910C, H100; only sizes and speeds are needed, no device. here: this one.
    npus
        Devices of a machine; default: the command's device.nproc.
    nodes
        Machines.
    tokens
        Of one pass over the data, where the recipe gives no steps: 20000000
    sweep
        All strategies, recomputations and micro-batches that fit, the fastest first.
    json
        One object, bytes and seconds.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic plan --chip 910B3 --npus 8 -- sft -c recipe.yaml")
    _, job = training_job(list(command))
    from anabatic.recipes import plan as story

    devices = positive("npus", npus) if npus is not None else job.device.nproc
    total = positive("tokens", tokens) if tokens is not None else None
    place = story.place_of(job, chip, devices, positive("nodes", nodes))
    return story.run(job, place, total, json, sweep)
