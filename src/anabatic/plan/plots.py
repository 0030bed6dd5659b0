"""The pictures of a plan: memory against speed of everything that fits, and a job on more and more devices."""

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


def _pick_colour(one: StrategyEstimate) -> str:
    return f"c{_OFFLOAD if one.setup.offload else _STRATEGIES[one.setup.strategy]}"


def _make_linear_axis(label: str, most: float, about: int) -> svg_plot.PlotAxis:
    high = 1.08 * most
    return svg_plot.PlotAxis(label, 0.0, high, [(value, f"{value:,.6g}") for value in compute_ticks(0.0, high, about)])


def draw_frontier(plan: JobPlan) -> str:
    """Draw tokens a second over the memory of a device: all that fits, the frontier joined by a line.

    A plan of which nothing fits has the job as it stands alone.
    """
    best = strategy_search.find_pareto_frontier(plan.fitting)
    shown = plan.fitting or [plan.choice]
    room = plan.choice.available_bytes / 2**30
    speed = max(one.tokens_per_s for one in [*shown, plan.choice])
    unit, word = (1e3, "thousand tokens/s") if speed >= 2e4 else (1.0, "tokens/s")
    panel = svg_plot.PlotPanel(
        _make_linear_axis(
            "memory of a device, GiB", max(room, *(one.needed_bytes / 2**30 for one in [*shown, plan.choice])), 8
        ),
        _make_linear_axis(f"{word}, all devices", speed / unit, 6),
        f"{plan.npus * plan.nodes} x {plan.chip.name}: what fits, and how fast it is by the estimate",
        width=640,
        height=460,
    )
    panel.draw_line([(room, 0.0), (room, panel.y.high)], "dash")
    panel.draw_text(room, panel.y.high, f"{room:.1f} GiB for a job", "soft halo", "end", (-6, 12))
    steps = [(one.needed_bytes / 2**30, one.tokens_per_s / unit) for one in best]
    stairs = [point for here, there in zip(steps, steps[1:], strict=False) for point in (here, (there[0], here[1]))]
    if steps:
        panel.draw_line([*stairs, steps[-1]], "line ink")
    for one in [*(one for one in plan.fitting if one not in best), *best]:
        told = f"{format_strategy(one.setup)}: {format_gib(one.needed_bytes)} GiB, {one.tokens_per_s:,.0f} tokens/s"
        style = f"{'full' if one in best else 'hollow'} {_pick_colour(one)}"
        panel.draw_mark(one.needed_bytes / 2**30, one.tokens_per_s / unit, _SHAPES[one.setup.recompute], style, told)
    here = plan.choice
    spot = (here.needed_bytes / 2**30, here.tokens_per_s / unit)
    panel.draw_mark(
        *spot, "cross", "line ink", f"as it stands, {format_strategy(here.setup)}: {format_gib(here.needed_bytes)} GiB"
    )
    panel.draw_text(*spot, "as it stands", "soft halo", "end", (-8, 18))
    return svg_plot.render_document([panel.render_panel(), _frontier_legend(shown)], 850, 460, panel.title)


def _frontier_legend(shown: Sequence[StrategyEstimate]) -> str:
    names = {_pick_colour(one): f"{one.setup.strategy}{', offload' if one.setup.offload else ''}" for one in shown}
    rows = [("", "", "strategy"), *(("circle", f"full {colour}", name) for colour, name in sorted(names.items()))]
    rows += [("", "", ""), ("", "", "recomputed")]
    rows += [(shape, "hollow ink", name) for name, shape in _SHAPES.items()]
    rows += [("", "", ""), ("line", "line ink", "frontier, filled:"), ("", "", "nothing as small is faster")]
    return svg_plot.render_legend(rows, 660, 60)


def draw_scaling(rows: Sequence[ScalingRow], title: str) -> str:
    """Draw speed-up and efficiency over the number of devices, both beside what the numbers promise."""
    first, last = rows[0].devices, max(rows[-1].devices, 2 * rows[0].devices)
    numbers = [row.devices for row in rows] if len(rows) > 1 else [first, last]
    kept = numbers[:: 1 + len(numbers) // 9]
    across = svg_plot.PlotAxis("devices", first, last, [(number, f"{number:,}") for number in kept], is_log=True)
    most = last / first
    high = 1.15 * max(most, *(row.speed_up for row in rows))
    up = [(factor, f"{factor:,g}") for factor in (4.0**n for n in range(12)) if factor <= high]
    speed = svg_plot.PlotPanel(
        across, svg_plot.PlotAxis("speed-up, times", 1.0, high, up, is_log=True), title, "", width=470, height=380
    )
    speed.draw_line([(first, 1.0), (last, most)], "dash")
    speed.draw_line([(row.devices, row.speed_up) for row in rows], "line c0")
    top = 105 * max(1.0, *(row.efficiency for row in rows))
    percent = svg_plot.PlotAxis("%", 0.0, top, [(value, f"{value:g}") for value in compute_ticks(0.0, top, 6)])
    share = svg_plot.PlotPanel(across, percent, left=470, width=470, height=380)
    share.draw_line([(first, 100.0), (last, 100.0)], "dash")
    for row in rows:
        told = f"{row.devices:,}: {row.speed_up:.2f} times, {row.efficiency:.1%}"
        speed.draw_mark(row.devices, row.speed_up, "circle", "full c0", told)
    shares = {
        ("circle", "c0", "efficiency"): [row.efficiency for row in rows],
        ("square", "c1", "of a step: waiting for links"): [row.waiting_fraction for row in rows],
        ("triangle", "c2", "of a step: the update"): [row.update_fraction for row in rows],
    }
    for (mark, colour, name), values in shares.items():
        points = [(row.devices, 100 * value) for row, value in zip(rows, values, strict=True)]
        share.draw_line(points, f"line {colour}")
        for devices, value in points:
            share.draw_mark(devices, value, mark, f"full {colour}", f"{devices:,}: {value:.1f} %, {name}")
    speed.draw_text(last, 1.0, "dashed: as many times as devices", "soft halo", "end", (-4, -14))
    key = svg_plot.render_legend([(mark, f"full {colour}", name) for mark, colour, name in shares], 560, 160)
    return svg_plot.render_document([speed.render_panel(), share.render_panel(), key], 950, 380, title)
