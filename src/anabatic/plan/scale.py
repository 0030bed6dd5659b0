"""A job on paper on more and more devices: the same way of dividing it, inside one machine and then between machines.

Links and latencies are those of `cost.py`, as for everything else: HCCS or NVLink inside a machine, 25 GB/s a device
between them. What grows with the number of devices is only what the links carry; the stragglers, congested switches and
failures of large machines are not in there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabatic.core.text import duration
from anabatic.device.table import Chip
from anabatic.plan.fit import Choice, binding, way_of
from anabatic.plan.show import Plan, described, way


@dataclass(frozen=True)
class Scaled:
    """A job on so many devices.

    Attributes:
        speed_up: tokens a second against the fewest devices; efficiency: that over what the numbers promise.
        waiting, updating: shares of a step in which devices wait for links, and update weights.
        run: seconds of the whole run; 0: not known.
    """

    devices: int
    machines: int
    choice: Choice
    speed_up: float
    efficiency: float
    waiting: float
    updating: float
    run: float


def counts(machine: int, most: int, step: int) -> list[int]:
    """Return numbers of devices: doubled up to a machine, then doubled machines; multiples of `step`.

    Args:
        machine: devices of one.
    """
    inside = [1 << power for power in range(machine.bit_length()) if 1 << power < machine]
    between = [machine << power for power in range(max(1, most).bit_length()) if machine << power <= most]
    return [count for count in [*inside, *between] if count <= most and count % step == 0]


def held(plans: Sequence[Plan]) -> list[Scaled]:
    """Compare plans of one job, the fewest devices first, all divided in the way that is taken on the most of them.

    That is the job's own where it fits there, else the fastest. Fewer devices than it fits on are left out.
    """
    most = next((plan for plan in reversed(plans) if plan.choice.fits or plan.fitting), None)
    if most is None:
        return []
    model = most.choice if most.choice.fits else most.others[0]
    divided = len({plan.choice.clock.tokens for plan in plans}) == 1
    found: list[Scaled] = []
    for plan in plans[: plans.index(most) + 1]:
        choice = _like(model, plan, divided)
        if choice is None:
            continue
        devices = plan.npus * plan.nodes
        base = found[0] if found else None
        up = choice.tokens_per_s / base.choice.tokens_per_s if base else 1.0
        efficiency = up * base.devices / devices if base else 1.0
        waiting, updating = (part / choice.clock.step for part in (choice.clock.exposed, choice.clock.update))
        run = plan.steps * choice.clock.step
        found.append(Scaled(devices, plan.nodes, choice, up, efficiency, waiting, updating, run))
    return found


def _like(model: Choice, plan: Plan, divided: bool) -> Choice | None:
    """The plan's choice of the same way, None where none fits.

    The micro-batch is the same; where a step's tokens are divided, and a rank has fewer and fewer, the fastest.
    """
    fitting = [plan.choice, *plan.fitting] if plan.choice.fits else plan.fitting
    same = [one for one in fitting if way_of(one.setup) == way_of(model.setup)]
    size = model.setup.micro_tokens
    return max(
        (one for one in same if divided or one.setup.micro_tokens == size),
        key=lambda one: one.tokens_per_s,
        default=None,
    )


def told(rows: Sequence[Scaled]) -> str:
    """Return what is held and what grows."""
    tokens = {row.choice.clock.tokens for row in rows}
    settings = way(replace(rows[-1].choice.setup, micro_steps=1)).rpartition(" x ")[0]
    if len(rows) == 1:
        return f"{settings}; {max(tokens):,} tokens a step"
    if len(tokens) == 1:
        return f"{settings.rpartition(', ')[0]}; {max(tokens):,} tokens a step for all (strong scaling)"
    each = rows[0].choice.clock.tokens // rows[0].devices
    return f"{settings}; {each:,} tokens a step for each device (weak scaling)"


def data(rows: Sequence[Scaled], chip: Chip) -> dict[str, Any]:
    """The table for programs: seconds and shares."""
    return {
        "chip": chip.name,
        "held": told(rows),
        "rows": [
            {
                "devices": row.devices,
                "machines": row.machines,
                "speed_up": row.speed_up,
                "efficiency": row.efficiency,
                "waiting": row.waiting,
                "updating": row.updating,
                "run_seconds": row.run or None,
                "tokens": row.choice.clock.tokens,
                **described(row.choice, chip),
            }
            for row in rows
        ],
    }


def lines(rows: Sequence[Scaled]) -> Iterator[str]:
    """The table for people."""
    yield told(rows)
    yield ""
    head = f"{'devices':>7} {'machines':>8} {'tokens/s':>12} {'tokens a step':>13} {'speed-up':>9} {'efficiency':>10} "
    yield head + f"{'waiting':>8} {'update':>7}  {'the run  ' if rows[-1].run else ''}what decides"
    for row in rows:
        one, run = row.choice, f"{duration(row.run):9}" if row.run else ""
        shares = f"{row.waiting:8.1%} {row.updating:7.1%}"
        sizes = f"{row.devices:7,} {row.machines:8,} {one.tokens_per_s:12,.0f} {one.clock.tokens:13,}"
        yield f"{sizes} {row.speed_up:9.2f} {row.efficiency:10.1%} {shares}  {run}{binding(one)}"
    if any(row.efficiency > 1.005 for row in rows):
        yield ""
        yield "above 100 %: on fewer devices each updates more, links are fewer, or micro-batches smaller"
