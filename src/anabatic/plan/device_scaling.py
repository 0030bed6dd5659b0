"""Scaling estimates: the same strategy on a growing number of devices, within one machine and then across machines.

Links and latencies are those of `cost_model.py`: HCCS or NVLink within a machine, 25 GB/s per device between machines.
Only link traffic grows with the number of devices; stragglers, congested switches and failures of large clusters are
not modelled.
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
    """A job on a number of devices.

    Attributes:
        speed_up: tokens per second relative to the fewest devices; efficiency: speed-up relative to linear scaling.
        waiting_fraction, update_fraction: fractions of a step in which devices wait for links, and update weights.
        run_seconds: seconds of the whole run; 0: unknown.
    """

    devices: int
    machines: int
    choice: StrategyEstimate
    speed_up: float
    efficiency: float
    waiting_fraction: float
    update_fraction: float
    run_seconds: float


def list_device_counts(devices_per_machine: int, max_devices: int, step: int) -> list[int]:
    """Return device counts: powers of two up to one machine, then doubled machines; multiples of `step` only.

    Args:
        devices_per_machine: devices of one.
    """
    within_machine = [
        1 << power for power in range(devices_per_machine.bit_length()) if 1 << power < devices_per_machine
    ]
    across_machines = [
        devices_per_machine << power
        for power in range(max(1, max_devices).bit_length())
        if devices_per_machine << power <= max_devices
    ]
    return [count for count in [*within_machine, *across_machines] if count <= max_devices and count % step == 0]


def build_scaling_rows(plans: Sequence[JobPlan]) -> list[ScalingRow]:
    """Compare plans of one job, the fewest devices first, all with the strategy chosen for the most devices.

    That is the strategy of the job if it fits there, else the fastest. Device counts on which it does not fit are
    left out.
    """
    largest = next((plan for plan in reversed(plans) if plan.choice.can_fit or plan.fitting), None)
    if largest is None:
        return []
    reference = largest.choice if largest.choice.can_fit else largest.fastest_per_strategy[0]
    is_strong_scaling = len({plan.choice.step_time.tokens for plan in plans}) == 1
    rows: list[ScalingRow] = []
    for plan in plans[: plans.index(largest) + 1]:
        choice = _find_matching_estimate(reference, plan, is_strong_scaling)
        if choice is None:
            continue
        devices = plan.npus * plan.nodes
        base = rows[0] if rows else None
        speed_up = choice.tokens_per_s / base.choice.tokens_per_s if base else 1.0
        efficiency = speed_up * base.devices / devices if base else 1.0
        waiting_fraction, update_fraction = (
            seconds / choice.step_time.total_seconds
            for seconds in (choice.step_time.exposed_collectives, choice.step_time.update)
        )
        run_seconds = plan.steps * choice.step_time.total_seconds
        rows.append(
            ScalingRow(
                devices, plan.nodes, choice, speed_up, efficiency, waiting_fraction, update_fraction, run_seconds
            )
        )
    return rows


def _find_matching_estimate(
    reference: StrategyEstimate, plan: JobPlan, is_strong_scaling: bool
) -> StrategyEstimate | None:
    """Return the estimate of `plan` with the strategy of `reference`, None if none fits.

    The micro-batch is the same; in strong scaling, where the tokens per rank shrink, the fastest micro-batch.
    """
    fitting = [plan.choice, *plan.fitting] if plan.choice.can_fit else plan.fitting
    matches = [
        estimate for estimate in fitting if get_strategy_key(estimate.setup) == get_strategy_key(reference.setup)
    ]
    micro_tokens = reference.setup.micro_tokens
    return max(
        (estimate for estimate in matches if is_strong_scaling or estimate.setup.micro_tokens == micro_tokens),
        key=lambda estimate: estimate.tokens_per_s,
        default=None,
    )


def describe_scaling(rows: Sequence[ScalingRow]) -> str:
    """Return the settings, and what is constant: tokens per step or tokens per device."""
    tokens = {row.choice.step_time.tokens for row in rows}
    settings = format_strategy(replace(rows[-1].choice.setup, micro_steps=1)).rpartition(" x ")[0]
    if len(rows) == 1:
        return f"{settings}; {max(tokens):,} tokens a step"
    if len(tokens) == 1:
        return f"{settings.rpartition(', ')[0]}; {max(tokens):,} tokens a step for all (strong scaling)"
    tokens_per_device = rows[0].choice.step_time.tokens // rows[0].devices
    return f"{settings}; {tokens_per_device:,} tokens a step for each device (weak scaling)"


def scaling_to_dict(rows: Sequence[ScalingRow], chip: Chip) -> dict[str, Any]:
    """Return the table as a dict: seconds and fractions."""
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
    """Yield the lines of the table."""
    yield describe_scaling(rows)
    yield ""
    header = (
        f"{'devices':>7} {'machines':>8} {'tokens/s':>12} {'tokens a step':>13} {'speed-up':>9} {'efficiency':>10} "
    )
    yield header + f"{'waiting':>8} {'update':>7}  {'the run  ' if rows[-1].run_seconds else ''}what decides"
    for row in rows:
        choice, run_time = row.choice, f"{format_duration(row.run_seconds):9}" if row.run_seconds else ""
        shares = f"{row.waiting_fraction:8.1%} {row.update_fraction:7.1%}"
        sizes = f"{row.devices:7,} {row.machines:8,} {choice.tokens_per_s:12,.0f} {choice.step_time.tokens:13,}"
        yield f"{sizes} {row.speed_up:9.2f} {row.efficiency:10.1%} {shares}  {run_time}{find_bottleneck(choice)}"
    if any(row.efficiency > 1.005 for row in rows):
        yield ""
        yield "above 100 %: on fewer devices each updates more, links are fewer, or micro-batches smaller"
