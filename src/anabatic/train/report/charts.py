"""Charts of a report as SVG that stretches to any width: lines in a 1000 x 1000 box, labels as HTML, the curriculum
stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import LocalizedText
from anabatic.core.svg_plot import PlotAxis, compute_ticks, format_short_count, format_step
from anabatic.monitor.run_data import LevelCounts, Points, RunData, downsample_points, smooth_points
from anabatic.train.report.localized_page import as_text, get_text, join_texts

BOX_SIZE = 1000.0
MAX_POINTS = 700
MAX_DOTS = {"raw": 0, "line": 3, "points": 40}
MAX_COLUMNS = 60
"""Stretches at most; more would show the noise of a few samples each."""
FIRST_COLOUR, NUM_COLOURS = 3, 8
"""Classes of the ramp in report.css."""
format_three_digits: Callable[[float], str] = "{:.3g}".format
format_four_digits: Callable[[float], str] = "{:.4g}".format
_ANSWER_SIDES = ("chosen", "rejected")
_RESUMED = "resume"


@dataclass
class Curve:
    """One curve of a chart; `style` is `raw` (faint), `line` or `points`."""

    name: str | LocalizedText
    points: Points
    style: str = "line"
    colour: int = 1


@dataclass
class CurvePath:
    """A drawn curve: the `d` of an SVG path, and of its dots."""

    name: LocalizedText
    last: str
    d: str
    dots: str
    style: str
    colour: int


@dataclass
class Chart:
    """All that the template needs; positions are per cent of the plot, from the left and from the top."""

    title: LocalizedText
    last: str
    label: LocalizedText
    note: LocalizedText | None
    paths: list[CurvePath]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    marks: list[tuple[float, LocalizedText]]
    data: dict[str, Any] = field(default_factory=dict)
    wide: bool = False
    """As broad as the page, with a legend."""


@dataclass
class FigureCard:
    """A panel whose curves have one value each: a figure says more than a lonely point.

    Attributes:
        values: (value, which one it is and after which step).
    """

    title: LocalizedText
    values: list[tuple[str, LocalizedText]]


def make_figure_card(
    title: str | LocalizedText, lines: Sequence[Curve], write: Callable[[float], str]
) -> FigureCard | None:
    """Return the card of curves that have one value each; None: one of them has more, or none has any."""
    known = [(line.name, [(step, y) for step, y in line.points if y is not None]) for line in lines]
    found = [(name, points) for name, points in known if points]
    if not found or any(len(points) > 1 for _, points in found):
        return None
    return FigureCard(
        as_text(title),
        [
            (write(value), get_text("after_step", name=as_text(name), step=f"{step:,}"))
            for name, ((step, value),) in found
        ],
    )


def draw_chart(
    title: str | LocalizedText,
    lines: Sequence[Curve],
    write: Callable[[float], str],
    *,
    zero: bool = False,
    steps: tuple[int, int] | None = None,
    marks: Sequence[tuple[int, str | LocalizedText]] = (),
) -> Chart | None:
    """Draw `lines` over the step.

    Args:
        title: what is drawn, with its unit.
        lines: curves; those without any finite value are left out.
        write: a value as text.
        zero: whether the vertical axis begins at zero.
        steps: first and last step of the horizontal axis; default: those of the lines.
        marks: steps with a vertical line, and its text.

    Returns:
        The chart, or None when there is nothing to draw.
    """
    lines = [line for line in lines if any(value is not None for _, value in line.points)]
    if not lines:
        return None
    x = _make_step_scale(lines, steps)
    y, above = _make_value_scale(lines, zero)
    sampled_lines = [(line, downsample_points(line.points, MAX_POINTS)) for line in lines]
    main = next((line for line in lines if line.style == "line"), lines[0])
    values = [value for _, value in main.points if value is not None]
    first, last = main.points[0][0], main.points[-1][0]
    ends = {"begin": write(values[0]), "end": write(values[-1])}
    return Chart(
        title=as_text(title),
        last=write(values[-1]),
        label=get_text("chart.label", title=as_text(title), first=f"{first:,}", last=f"{last:,}", **ends),
        note=get_text("chart.beyond" if above == 1 else "chart.beyond_many", count=f"{above:,}") if above else None,
        paths=[_draw_curve(line, points, x, y, write) for line, points in sampled_lines],
        x_ticks=make_step_ticks(x.low, x.high),
        y_ticks=[(100 - _scale(y, tick) / 10, write(tick)) for tick in compute_ticks(y.low, y.high, 5)],
        marks=[(_scale(x, step) / 10, as_text(text)) for step, text in marks if x.low <= step <= x.high],
        data={"series": [_hover_data(line, points, x, y, write) for line, points in sampled_lines]},
    )


def make_step_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Return (per cent of the axis, step) of the ticks of an axis of steps."""
    x = PlotAxis("", low, high)
    return [(_scale(x, tick) / 10, format_step(tick)) for tick in compute_ticks(low, high, 5, integers_only=True)]


