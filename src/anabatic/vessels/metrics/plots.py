"""Plots of an evaluation: confusion matrix and reliability diagram, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.core import svg_plot
from anabatic.core.axis_ticks import compute_ticks
from anabatic.vessels.metrics.classification import CalibrationBin, ClassificationScores

_BLUE, _ORANGE = "c5", "c1"
_LETTER_PIXELS = 7.5
_CELL_HEIGHT, _MIN_CELL_WIDTH = 40.0, 64.0
_INVERSE_ABOVE = 0.55
"""Fraction of a true class above which a cell is so dark that its number has the colour of the background."""
_PANEL_WIDTH, _UPPER_HEIGHT, _LOWER_HEIGHT = 480.0, 380.0, 180.0


def draw_confusion(scores: ClassificationScores, title: str) -> str:
    """Draw the confusion matrix: fractions of each true class as shades, counts as numbers."""
    names = [score.name.replace("_", " ") for score in scores.classes]
    num_classes, label_pixels = len(names), _LETTER_PIXELS * max(map(len, names))
    fractions = scores.confusion / scores.confusion.sum(1, keepdims=True).clip(1)
    label_width = 50 + label_pixels
    panel = svg_plot.PlotPanel(
        svg_plot.PlotAxis(
            "predicted; the darker, the more of the true class", -0.5, num_classes - 0.5, _name_ticks(names)
        ),
        svg_plot.PlotAxis("true", -0.5, num_classes - 0.5, _name_ticks(names[::-1])),
        title,
        width=max(
            label_width + svg_plot.RIGHT + num_classes * max(label_pixels + 10, _MIN_CELL_WIDTH),
            label_width + svg_plot.RIGHT + 1.2 * _LETTER_PIXELS * len(title),
        ),
        height=svg_plot.TOP + svg_plot.BOTTOM + _CELL_HEIGHT * num_classes,
        label_width=label_width,
    )
    for row in range(num_classes):
        y = num_classes - 1 - row
        for column in range(num_classes):
            fraction, count = float(fractions[row, column]), int(scores.confusion[row, column])
            panel.draw_cell((column - 0.5, y - 0.5), (column + 0.5, y + 0.5), _BLUE, min(fraction, 0.999))
            if count:
                style = "inverse" if fraction > _INVERSE_ABOVE else ""
                panel.draw_text(column, y, f"{count:,}", style, "middle", (0, 4))
    return svg_plot.render_document([panel.render_panel()], panel.width, panel.height, title)


def _name_ticks(names: Sequence[str]) -> list[tuple[float, str]]:
    return [(float(index), name) for index, name in enumerate(names)]


def draw_reliability(levels: Sequence[tuple[str, float, list[CalibrationBin]]], title: str) -> str:
    """Draw one reliability diagram per `(name, expected calibration error, bins)`."""
    parts = [svg_plot.render_text(20, 20, title, "title")]
    bottom = _UPPER_HEIGHT + _LOWER_HEIGHT
    for index, (name, error, bins) in enumerate(levels):
        left = index * _PANEL_WIDTH
        upper = svg_plot.PlotPanel(
            svg_plot.PlotAxis("", 0.0, 1.0, _number_ticks(1.0)),
            svg_plot.PlotAxis("" if index else "share right", 0.0, 1.0, _number_ticks(1.0)),
            f"{name}: expected calibration error {error:.3f}",
            left=left,
            top=svg_plot.TOP,
            width=_PANEL_WIDTH,
            height=_UPPER_HEIGHT,
        )
        max_rows = 1.05 * max(1, *(row.rows for row in bins))
        lower = svg_plot.PlotPanel(
            svg_plot.PlotAxis("confidence", 0.0, 1.0, _number_ticks(1.0)),
            svg_plot.PlotAxis(
                name,
                0.0,
                max_rows,
                [(tick, f"{tick:,.0f}") for tick in compute_ticks(0.0, max_rows, 3, integers_only=True)],
            ),
            left=left,
            top=_UPPER_HEIGHT,
            width=_PANEL_WIDTH,
            height=_LOWER_HEIGHT,
        )
        for row in bins:
            upper.draw_cell((row.low, 0.0), (row.high, row.accuracy), _BLUE)
            lower.draw_cell((row.low, 0.0), (row.high, row.rows), _BLUE, 0.4)
        upper.draw_line([(0.0, 0.0), (1.0, 1.0)], "dash")
        for row in bins:
            if row.rows:
                tooltip = f"{row.rows:,} {name}: confidence {row.confidence:.3f}, right {row.accuracy:.3f}"
                upper.draw_mark(row.confidence, row.accuracy, "circle", f"full {_ORANGE}", tooltip)
        parts += [upper.render_panel(), lower.render_panel()]
    legend = [
        ("square", f"full {_BLUE}", "accuracy"),
        ("circle", f"full {_ORANGE}", "mean of the bin"),
        ("line", "dash", "perfectly calibrated"),
    ]
    parts.append(svg_plot.render_legend(legend, svg_plot.LEFT, bottom + 30))
    return svg_plot.render_document(parts, _PANEL_WIDTH * len(levels), bottom + 100, title)


def _number_ticks(maximum: float) -> list[tuple[float, str]]:
    return [(value, f"{value:.1f}") for value in compute_ticks(0.0, maximum, 5)]
