"""`anabatic plan`: a training on paper, before it is queued. No torch, no weights."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from anabatic.config import deepspeed
from anabatic.config.classify_train import WordsJob
from anabatic.config.rl import RlJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.paths import write_atomic
from anabatic.core.text import did_you_mean
from anabatic.device import table
from anabatic.device.table import Chip
from anabatic.plan import cost, fit, here, known, picture, scale, setup, show
from anabatic.plan.around import around
from anabatic.plan.setup import Setup
from anabatic.plan.shape import Shape
from anabatic.recipes import length

SEGMENTS = 8
"""Of each rank in a step, where the global batch is left open."""


MOST = 1_000_000
"""Devices; what is known of networks ends long before."""
HERE = "here"
"""In place of a chip's name: this machine's."""

_OTHER_PLOT = "name a file in a folder that is there and yours with --plot FILE.svg"


@dataclass(frozen=True)
class Place:
    """Where a job is planned for: so many devices of a chip on each of so many machines."""

    chip: Chip
    npus: int
    nodes: int = 1
    said: str = ""
    """What says so, where the user has not."""


def run(
    job: Any,
    place: Place,
    tokens: int | None = None,
    as_json: bool = False,
    sweep: bool = False,
    plot: str | None = None,
) -> int:
    """Print the plan of a resolved job; return 0, or 1 when it does not fit.

    Args:
        tokens: of one pass over the data, where the recipe gives no steps.
        plot: SVG file for the picture of all that fits.

    Raises:
        ConfigError: the sizes cannot be planned.
        Failure: the picture cannot be written.
    """  # fmt: skip
    plan = on_paper(job, place, tokens)
    if plot is not None:
        write_atomic(Path(plot), picture.frontier(plan), _OTHER_PLOT)
    if as_json:
        sys.stdout.write(json.dumps(show.data(plan)) + "\n")
    else:
        found = show.sweep(plan) if sweep else show.lines(plan, model=not isinstance(job.model, str))
        sys.stdout.write("\n".join(found) + "\n")
    return 0 if plan.choice.fits else 1


def scaled(
    job: Any, place: Place, most: int, tokens: int | None = None, as_json: bool = False, plot: str | None = None
) -> int:
    """Print what a resolved job gains by more and more devices; return 0, or 1 when it fits on none.

    Where the recipe gives the tokens of a step they are divided (strong scaling), else each device has as many (weak).

    Args:
        most: devices; place.npus: of a machine.
        plot: SVG file for the picture.

    Raises:
        ConfigError: the sizes cannot be planned.
        Failure: the picture cannot be written.
    """
    given = getattr(job.batch, "global_batch_tokens", None)
    plans = []
    for count in scale.counts(place.npus, most, job.parallel.tensor):
        there = replace(place, npus=min(count, place.npus), nodes=max(1, count // place.npus))
        plan = on_paper(job, there, tokens)
        if given is not None and plan.choice.clock.tokens > given:
            break  # less than a row for each
        plans.append(plan)
    rows = scale.held(plans)
    if not rows:
        log.warn(f"the job fits on no number of {place.chip.name} up to {most:,}, in whatever way it is divided")
        return 1
    if plot is not None:
        title = f"{place.chip.name}, on paper: {scale.told(rows)}"
        write_atomic(Path(plot), picture.scaling(rows, title), _OTHER_PLOT)
    if as_json:
        sys.stdout.write(json.dumps(scale.data(rows, place.chip)) + "\n")
    else:
        sys.stdout.write("\n".join(scale.lines(rows)) + "\n")
    return 0


def dry_run(job: Any) -> int:
    """Print the plan of a job as it would run here; return 0, or 1 when it does not fit."""
    return run(job, place_of(job, HERE, job.device.nproc, 1))


def place_of(job: Any, chip: str, npus: int, nodes: int) -> Place:
    """Return where a job is planned for: devices of the chip with that name, or of this machine."""
    if npus * nodes > MOST:
        raise ConfigError(f"{npus:,} devices x {nodes:,} machines is more than {MOST:,}", "plan a smaller job")
    if chip == HERE:
        found, said = here.chip_of(job.device.type, npus)
        return Place(found, npus, nodes, said)
    return Place(chip_named(chip), npus, nodes)


def devices_of_a_server(chip: str) -> int:
    """Return how many devices a server of a chip has."""
    return cost.rates(chip_named(chip)).server


def on_paper(job: Any, place: Place, tokens: int | None = None) -> show.Plan:
    """Return the plan of a resolved job.

    Raises:
        ConfigError, DataError: the model is not known here, the chip trains nothing, or the sizes cannot be planned.
    """
    shape, source = known.of_job(job)
    chip, world = place.chip, place.npus * place.nodes
    if not chip.trains:
        raise ConfigError(
            f"{chip.name} is made for inference, and this is a training",
            "plan it for 910B4, 910B3 or 910C; a trained model may be asked on it: `anabatic export --dtype fp16`",
        )
    if world % job.parallel.tensor:
        raise ConfigError(
            f"parallel.tensor {job.parallel.tensor} does not divide {world} devices",
            "choose it among the divisors of --npus times --nodes",
        )
    ranks = world // job.parallel.tensor
    job, _, _ = deepspeed.apply(length.follow(job, shape.positions or None), ranks)
    assumed: list[str] = []
    row = table.row_of(chip)
    half = (row.dtype if job.device.dtype == "auto" else job.device.dtype) != "fp32"
    base = setup.of(job, shape, ranks, row, half, job.batch.length, 1)
    setup.require_possible(base)
    micro, step = _sizes(job, base, assumed)
    if micro is None:
        choice = fit.largest(base, step, chip)
        told = "the largest that fits" if choice.fits else "the smallest"
        assumed.append(f"batch.micro_batch_tokens {choice.setup.micro_tokens}, {told}")
    else:
        choice = fit.judge(replace(base, micro_tokens=micro, micro_steps=max(1, step // (micro * ranks))), chip)
    if job.batch.global_batch_tokens not in (None, choice.clock.tokens) and not isinstance(job, RlJob):
        told = f"batch.global_batch_tokens {step} is no multiple of {ranks} ranks x {choice.setup.micro_tokens} tokens"
        assumed.append(f"a step of {choice.clock.tokens} tokens; {told}, and a training refuses it")
    steps = _steps(job, shape, tokens, choice.clock.tokens)
    fixed = micro if isinstance(job, RlJob) else None
    fitting = [one for one in fit.fitting(base, step, chip, fixed) if _answers(job, one)]
    beside = around(choice.setup, job, chip, place.npus, steps * choice.clock.step, tokens)
    return show.Plan(source, chip, place.npus, place.nodes, choice, fitting, steps, assumed, beside, place.said)


def _sizes(job: Any, base: Setup, assumed: list[str]) -> tuple[int | None, int]:
    """Tokens of a micro-batch, None where they are left open, and of a step."""
    if isinstance(job, RlJob):
        each = job.device_batch_size * job.batch.length
        answers = job.examples_per_step * job.num_samples // job.updates
        assumed.append(f"{job.device_batch_size} answers of batch.seq_len {job.batch.length} tokens, the longest")
        assumed.append("the time to draw and judge answers is not counted; their cache is freed before the update")
        return each, answers * job.batch.length
    micro, step = job.batch.micro_batch_tokens, job.batch.global_batch_tokens
    if step is None and isinstance(job, WordsJob):
        step = max(job.batch.rows * job.batch.length, base.ranks * base.least)
        assumed.append(f"batch.rows {job.batch.rows} of batch.seq_len {job.batch.length} words, the longest")
    elif step is None:
        step = max(SEGMENTS * base.least, micro or 0) * base.ranks
        assumed.append(f"batch.global_batch_tokens {step}")
    return micro, step


def _answers(job: Any, one: fit.Choice) -> bool:
    """Whether a way is one that the command has: answers are drawn from whole weights."""
    return not (isinstance(job, RlJob) and one.setup.sharded)


def _steps(job: Any, shape: Shape, tokens: int | None, step: int) -> int:
    """Of the run, 0 where only the data would tell."""
    if job.schedule.max_steps is not None:
        return int(job.schedule.max_steps)
    if tokens is not None:
        return max(1, round(tokens * (job.schedule.epochs or 1) / step))
    if job.schedule.epochs is None:
        return max(1, round((job.schedule.tokens_per_param or 12) * shape.multiplying / step))
    return 0


def chip_named(name: str) -> Chip:
    """The chip called `910B3`, `Ascend910B3`, `910C` or `H100`.

    Raises:
        ConfigError: there is none.
    """
    wanted = name.lower().replace(" ", "")
    rows = {chip.name: chip for chip in table.CHIPS}
    ends = [chip for title, chip in rows.items() if title.lower().replace(" ", "").endswith(wanted)]
    first = [chip for title, chip in rows.items() if wanted in title.lower().replace(" ", "")]
    if wanted == "910c":
        return rows["Ascend910_9391"]
    if not wanted or not (ends or first):
        raise ConfigError(f"no chip {name!r} is known.{did_you_mean(name, rows)}", f"these are: {', '.join(rows)}")
    return (ends or first)[0]