def _make_step_scale(lines: Sequence[Curve], steps: tuple[int, int] | None) -> PlotAxis:
    all_steps = [step for line in lines for step, _ in line.points]
    first, last = (min(all_steps), max(all_steps)) if steps is None else steps
    return PlotAxis("", 0.0, last) if 0 < first <= 0.05 * last else _make_scale(first, last)


def _make_value_scale(lines: Sequence[Curve], zero: bool) -> tuple[PlotAxis, int]:
    """Return the scale and how many points lie above it: a few wild ones must not flatten the rest."""
    values = sorted(value for line in lines for _, value in line.points if value is not None)
    low, high = values[0], values[-1]
    usual = values[math.ceil(0.995 * len(values)) - 1]
    above = 0
    if high - low > 3 * (usual - low) > 0:
        high = usual
        above = sum(value > high for value in values)
    if zero and low >= 0:
        return _make_scale(0.0, high, top=0.08), above
    return _make_scale(low, high, top=0.06, bottom=0.06), above


def _scale(axis: PlotAxis, value: float) -> float:
    """Return the place of a value in the box."""
    return BOX_SIZE * axis.get_fraction(value)


def _make_scale(low: float, high: float, *, top: float = 0.0, bottom: float = 0.0) -> PlotAxis:
    if high - low <= 1e-12 * max(1.0, abs(high)):
        room = abs(high) * 0.5 or 1.0
        return PlotAxis("", low - room, high + room) if low else PlotAxis("", low, high + room)
    room = high - low
    return PlotAxis("", low - bottom * room, high + top * room)


def _draw_curve(line: Curve, points: Points, x: PlotAxis, y: PlotAxis, write: Callable[[float], str]) -> CurvePath:
    finite = [(step, value) for step, value in points if value is not None]
    dots = ""
    if len(finite) <= MAX_DOTS[line.style]:
        dots = "".join(f"M{_scale(x, step):.1f} {BOX_SIZE - _scale(y, value):.1f}h0" for step, value in finite)
    return CurvePath(as_text(line.name), write(finite[-1][1]), _svg_path(points, x, y), dots, line.style, line.colour)


def _svg_path(points: Points, x: PlotAxis, y: PlotAxis) -> str:
    words: list[str] = []
    pen_down = alone = False
    for step, value in points:
        if value is None:
            words.append("h0" if alone else "")
            pen_down = alone = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{_scale(x, step):.1f} {max(0.0, BOX_SIZE - _scale(y, value)):.1f}")
        alone = not pen_down
        pen_down = True
    words.append("h0" if alone else "")
    return "".join(words)


def _hover_data(line: Curve, points: Points, x: PlotAxis, y: PlotAxis, write: Callable[[float], str]) -> dict[str, Any]:
    finite = [(step, value) for step, value in points if value is not None]
    return {
        "name": _both(as_text(line.name)),
        "colour": line.colour,
        "style": line.style,
        "step": [step for step, _ in finite],
        "x": [round(_scale(x, step) / 10, 2) for step, _ in finite],
        "y": [round(min(100.0, max(0.0, 100 - _scale(y, value) / 10)), 2) for _, value in finite],
        "text": [write(value) for _, value in finite],
    }


def _both(text: LocalizedText) -> list[str]:
    return [text.en, text.zh]


