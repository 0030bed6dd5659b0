"""Text tables of an evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabatic.vessels.metrics import classification
from anabatic.vessels.metrics.classification import ClassificationScores, ConfidenceInterval
from anabatic.vessels.metrics.evaluation import VesselEvaluation


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
