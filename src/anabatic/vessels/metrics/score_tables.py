"""The score as printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabatic.vessels.metrics import classification
from anabatic.vessels.metrics.classification import ClassificationScores, ConfidenceInterval
from anabatic.vessels.metrics.evaluation import VesselEvaluation


def format_report(parts: Mapping[str, VesselEvaluation], baselines: Mapping[str, VesselEvaluation]) -> str:
    """Return the tables: who reached what, the classes and the confusion matrix of the first part, how sure it is."""
    name, main = next(iter(parts.items()))
    blocks = [
        format_summary({f"model, {one}": found for one, found in parts.items()} | dict(baselines)),
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
    """One line for each: vessel level with its interval, then segment level."""
    head = ["", "vessels", "accuracy", "95 %", "macro-F1", "95 %", "balanced", "segments", "accuracy", "macro-F1"]
    table = [head]
    for name, one in rows.items():
        vessel, segment = one.vessels, one.segments
        table.append(
            [
                name,
                f"{vessel.rows:,}",
                f"{vessel.accuracy:.3f}",
                _format_interval(one.intervals["accuracy"]),
                f"{vessel.macro_f1:.3f}",
                _format_interval(one.intervals["macro_f1"]),
                f"{vessel.balanced_accuracy:.3f}",
                f"{segment.rows:,}",
                f"{segment.accuracy:.3f}",
                f"{segment.macro_f1:.3f}",
            ]
        )
    return grid(table)


def compare_with_baselines(model: VesselEvaluation, baselines: Mapping[str, VesselEvaluation]) -> Iterable[str]:
    """Compare with each baseline on the same vessels."""
    for name, other in baselines.items():
        both = [vessel for vessel in model.correct_by_vessel if vessel in other.correct_by_vessel]
        if both:
            import numpy as np

            mine, theirs = (np.array([one.correct_by_vessel[vessel] for vessel in both]) for one in (model, other))
            won, lost, p = classification.mcnemar_test(mine, theirs)
            yield (
                f"Against {name}: {won} vessels right where it is wrong, {lost} the other way round "
                f"(McNemar p = {p:.2g})"
            )


def format_classes(scores: ClassificationScores) -> str:
    """The per-class table."""
    table = [["class", "precision", "recall", "f1", "vessels"]]
    for one in scores.classes:
        table.append([one.name, f"{one.precision:.3f}", f"{one.recall:.3f}", f"{one.f1:.3f}", f"{one.support:,}"])
    return grid(table)


def format_confusion(scores: ClassificationScores) -> str:
    """The matrix; columns are numbered as the rows."""
    table = [["", *(str(at) for at in range(len(scores.classes)))]]
    for at, (one, row) in enumerate(zip(scores.classes, scores.confusion.tolist(), strict=True)):
        table.append([f"{at} {one.name}", *(str(count) if count else "." for count in row)])
    return grid(table)


def format_confidence(measured: VesselEvaluation) -> str:
    """Calibration, and what an abstain threshold costs and brings."""
    lines = [
        f"expected calibration error {measured.vessel_calibration[0]:.3f} per vessel, "
        f"{measured.segment_calibration[0]:.3f} per segment"
    ]
    table = [["at least", "answered", "right"]]
    for row in measured.abstention:
        right = f"{row['accuracy']:.1%}" if row["answered"] else "-"
        table.append([f"{row['threshold']:.1f}", f"{row['answered']:.1%}", right])
    return "\n".join([*lines, grid(table)])


def grid(table: Sequence[Sequence[str]]) -> str:
    """Align: the first column to the left, numbers to the right."""
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _format_interval(one: ConfidenceInterval) -> str:
    return f"{one.low:.3f}-{one.high:.3f}"