def draw_levels_chart(draws: Sequence[LevelCounts], steps: tuple[int, int] | None) -> Chart | None:
    """Draw the share of each level over the steps, with a mark where a stage begins.

    Args:
        draws: rows by rising step, each with the samples drawn so far.
        steps: first and last step of the horizontal axis.

    Returns:
        The chart, or None without samples.
    """
    names = list(draws[-1].samples) if draws else []
    columns = _level_columns(draws, names)
    if not columns:
        return None
    low, high = (0, columns[-1][1]) if steps is None else (0, max(steps[1], columns[-1][1]))

    x = PlotAxis("", low, high)
    paths = [
        CurvePath(as_text(name), f"{draws[-1].samples[name]:,.0f}", "", "", "area", _pick_colour(names, name))
        for name in names
    ]
    series: list[dict[str, Any]] = [
        {"name": _both(path.name), "colour": path.colour, "style": "area", "step": [], "x": [], "y": [], "text": []}
        for path in paths
    ]
    for first, last, fractions in columns:
        below = 0.0
        for fraction, path, hover in zip(fractions, paths, series, strict=True):
            bottom, top = (max(0.0, BOX_SIZE * (1 - edge)) for edge in (below, below + fraction))
            if fraction:
                path.d += (
                    f"M{_scale(x, first):.1f} {bottom:.1f}H{_scale(x, last):.1f}V{top:.1f}H{_scale(x, first):.1f}Z"
                )
            hover["step"].append(last)
            hover["x"].append(round(_scale(x, (first + last) / 2) / 10, 2))
            hover["y"].append(round((bottom + top) / 20, 2))
            hover["text"].append(f"{fraction:.0%}")
            below += fraction
    begins = [
        (before.step, get_text("mark.stage", number=after.stage))
        for before, after in pairwise(draws)
        if after.stage != before.stage
    ]
    latest = join_texts(f"{path.name.en} {path.last}" for path in paths)
    return Chart(
        title=get_text("chart.levels"),
        last="",
        label=get_text("chart.levels_label", last=f"{columns[-1][1]:,}", latest=latest),
        note=None,
        paths=paths,
        x_ticks=make_step_ticks(low, high),
        y_ticks=[(100.0 - fraction, f"{fraction} %") for fraction in (0, 25, 50, 75, 100)],
        marks=[(_scale(x, step) / 10, text) for step, text in begins],
        data={"series": series},
        wide=True,
    )


