"""`anabatic plan`: a training on paper, before it is queued. No torch, no weights."""

from __future__ import annotations

import json
import sys
from typing import Any

from anabatic.config import deepspeed
from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean
from anabatic.device import table
from anabatic.device.table import Chip
from anabatic.plan import fit, known, setup, show
from anabatic.plan.shape import Shape

SEGMENTS = 8
"""Of each rank in a step, where the global batch is left open."""
PLANNED = ("pretrain", "sft", "dpo")
"""Commands whose memory is known here."""


def run(name: str, job: Any, chip: str, npus: int, nodes: int, tokens: int | None, as_json: bool, sweep: bool) -> int:
    """Print the plan of a resolved job; return 0, or 1 when it does not fit.

    Args:
        name: of its command.
        tokens: of the whole run, where the recipe gives no steps.

    Raises:
        ConfigError: the command, the chip or the sizes cannot be planned.
    """
    if name not in PLANNED:
        raise ConfigError(f"{name} cannot be planned", f"these can: {', '.join(PLANNED)}")
    plan = on_paper(job, _chip(chip), npus, nodes, tokens)
    if as_json:
        sys.stdout.write(json.dumps(show.data(plan)) + "\n")
    else:
        found = show.sweep(plan) if sweep else show.lines(plan, model=name == "pretrain")
        sys.stdout.write("\n".join(found) + "\n")
    return 0 if plan.choice.fits else 1


def on_paper(job: Any, chip: Chip, npus: int, nodes: int = 1, tokens: int | None = None) -> show.Plan:
    """Return the plan of a resolved job.

    Raises:
        ConfigError, DataError: the model is not known here, or the sizes cannot be planned.
    """
    shape, source = known.of_job(job)
    world = npus * nodes
    if world % job.parallel.tensor:
        raise ConfigError(
            f"parallel.tensor {job.parallel.tensor} does not divide {world} devices",
            "choose it among the divisors of --npus times --nodes",
        )
    ranks = world // job.parallel.tensor
    job, _, _ = deepspeed.apply(job, ranks)
    assumed: list[str] = []
    step = job.batch.global_batch_tokens
    if step is None:
        step = max(SEGMENTS * job.batch.seq_len, job.batch.micro_batch_tokens or 0) * ranks
        assumed.append(f"batch.global_batch_tokens {step}")
    row = table.row_of(chip)
    half = job.device.dtype != "fp32"
    micro = job.batch.micro_batch_tokens
    base = setup.of(job, shape, ranks, row, half, micro or job.batch.seq_len, 1)
    if micro is None:
        choice = fit.largest(base, step, chip)
        assumed.append(f"batch.micro_batch_tokens {choice.setup.micro_tokens}, the largest that fits")
    else:
        choice = fit.judge(setup.of(job, shape, ranks, row, half, micro, max(1, step // (micro * ranks))), chip)
    steps = _steps(job, shape, tokens, choice.clock.tokens)
    return show.Plan(source, chip, npus, nodes, choice, fit.alternatives(base, step, chip), steps, assumed)


def _steps(job: Any, shape: Shape, tokens: int | None, step: int) -> int:
    """Of the run, 0 where only the data would tell."""
    if job.schedule.max_steps is not None:
        return int(job.schedule.max_steps)
    if tokens is not None:
        return max(1, round(tokens * (job.schedule.epochs or 1) / step))
    if job.schedule.epochs is None:
        return max(1, round((job.schedule.tokens_per_param or 12) * shape.multiplying / step))
    return 0


def _chip(name: str) -> Chip:
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
