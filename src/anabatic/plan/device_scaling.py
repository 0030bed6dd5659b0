"""Scaling estimates on a growing number of devices, within one machine and then across machines, and their plots.

Links and latencies are those of `cost_model.py`: HCCS or NVLink within a machine, 25 GB/s per device between machines.
Slow machines, shared links, checkpoints and failures are those of `scale_losses.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabatic.core import svg_plot
from anabatic.core.formatting import format_duration
from anabatic.core.svg_plot import make_linear_axis
from anabatic.device.table import Chip
from anabatic.plan import strategy_search
from anabatic.plan.cost_model import get_chip_rates
from anabatic.plan.output import JobPlan, estimate_to_dict, format_gib, format_strategy
from anabatic.plan.scale_losses import ScaleAssumptions, ScaleLosses, estimate_losses
from anabatic.plan.strategy_search import StrategyEstimate, find_bottleneck, get_strategy_key


@dataclass(frozen=True)
class ScalingRow:
    """A job on a number of devices.

    Attributes:
        speed_up: tokens per second relative to the fewest devices on which failures leave any; efficiency: speed-up
            relative to linear scaling.
        waiting_fraction, update_fraction: fractions of the time in which devices wait for links and for other stages of
            a pipeline, and update weights.
        losses: what is lost beside; run_seconds: seconds of the whole run; 0: unknown.
    """

    devices: int
    machines: int
    choice: StrategyEstimate
    speed_up: float
    efficiency: float
    waiting_fraction: float
    update_fraction: float
    run_seconds: float
    losses: ScaleLosses

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices over a long run."""
        return self.choice.step_time.tokens / self.losses.total_seconds


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


def build_scaling_rows(plans: Sequence[JobPlan], assumed: ScaleAssumptions | None = None) -> list[ScalingRow]:
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
        base = next((row for row in rows if row.tokens_per_s > 0), None)
        losses = estimate_losses(
            choice.setup, choice.step_time, get_chip_rates(plan.chip), plan.nodes, assumed or ScaleAssumptions()
        )
        tokens_per_s = choice.step_time.tokens / losses.total_seconds
        speed_up = tokens_per_s / base.tokens_per_s if base else float(tokens_per_s > 0)
        efficiency = speed_up * base.devices / devices if base else speed_up
        waiting_fraction, update_fraction = (
            seconds / losses.total_seconds
            for seconds in (
                choice.step_time.exposed_collectives + choice.step_time.waiting,
                choice.step_time.update,
            )
        )
        run_seconds = plan.steps * losses.total_seconds
        rows.append(
            ScalingRow(
                devices,
                plan.nodes,
                choice,
                speed_up,
                efficiency,
                waiting_fraction,
                update_fraction,
                run_seconds,
                losses,
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
                "run_seconds": _finite(row.run_seconds) or None,
                "tokens": row.choice.step_time.tokens,
                **estimate_to_dict(row.choice, chip),
                "losses": dict(row.losses.get_fractions()),
                "seconds_with_losses": _finite(row.losses.total_seconds),
                "tokens_per_s_with_losses": row.tokens_per_s,
                "checkpoint_interval_seconds": _finite(row.losses.interval),
                "seconds_between_failures": _finite(row.losses.between_failures),
            }
            for row in rows
        ],
    }