def _level_columns(draws: Sequence[LevelCounts], names: Sequence[str]) -> list[tuple[int, int, list[float]]]:
    """Return (first step, last step, shares) of each stretch; a stretch lies in one stage."""
    stretch = max(1, -(-len(draws) // MAX_COLUMNS))
    columns = []
    begin, before = 0, dict.fromkeys(names, 0.0)
    for number, row in enumerate(draws, 1):
        closes = number == len(draws) or draws[number].stage != row.stage
        if number % stretch and not closes:
            continue
        counts = [max(0.0, row.samples.get(name, 0.0) - before[name]) for name in names]
        if total := sum(counts):
            columns.append((begin, row.step, [each / total for each in counts]))
        begin, before = row.step, {name: row.samples.get(name, 0.0) for name in names}
    return columns


def _pick_colour(names: Sequence[str], name: str) -> int:
    """Spread the levels over the ramp; more of them than it has colours take them in turn."""
    index = names.index(name)
    if len(names) > NUM_COLOURS:
        return FIRST_COLOUR + index % NUM_COLOURS
    return FIRST_COLOUR + round(index * (NUM_COLOURS - 1) / max(1, len(names) - 1))


def format_percent(share: float) -> str:
    """Return a share of 1 in per cent."""
    return f"{100 * share:.4g} %"


def build_panels(run: RunData) -> list[Chart | FigureCard]:
    """Return the panels of what the run has measured, the most important first, charts on one horizontal axis."""
    every = [step for points in run.curves.values() for step, _ in points]
    resumes = [event for event in run.events if event.get("event") == _RESUMED]
    common: dict[str, Any] = {
        "steps": (min(every), max(every)) if every else None,
        "marks": [
            (int(step), get_text("mark.resumed")) for event in resumes if (step := to_finite_number(event.get("step")))
        ],
    }

    def draw(
        title: str, lines: Sequence[Curve], write: Callable[[float], str] = format_three_digits, *, zero: bool = False
    ) -> Chart | FigureCard | None:
        text = get_text(f"chart.{title}")
        return make_figure_card(text, lines, write) or draw_chart(text, lines, write, zero=zero, **common)

    panels = [
        *_learning_panels(run, draw),
        *_answer_panels(run, draw),
        draw("lr", [Curve(get_text("curve.lr"), run.curves.get("lr", []))], zero=True),
        draw("grad_norm", _smoothed_curves(run, "grad_norm"), zero=True),
        draw("tokens_per_s", _smoothed_curves(run, "tokens_per_s"), format_short_count, zero=True),
        draw("ranks", _rank_curves(run), lambda y: f"{1e3 * y:.4g} ms", zero=True),
        draw("utilization", _utilization_curves(run), lambda y: f"{y:.0f} %", zero=True),
        draw("power", _smoothed_curves(run, "device_power_w_mean"), lambda y: f"{y:,.0f} W", zero=True),
        draw_levels_chart(run.level_counts, common["steps"]),
    ]
    return [panel for panel in panels if panel is not None]


_Draw = Callable[..., Chart | FigureCard | None]


def _learning_panels(run: RunData, draw: _Draw) -> list[Chart | FigureCard | None]:
    """Return loss and reward, what matters more first, and the held-out metrics."""
    has_reward, has_pairs = bool(run.curves.get("reward")), bool(run.curves.get("rewards/chosen"))
    title = "loss_pair" if has_pairs else "loss_advantage" if has_reward else "loss"
    loss = draw(
        title, [*_smoothed_curves(run, "loss", is_training=True), heldout_curve(run, "loss")], format_four_digits
    )
    reward = draw("reward", [*_smoothed_curves(run, "reward", is_training=True), heldout_curve(run, "reward")])
    return [
        reward if has_reward else loss,
        loss if has_reward else reward,
        draw("valid_bpb", [heldout_curve(run, "bpb")], format_four_digits),
        draw("valid_perplexity", [heldout_curve(run, "perplexity")], format_four_digits),
        draw(
            "accuracy",
            [*_smoothed_curves(run, "accuracy", is_training=True), heldout_curve(run, "accuracy")],
            format_percent,
        ),
    ]


def _answer_panels(run: RunData, draw: _Draw) -> list[Chart | FigureCard | None]:
    """Return what was measured of preferred and of drawn answers."""
    sides = [
        Curve(get_text(f"curve.{side}"), run.curves.get(f"rewards/{side}", []), colour=number)
        for number, side in enumerate(_ANSWER_SIDES, 1)
    ]
    lengths = [*_smoothed_curves(run, "answer_tokens", is_training=True), heldout_curve(run, "answer_tokens")]
    return [
        draw("answers", sides),
        draw("answer_tokens", lengths, zero=True),
        draw("truncated", _smoothed_curves(run, "truncated"), format_percent, zero=True),
        draw("entropy", _smoothed_curves(run, "entropy"), zero=True),
        draw("kl", _smoothed_curves(run, "kl"), zero=True),
        draw("logprob_diff", _smoothed_curves(run, "logprob_diff"), zero=True),
    ]


def heldout_curve(run: RunData, metric: str) -> Curve:
    """Return the curve of a held-out metric as points."""
    return Curve(get_text("curve.heldout"), run.curves.get(f"valid_{metric}", []), "points", 2)


def _rank_curves(run: RunData) -> list[Curve]:
    kinds = (("compute_s_median", 1), ("compute_s_max", 2), ("wait_s_median", 3))
    return [
        Curve(get_text(f"curve.{kind}"), run.curves.get(f"rank_{kind}", []), colour=colour) for kind, colour in kinds
    ]


def _utilization_curves(run: RunData) -> list[Curve]:
    kinds = (("mean", "line", 1), ("min", "raw", 2), ("max", "raw", 2))
    return [
        Curve(get_text(f"curve.{kind}"), run.curves.get(f"device_util_pct_{kind}", []), style, colour)
        for kind, style, colour in kinds
    ]


def _smoothed_curves(run: RunData, key: str, is_training: bool = False) -> list[Curve]:
    """Return a measured curve, drawn faintly, and its moving average; a short curve alone."""
    points = run.curves.get(key, [])
    smoothed = smooth_points(points)

    def name(kind: str) -> LocalizedText:
        return get_text(f"curve.training_{kind}" if is_training else f"curve.{kind}")

    if smoothed is points:
        return [Curve(get_text("curve.training") if is_training else get_text("curve.measured"), points)]
    return [Curve(name("measured"), points, "raw"), Curve(name("smoothed"), smoothed)]
