"""Plots of a plan: memory against speed of everything that fits, and scaling over the number of devices."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.core import svg_plot
from anabatic.core.axis_ticks import compute_ticks
from anabatic.plan import strategy_search
from anabatic.plan.device_scaling import ScalingRow
from anabatic.plan.output import JobPlan, format_gib, format_strategy
from anabatic.plan.strategy_search import StrategyEstimate

_STRATEGIES = {"single": 0, "ddp": 0, "zero2": 1, "zero3": 2}
_OFFLOAD = 3
_SHAPES = {"none": "circle", "selective": "square", "full": "triangle"}


def _pick_colour(estimate: StrategyEstimate) -> str:
    return f"c{_OFFLOAD if estimate.setup.offload else _STRATEGIES[estimate.setup.strategy]}"


def _make_linear_axis(label: str, maximum: float, num_ticks: int) -> svg_plot.PlotAxis:
    high = 1.08 * maximum
    return svg_plot.PlotAxis(
        label, 0.0, high, [(value, f"{value:,.6g}") for value in compute_ticks(0.0, high, num_ticks)]
    )


def draw_frontier(plan: JobPlan) -> str:
    """Draw tokens per second over the memory of a device: everything that fits, with the Pareto frontier as a line.

    If nothing fits, only the job as configured is drawn.
    """
    frontier = strategy_search.find_pareto_frontier(plan.fitting)
    estimates = plan.fitting or [plan.choice]
    available_gib = plan.choice.available_bytes / 2**30
    speed = max(estimate.tokens_per_s for estimate in [*estimates, plan.choice])
    unit, unit_name = (1e3, "thousand tokens/s") if speed >= 2e4 else (1.0, "tokens/s")
    panel = svg_plot.PlotPanel(
        _make_linear_axis(
            "memory of a device, GiB",
            max(available_gib, *(estimate.needed_bytes / 2**30 for estimate in [*estimates, plan.choice])),
            8,
        ),
        _make_linear_axis(f"{unit_name}, all devices", speed / unit, 6),
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
    speed_panel.draw_line([(row.devices, row.speed_up) for row in rows], "line c0")
    max_percent = 105 * max(1.0, *(row.efficiency for row in rows))
    percent = svg_plot.PlotAxis(
        "%", 0.0, max_percent, [(value, f"{value:g}") for value in compute_ticks(0.0, max_percent, 6)]
    )
    fraction_panel = svg_plot.PlotPanel(device_axis, percent, left=470, width=470, height=380)
    fraction_panel.draw_line([(first, 100.0), (last, 100.0)], "dash")
    for row in rows:
        tooltip = f"{row.devices:,}: {row.speed_up:.2f} times, {row.efficiency:.1%}"
        speed_panel.draw_mark(row.devices, row.speed_up, "circle", "full c0", tooltip)
    fractions = {
        ("circle", "c0", "efficiency"): [row.efficiency for row in rows],
        ("square", "c1", "of a step: waiting for links"): [row.waiting_fraction for row in rows],
        ("triangle", "c2", "of a step: the update"): [row.update_fraction for row in rows],
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
