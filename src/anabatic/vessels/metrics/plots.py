"""Pictures of a score: confusion matrix and reliability diagram, as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from anabatic.core.errors import ConfigError
from anabatic.vessels.metrics.classification import CalibrationBin, ClassificationScores

INK, GRID, BAR, GAP = "#1f2328", "#d0d7de", "#2f6fb2", "#d9822b"


def draw_confusion(scores: ClassificationScores, title: str) -> bytes:
    """Draw the confusion matrix: shares of each true class as shades, counts as numbers."""
    plt = _import_pyplot()
    names = [one.name.replace("_", " ") for one in scores.classes]
    matrix = scores.confusion
    shares = matrix / matrix.sum(1, keepdims=True).clip(1)
    side = max(4.5, 0.62 * len(names) + 2.2)
    figure, axes = plt.subplots(figsize=(side + 0.8, side), layout="constrained")
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row in range(len(names)):
        for column in range(len(names)):
            if matrix[row, column]:
                colour = "white" if shares[row, column] > 0.55 else INK
                axes.text(column, row, f"{matrix[row, column]:,}", ha="center", va="center", color=colour, fontsize=9)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    axes.set_title(title, fontsize=11)
    figure.colorbar(image, ax=axes, shrink=0.8, label="share of the true class")
    return _save_png(plt, figure)


def draw_reliability(levels: Sequence[tuple[str, float, list[CalibrationBin]]], title: str) -> bytes:
    """Draw one reliability diagram for each `(name, expected calibration error, bins)`."""
    plt = _import_pyplot()
    figure, grid = plt.subplots(
        2,
        len(levels),
        figsize=(4.3 * len(levels), 4.9),
        squeeze=False,
        sharex=True,
        height_ratios=(3, 1),
        layout="constrained",
    )
    for column, (name, error, bins) in enumerate(levels):
        axes, below = grid[0][column], grid[1][column]
        centres = [(one.low + one.high) / 2 for one in bins]
        width = (bins[0].high - bins[0].low) * 0.9
        axes.bar(centres, [one.accuracy for one in bins], width=width, color=BAR, label="accuracy")
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle="--", label="perfectly calibrated")
        known = [(one.confidence, one.accuracy) for one in bins if one.rows]
        axes.plot(*zip(*known, strict=True), "o", color=GAP, label="mean of bin", clip_on=False, zorder=3)
        axes.set_title(f"{name}: expected calibration error {error:.3f}", fontsize=10)
        below.bar(centres, [one.rows for one in bins], width=width, color=GRID)
        below.yaxis.get_major_locator().set_params(integer=True)
        below.set_xlabel("confidence")
        below.set_ylabel(name)
        for one in (axes, below):
            one.set_xlim(0, 1)
            one.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, 1)
    grid[0][0].set_ylabel("share right")
    grid[0][0].legend(loc="upper left", fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return _save_png(plt, figure)


def _import_pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("figures need matplotlib", "pip install 'anabatic[trajectory]', or --no-figures") from error
    matplotlib.use("Agg")  # no window, no display
    import matplotlib.pyplot as plt

    return plt


def _save_png(plt: Any, figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    plt.close(figure)
    return buffer.getvalue()