def describe_left_out(plans: Sequence[JobPlan], rows: Sequence[ScalingRow]) -> str:
    """Return a line about the numbers of devices without a row; empty if there are none."""
    shown = {row.devices for row in rows}
    counts = [plan.npus * plan.nodes for plan in plans]
    left_out = [f"{count:,}" for count in counts if count not in shown]
    return f"left out: {', '.join(left_out)} devices, on which these settings do not fit" if left_out else ""


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def format_scaling_lines(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield describe_scaling(rows)
    yield ""
    header = (
        f"{'devices':>7} {'machines':>8} {'tokens/s':>12} {'tokens a step':>13} {'speed-up':>9} {'efficiency':>10} "
    )
    columns = f"{'waiting':>8} {'update':>7} {'links':>6} {'slow':>6} {'saving':>7} {'failures':>9}"
    yield f"{header}{columns}  {'the run  ' if rows[-1].run_seconds else ''}what decides"
    for row in rows:
        run_time = f"{_format_run(row.run_seconds):9}" if row.run_seconds else ""
        losses = row.losses.get_fractions()
        shares = f"{row.waiting_fraction:8.1%} {row.update_fraction:7.1%} {losses['links']:6.1%}"
        shares += f" {losses['stragglers']:6.1%} {losses['checkpoints']:7.2%} {losses['failures']:9.1%}"
        sizes = f"{row.devices:7,} {row.machines:8,} {row.tokens_per_s:12,.0f} {row.choice.step_time.tokens:13,}"
        yield f"{sizes} {row.speed_up:9.2f} {row.efficiency:10.1%} {shares}  {run_time}{find_bottleneck(row.choice)}"
    last = rows[-1].losses
    if math.isfinite(last.between_failures):
        failures, interval = format_duration(last.between_failures), format_duration(last.interval)
        yield ""
        yield f"on {rows[-1].devices:,}: a failure every {failures}, a checkpoint every {interval}"
    if any(row.efficiency > 1.005 for row in rows):
        yield ""
        yield "above 100 %: on fewer devices each updates more, links are fewer, or micro-batches smaller"


def _format_run(seconds: float) -> str:
    return format_duration(seconds) if math.isfinite(seconds) else "never"


_STRATEGIES = {"single": 1, "ddp": 1, "zero2": 2, "zero3": 3}
_OFFLOAD = 4
_SHAPES = {"none": "circle", "selective": "square", "full": "triangle"}


def _pick_colour(estimate: StrategyEstimate) -> str:
    return f"c{_OFFLOAD if estimate.setup.offload else _STRATEGIES[estimate.setup.strategy]}"


def draw_frontier(plan: JobPlan) -> str:
    """Draw tokens per second over the memory of a device: everything that fits, with the Pareto frontier as a line.

    If nothing fits, only the job as configured is drawn.
    """
    frontier = strategy_search.find_pareto_frontier(plan.fitting)
    estimates = plan.fitting or [plan.choice]
    available_gib = plan.choice.available_bytes / 2**30
    speed = max(estimate.tokens_per_s for estimate in [*estimates, plan.choice])
    needed_gib = [estimate.needed_bytes / 2**30 for estimate in [*estimates, plan.choice]]
    unit, unit_name = (1e3, "thousand tokens/s") if speed >= 2e4 else (1.0, "tokens/s")
    panel = svg_plot.PlotPanel(
        make_linear_axis("memory of a device, GiB", 1.08 * max(available_gib, *needed_gib), 8, "{:,.6g}".format),
        make_linear_axis(f"{unit_name}, all devices", 1.08 * speed / unit, 6, "{:,.6g}".format),
        f"{plan.npus * plan.nodes} x {plan.chip.name}: what fits, and how fast it is by the estimate",
        width=640,
        height=460,
    )
    panel.draw_line([(available_gib, 0.0), (available_gib, panel.y.high)], "dash")
    panel.draw_text(available_gib, panel.y.high, f"{available_gib:.1f} GiB for a job", "soft halo", "end", (-6, 12))
    corners = [(estimate.needed_bytes / 2**30, estimate.tokens_per_s / unit) for estimate in frontier]
    step_points = [
        point
        for corner, next_corner in zip(corners, corners[1:], strict=False)
        for point in (corner, (next_corner[0], corner[1]))
    ]
    if corners:
        panel.draw_line([*step_points, corners[-1]], "line ink")
    for estimate in [*(estimate for estimate in plan.fitting if estimate not in frontier), *frontier]:
        needed, tokens_per_s = format_gib(estimate.needed_bytes), estimate.tokens_per_s
        tooltip = f"{format_strategy(estimate.setup)}: {needed} GiB, {tokens_per_s:,.0f} tokens/s"
        style = f"{'full' if estimate in frontier else 'hollow'} {_pick_colour(estimate)}"
        panel.draw_mark(
            estimate.needed_bytes / 2**30,
            estimate.tokens_per_s / unit,
            _SHAPES[estimate.setup.recompute],
            style,
            tooltip,
        )
    choice = plan.choice
    position = (choice.needed_bytes / 2**30, choice.tokens_per_s / unit)
    panel.draw_mark(
        *position,
        "cross",
        "line ink",
        f"as it stands, {format_strategy(choice.setup)}: {format_gib(choice.needed_bytes)} GiB",
    )
    panel.draw_text(*position, "as it stands", "soft halo", "end", (-8, 18))
    return svg_plot.render_document([panel.render_panel(), _frontier_legend(estimates)], 850, 460, panel.title)


def _frontier_legend(estimates: Sequence[StrategyEstimate]) -> str:
    names = {
        _pick_colour(estimate): f"{estimate.setup.strategy}{', offload' if estimate.setup.offload else ''}"
        for estimate in estimates
    }
    rows = [("", "", "strategy"), *(("circle", f"full {colour}", name) for colour, name in sorted(names.items()))]
    rows += [("", "", ""), ("", "", "recomputed")]
    rows += [(shape, "hollow ink", name) for name, shape in _SHAPES.items()]
    rows += [("", "", ""), ("line", "line ink", "frontier, filled:"), ("", "", "nothing as small is faster")]
    return svg_plot.render_legend(rows, 660, 60)


def draw_scaling(rows: Sequence[ScalingRow], title: str) -> str:
    """Draw speed-up and efficiency over the number of devices, with linear scaling for comparison."""
    first, last = rows[0].devices, max(rows[-1].devices, 2 * rows[0].devices)
    device_counts = [row.devices for row in rows] if len(rows) > 1 else [first, last]
    tick_counts = device_counts[:: 1 + len(device_counts) // 9]
    device_axis = svg_plot.PlotAxis(
        "devices", first, last, [(count, f"{count:,}") for count in tick_counts], is_log=True
    )
    ideal = last / first
    high = 1.15 * max(ideal, *(row.speed_up for row in rows))
    factor_ticks = [(factor, f"{factor:,g}") for factor in (4.0**n for n in range(12)) if factor <= high]
    speed_panel = svg_plot.PlotPanel(
        device_axis,
        svg_plot.PlotAxis("speed-up, times", 1.0, high, factor_ticks, is_log=True),
        title,
        "",
        width=470,
        height=380,
    )
    speed_panel.draw_line([(first, 1.0), (last, ideal)], "dash")
    speed_panel.draw_line([(row.devices, row.speed_up) for row in rows], "line c1")
    max_percent = 105 * max(1.0, *(row.efficiency for row in rows))
    percent = make_linear_axis("%", max_percent, 6, "{:g}".format)
    fraction_panel = svg_plot.PlotPanel(device_axis, percent, left=470, width=470, height=380)
    fraction_panel.draw_line([(first, 100.0), (last, 100.0)], "dash")
    for row in rows:
        tooltip = f"{row.devices:,}: {row.speed_up:.2f} times, {row.efficiency:.1%}"
        speed_panel.draw_mark(row.devices, row.speed_up, "circle", "full c1", tooltip)
    fractions = {
        ("circle", "c1", "efficiency"): [row.efficiency for row in rows],
        ("square", "c2", "of a step: waiting for links"): [row.waiting_fraction for row in rows],
        ("triangle", "c3", "of a step: the update"): [row.update_fraction for row in rows],
        ("circle", "c4", "lost: slow machines, shared links"): [
            row.losses.get_fractions()["links"] + row.losses.get_fractions()["stragglers"] for row in rows
        ],
        ("square", "c4", "lost: checkpoints, failures"): [
            row.losses.get_fractions()["checkpoints"] + row.losses.get_fractions()["failures"] for row in rows
        ],
    }
    for (mark, colour, name), values in fractions.items():
        points = [(row.devices, 100 * value) for row, value in zip(rows, values, strict=True)]
        fraction_panel.draw_line(points, f"line {colour}")
        for devices, value in points:
            fraction_panel.draw_mark(devices, value, mark, f"full {colour}", f"{devices:,}: {value:.1f} %, {name}")
    speed_panel.draw_text(last, 1.0, "dashed: as many times as devices", "soft halo", "end", (-4, -14))
    legend = svg_plot.render_legend([(mark, f"full {colour}", name) for mark, colour, name in fractions], 560, 160)
    return svg_plot.render_document(
        [speed_panel.render_panel(), fraction_panel.render_panel(), legend], 950, 380, title
    )
