"""Tables and plots of an evaluation: scores, confusion matrix, reliability diagram."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabatic.core import svg_plot
from anabatic.core.svg_plot import compute_ticks, make_linear_axis
from anabatic_vessels.metrics import classification
from anabatic_vessels.metrics.classification import (
    CalibrationBin,
    ClassificationScores,
    ConfidenceInterval,
    VesselEvaluation,
)


def format_report(parts: Mapping[str, VesselEvaluation], baselines: Mapping[str, VesselEvaluation]) -> str:
    """Return the tables: summary, then classes, confusion matrix and confidence of the first part."""
    name, main = next(iter(parts.items()))
    blocks = [
        format_summary({f"model, {part}": evaluation for part, evaluation in parts.items()} | dict(baselines)),
        *compare_with_baselines(main, baselines),
        f"Classes, per vessel ({name})\n{format_classes(main.vessels)}",
        f"Confusion of vessels (true class in rows)\n{format_confusion(main.vessels)}",
        f"Confidence of a vessel's class\n{format_confidence(main)}",
    ]
    if main.conflicting_vessels:
        blocks.append(
            f"{len(main.conflicting_vessels)} vessels have rows of several classes, such as "
            f"{main.conflicting_vessels[0]}: the most counts"
        )
    return "\n\n".join(blocks) + "\n"


def format_summary(rows: Mapping[str, VesselEvaluation]) -> str:
    """Return one line per evaluation: vessel level with its interval, then segment level."""
    header = ["", "vessels", "accuracy", "95 %", "macro-F1", "95 %", "balanced", "segments", "accuracy", "macro-F1"]
    table = [header]
    for name, evaluation in rows.items():
        vessel, segment = evaluation.vessels, evaluation.segments
        table.append(
            [
                name,
                f"{vessel.rows:,}",
                f"{vessel.accuracy:.3f}",
                _format_interval(evaluation.intervals["accuracy"]),
                f"{vessel.macro_f1:.3f}",
                _format_interval(evaluation.intervals["macro_f1"]),
                f"{vessel.balanced_accuracy:.3f}",
                f"{segment.rows:,}",
                f"{segment.accuracy:.3f}",
                f"{segment.macro_f1:.3f}",
            ]
        )
    return grid(table)


def compare_with_baselines(model: VesselEvaluation, baselines: Mapping[str, VesselEvaluation]) -> Iterable[str]:
    """Yield a comparison with each baseline on the same vessels."""
    for name, baseline in baselines.items():
        shared = [vessel for vessel in model.correct_by_vessel if vessel in baseline.correct_by_vessel]
        if shared:
            import numpy as np

            model_correct, baseline_correct = (
                np.array([evaluation.correct_by_vessel[vessel] for vessel in shared])
                for evaluation in (model, baseline)
            )
            won, lost, p = classification.mcnemar_test(model_correct, baseline_correct)
            yield (
                f"Against {name}: {won} vessels right where it is wrong, {lost} the other way round "
                f"(McNemar p = {p:.2g})"
            )


def format_classes(scores: ClassificationScores) -> str:
    """Return the per-class table."""
    table = [["class", "precision", "recall", "f1", "vessels"]]
    for score in scores.classes:
        table.append(
            [score.name, f"{score.precision:.3f}", f"{score.recall:.3f}", f"{score.f1:.3f}", f"{score.support:,}"]
        )
    return grid(table)


def format_confusion(scores: ClassificationScores) -> str:
    """Return the confusion matrix; columns are numbered as the rows."""
    table = [["", *(str(index) for index in range(len(scores.classes)))]]
    for index, (score, row) in enumerate(zip(scores.classes, scores.confusion.tolist(), strict=True)):
        table.append([f"{index} {score.name}", *(str(count) if count else "." for count in row)])
    return grid(table)


def format_confidence(evaluation: VesselEvaluation) -> str:
    """Return the calibration error and the abstention table."""
    lines = [
        f"expected calibration error {evaluation.vessel_calibration[0]:.3f} per vessel, "
        f"{evaluation.segment_calibration[0]:.3f} per segment"
    ]
    table = [["at least", "answered", "right"]]
    for row in evaluation.abstention:
        accuracy = f"{row['accuracy']:.1%}" if row["answered"] else "-"
        table.append([f"{row['threshold']:.1f}", f"{row['answered']:.1%}", accuracy])
    return "\n".join([*lines, grid(table)])


def grid(table: Sequence[Sequence[str]]) -> str:
    """Align the columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _format_interval(interval: ConfidenceInterval) -> str:
    return f"{interval.low:.3f}-{interval.high:.3f}"


_BLUE, _ORANGE = "c6", "c2"
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
            make_linear_axis("", 1.0, 5, "{:.1f}".format),
            make_linear_axis("" if index else "share right", 1.0, 5, "{:.1f}".format),
            f"{name}: expected calibration error {error:.3f}",
            left=left,
            top=svg_plot.TOP,
            width=_PANEL_WIDTH,
            height=_UPPER_HEIGHT,
        )
        max_rows = 1.05 * max(1, *(row.rows for row in bins))
        lower = svg_plot.PlotPanel(
            make_linear_axis("confidence", 1.0, 5, "{:.1f}".format),
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
