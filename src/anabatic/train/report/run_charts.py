"""The panels of one run: which of its metrics are drawn together, in which unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anabatic.core.json_reader import to_finite_number
from anabatic.core.language import LocalizedText
from anabatic.core.svg_plot import format_short_count
from anabatic.monitor.run_data import RunData, smooth_points
from anabatic.train.report.charts import (
    Chart,
    Curve,
    FigureCard,
    draw_chart,
    draw_levels_chart,
    make_figure_card,
)
from anabatic.train.report.words import get_text

format_three_digits: Callable[[float], str] = "{:.3g}".format
format_four_digits: Callable[[float], str] = "{:.4g}".format
_ANSWER_SIDES = ("chosen", "rejected")
_RESUMED = "resume"


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
    """A measured curve, faint, under its moving average; the curve alone when it is short."""
    points = run.curves.get(key, [])
    smoothed = smooth_points(points)

    def name(kind: str) -> LocalizedText:
        return get_text(f"curve.training_{kind}" if is_training else f"curve.{kind}")

    if smoothed is points:
        return [Curve(get_text("curve.training") if is_training else get_text("curve.measured"), points)]
    return [Curve(name("measured"), points, "raw"), Curve(name("smoothed"), smoothed)]
