"""Estimates for more and more devices: the same way of dividing it, inside one machine and then between machines.

Links and latencies are those of `cost_model.py`, as for everything else: HCCS or NVLink inside a machine, 25 GB/s a
device between them. What grows with the number of devices is only what the links carry; the stragglers, congested
switches and failures of large machines are not in there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabatic.core.formatting import format_duration
from anabatic.device.table import Chip
from anabatic.plan.output import JobPlan, estimate_to_dict, format_strategy
from anabatic.plan.strategy_search import StrategyEstimate, find_bottleneck, get_strategy_key


@dataclass(frozen=True)
class ScalingRow:
    """A job on so many devices.

    Attributes:
        speed_up: tokens a second against the fewest devices; efficiency: that over what the numbers promise.
        waiting_fraction, update_fraction: shares of a step in which devices wait for links, and update weights.
        run_seconds: seconds of the whole run; 0: not known.
    """

    devices: int
    machines: int
    choice: StrategyEstimate
    speed_up: float
    efficiency: float
    waiting_fraction: float
    update_fraction: float
    run_seconds: float


def list_device_counts(machine: int, most: int, step: int) -> list[int]:
    """Return numbers of devices: doubled up to a machine, then doubled machines; multiples of `step`.

    Args:
        machine: devices of one.
    """
    inside = [1 << power for power in range(machine.bit_length()) if 1 << power < machine]
    between = [machine << power for power in range(max(1, most).bit_length()) if machine << power <= most]
    return [count for count in [*inside, *between] if count <= most and count % step == 0]


def build_scaling_rows(plans: Sequence[JobPlan]) -> list[ScalingRow]:
    """Compare plans of one job, the fewest devices first, all divided in the way that is taken on the most of them.

    That is the job's own where it fits there, else the fastest. Fewer devices than it fits on are left out.
    """
    most = next((plan for plan in reversed(plans) if plan.choice.can_fit or plan.fitting), None)
    if most is None:
        return []
    model = most.choice if most.choice.can_fit else most.fastest_per_strategy[0]
    divided = len({plan.choice.step_time.tokens for plan in plans}) == 1
    found: list[ScalingRow] = []
    for plan in plans[: plans.index(most) + 1]:
        choice = _find_matching_estimate(model, plan, divided)
        if choice is None:
            continue
        devices = plan.npus * plan.nodes
        base = found[0] if found else None
        up = choice.tokens_per_s / base.choice.tokens_per_s if base else 1.0
        efficiency = up * base.devices / devices if base else 1.0
        waiting, updating = (
            part / choice.step_time.total_seconds
            for part in (choice.step_time.exposed_collectives, choice.step_time.update)
        )
        run = plan.steps * choice.step_time.total_seconds
        found.append(ScalingRow(devices, plan.nodes, choice, up, efficiency, waiting, updating, run))
    return found


def _find_matching_estimate(model: StrategyEstimate, plan: JobPlan, divided: bool) -> StrategyEstimate | None:
    """The plan's choice of the same way, None where none fits.

    The micro-batch is the same; where a step's tokens are divided, and a rank has fewer and fewer, the fastest.
    """
    fitting = [plan.choice, *plan.fitting] if plan.choice.can_fit else plan.fitting
    same = [one for one in fitting if get_strategy_key(one.setup) == get_strategy_key(model.setup)]
    size = model.setup.micro_tokens
    return max(
        (one for one in same if divided or one.setup.micro_tokens == size),
        key=lambda one: one.tokens_per_s,
        default=None,
    )


def describe_scaling(rows: Sequence[ScalingRow]) -> str:
    """Return what is held and what grows."""
    tokens = {row.choice.step_time.tokens for row in rows}
    settings = format_strategy(replace(rows[-1].choice.setup, micro_steps=1)).rpartition(" x ")[0]
    if len(rows) == 1:
        return f"{settings}; {max(tokens):,} tokens a step"
    if len(tokens) == 1:
        return f"{settings.rpartition(', ')[0]}; {max(tokens):,} tokens a step for all (strong scaling)"
    each = rows[0].choice.step_time.tokens // rows[0].devices
    return f"{settings}; {each:,} tokens a step for each device (weak scaling)"


def scaling_to_dict(rows: Sequence[ScalingRow], chip: Chip) -> dict[str, Any]:
    """The table for programs: seconds and shares."""
    return {
        "chip": chip.name,
        "held": describe_scaling(rows),
        "rows": [
            {
                "devices": row.devices,
                "machines": row.machines,
                "speed_up": row.speed_up,
                "efficiency": row.efficiency,
                "waiting": row.waiting_fraction,
                "updating": row.update_fraction,
                "run_seconds": row.run_seconds or None,
                "tokens": row.choice.step_time.tokens,
                **estimate_to_dict(row.choice, chip),
            }
            for row in rows
        ],
    }


def format_scaling_lines(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """The table for people."""
    yield describe_scaling(rows)
    yield ""
    head = f"{'devices':>7} {'machines':>8} {'tokens/s':>12} {'tokens a step':>13} {'speed-up':>9} {'efficiency':>10} "
    yield head + f"{'waiting':>8} {'update':>7}  {'the run  ' if rows[-1].run_seconds else ''}what decides"
    for row in rows:
        one, run = row.choice, f"{format_duration(row.run_seconds):9}" if row.run_seconds else ""
        shares = f"{row.waiting_fraction:8.1%} {row.update_fraction:7.1%}"
        sizes = f"{row.devices:7,} {row.machines:8,} {one.tokens_per_s:12,.0f} {one.step_time.tokens:13,}"
        yield f"{sizes} {row.speed_up:9.2f} {row.efficiency:10.1%} {shares}  {run}{find_bottleneck(one)}"
    if any(row.efficiency > 1.005 for row in rows):
        yield ""
        yield "above 100 %: on fewer devices each updates more, links are fewer, or micro-batches smaller"
