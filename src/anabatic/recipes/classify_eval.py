"""`anabatic classify eval`: an honest score of a vessel classifier, in tables, files and pictures."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.config.classify_eval import ClassifyEvalJob, bounds
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.trajectory import baseline, evaluate, figures, predictions, report
from anabatic.trajectory.evaluate import Measured
from anabatic.trajectory.predictions import Predictions
from anabatic.trajectory.segment import Segment, read_segments
from anabatic.trajectory.split import Split


def run(job: ClassifyEvalJob) -> None:
    """Score, print the tables to stdout and write eval.json, confusion matrices and pictures.

    Raises:
        ConfigError: matplotlib or scikit-learn is needed and missing.
        DataError: the predictions, the data or the model cannot be used, or vessels were seen in training.
        Failure: a file cannot be written.
    """
    out = _out(job)
    RunFolder(out).create()
    rows, split, segments = _predictions(job)
    for reason, count in rows.counts.items():
        if count:
            log.info(f"{count:,} {reason}")
    parts = _parts(rows, split, job)
    measured = {name: evaluate.measure(part, job.bootstrap, job.seed) for name, part in parts.items()}
    main = parts[next(iter(parts))]
    others = _baselines(job, main, split, segments)
    sys.stdout.write(report.text(measured, others))
    _write(job, out, measured, others)


def _out(job: ClassifyEvalJob) -> Path:
    if job.out:
        return Path(job.out)
    return Path(job.model) / "eval" if job.model else Path(job.predictions[0]).resolve().parent / "eval"


def _predictions(job: ClassifyEvalJob) -> tuple[Predictions, Split | None, list[Segment]]:
    """Return the rows to score, the split of the model, and the segments behind the rows where data is given."""
    segments = read_segments(job.data, job.tracks).rows if job.data else []
    return predictions.read(job.predictions, job.classes), None, segments


def _parts(rows: Predictions, split: Split | None, job: ClassifyEvalJob) -> dict[str, Predictions]:
    """Divide the rows: unseen vessels first, then each region, then the vessels seen in training."""
    seen = np.array([bool(split and split.side(vessel) in ("train", "valid")) for vessel in rows.vessels])
    used = len({vessel for vessel, one in zip(rows.vessels, seen.tolist(), strict=True) if one})
    total = len(set(rows.vessels))
    if used and job.seen == "refuse":
        raise DataError(
            f"{used:,} of {total:,} vessels were seen in training: a score on them would only show what was learned "
            "by heart",
            "give other vessels; --seen skip leaves these out, --seen mark scores them apart",
        )
    if used == total:
        raise DataError(f"all {total:,} vessels were seen in training", "give vessels that the model does not know")
    if used:
        log.info(f"{used:,} vessels were seen in training: {'left out' if job.seen == 'skip' else 'scored apart'}")
    unseen = rows.keep(~seen)
    parts = {"all" if split is None else "unseen vessels": unseen}
    parts |= _regions(unseen, job.regions)
    if used and job.seen == "mark":
        parts["SEEN IN TRAINING"] = rows.keep(seen)
    return parts


def _regions(rows: Predictions, regions: Mapping[str, str]) -> dict[str, Predictions]:
    if regions and np.isnan(rows.places).all():
        raise DataError("the rows do not say where they are: no region can be scored", "predict on AIS tables again")
    found = {}
    for name, box in regions.items():
        inside = evaluate.inside(rows.places, bounds(name, box))
        if not inside.any():
            raise DataError(f"no row lies in region {name} ({box})", "the order is SOUTH,NORTH,WEST,EAST")
        found[name] = rows.keep(inside)
    return found


def _baselines(
    job: ClassifyEvalJob, rows: Predictions, split: Split | None, segments: list[Segment]
) -> dict[str, Measured]:
    """Measure what must be beaten on the same vessels."""
    train = read_segments(job.baseline, job.tracks).rows if job.baseline else []
    scored = set(rows.vessels)
    if split is not None:
        train = [one for one in train if split.side(one.vessel) == "train"]
    train = [one for one in train if one.vessel not in scored and one.label is not None]
    known = np.array([one.label for one in train], dtype=np.int64) if train else rows.truth
    shares = baseline.majority(known, len(rows), len(rows.classes))
    found = {"majority class": evaluate.measure(_instead(rows, shares), job.bootstrap, job.seed)}
    if job.baseline:
        test = [one for one in segments if one.vessel in scored and one.label is not None]
        log.info(f"trees: {len(train):,} rows train, {len(test):,} test")
        told = baseline.trees(train, test, len(rows.classes), job.seed)
        found["boosted trees"] = evaluate.measure(_of(test, told, rows.classes), job.bootstrap, job.seed)
    return found


def _instead(rows: Predictions, probabilities: NDArray[np.float64]) -> Predictions:
    return Predictions(rows.classes, rows.truth, probabilities, rows.vessels, rows.places)


def _of(rows: list[Segment], probabilities: NDArray[np.float64], classes: tuple[str, ...]) -> Predictions:
    truth = np.array([one.label for one in rows], dtype=np.int64)
    places = np.full((len(rows), 2), np.nan)
    return Predictions(classes, truth, probabilities, tuple(one.vessel for one in rows), places)


def _write(job: ClassifyEvalJob, out: Path, measured: dict[str, Measured], others: dict[str, Measured]) -> None:
    """Write eval.json, and of the first part the confusion matrices, the reliability table and the pictures."""
    name, main = next(iter(measured.items()))
    if job.figures:
        for level, scores in (("segment", main.segments), ("vessel", main.vessels)):
            title = f"{scores.rows:,} {level}s: accuracy {scores.accuracy:.3f}, macro-F1 {scores.macro_f1:.3f}"
            write_atomic(out / f"confusion_{level}.png", figures.confusion_png(scores, title))
        levels = [("segments", *main.segment_calibration), ("vessels", *main.vessel_calibration)]
        write_atomic(out / "reliability.png", figures.reliability_png(levels, f"How sure, and how often right: {name}"))
    for level, scores in (("segment", main.segments), ("vessel", main.vessels)):
        names = [one.name for one in scores.classes]
        table = [["true \\ predicted", *names]]
        table += [[one, *map(str, row)] for one, row in zip(names, scores.confusion.tolist(), strict=True)]
        write_atomic(out / f"confusion_{level}.csv", _csv(table))
    result: dict[str, Any] = {"model": job.model or None, "predictions": job.predictions or None, "data": job.data}
    result["parts"] = {one: found.as_json() for one, found in measured.items()}
    result["baselines"] = {one: found.as_json() for one, found in others.items()}
    write_atomic(out / "eval.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {out}/eval.json, confusion matrices and reliability")


def _csv(rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
