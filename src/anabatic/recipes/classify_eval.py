"""`anabatic classify eval`: an honest score of a vessel classifier, in tables, files and pictures."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabatic.config.classify_eval import ClassifyEvalJob, bounds
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.infer.classify import TrajectoryClassifier
from anabatic.models.classifier import read_description
from anabatic.models.hf import resolve
from anabatic.recipes import classify_data, classify_predict
from anabatic.trajectory import baseline, evaluate, figures, predictions, report
from anabatic.trajectory import split as splits
from anabatic.trajectory.evaluate import Measured
from anabatic.trajectory.features import GROUPS, NAMES
from anabatic.trajectory.predictions import Predictions
from anabatic.trajectory.read import read_segments
from anabatic.trajectory.segment import Segment
from anabatic.trajectory.split import Split


def run(job: ClassifyEvalJob) -> None:
    """Score, print the tables to stdout and write eval.json, confusion matrices and pictures.

    Raises:
        ConfigError: matplotlib or scikit-learn is needed and missing.
        DataError: the predictions, the data or the model cannot be used, or vessels were seen in training.
        Failure: a file cannot be written.
    """
    rows, split, segments = _predictions(job)
    for reason, count in rows.counts.items():
        if count:
            log.info(f"{count:,} {reason}")
    divided = parts(rows, split, job)
    measured = {name: evaluate.measure(part, job.bootstrap, job.seed) for name, part in divided.items()}
    main = divided[next(iter(divided))]
    others = _baselines(job, main, split, segments)
    out = _out(job)
    RunFolder(out).create()
    sys.stdout.write(report.text(measured, others))
    _write(job, out, measured, others)


def _out(job: ClassifyEvalJob) -> Path:
    if job.out:
        return Path(job.out)
    return Path(job.model) / "eval" if job.model else Path(job.predictions[0]).resolve().parent / "eval"


def _predictions(job: ClassifyEvalJob) -> tuple[Predictions, Split | None, list[Segment]]:
    """Return the rows to score, the split of the model, and the segments behind the rows where data is given."""
    if job.predictions:
        segments = read_segments(job.data, job.tracks).rows if job.data else []
        told = predictions.read(job.predictions, job.classes)
        trained = _trained(told.split, told.vessels, job.seen) if told.split else set()
        known = np.array([vessel in trained for vessel in told.vessels])
        return told.keep(~known) if job.seen == "skip" else told, told.split, segments
    classifier = TrajectoryClassifier(job.model, job.device, job.batch_tokens)
    found = classify_predict.segments_of(job.data, job.tracks, classifier)
    labelled = [one for one in found if one.label is not None]
    if not labelled:
        raise DataError(f"none of {len(found):,} segments has a class", "a score needs to know the right answers")
    split = splits.load(classifier.folder / classify_data.SPLIT)
    trained = _trained(split, [one.vessel for one in labelled], job.seen)
    if job.seen == "skip":
        labelled = [one for one in labelled if one.vessel not in trained]
    rows = _of(labelled, classify_predict.ask(classifier, labelled), classifier.classes)
    rows.counts["segments without a class"] = sum(one.label is None for one in found)
    return rows, split, labelled


def _trained(split: Split, vessels: Sequence[str], seen: str) -> set[str]:
    """Return the vessels that the model was trained on.

    Raises:
        DataError: there are some and `seen` refuses them, or there are no others.
    """
    every = set(vessels)
    trained = {vessel for vessel in every if split.side(vessel) == "train"}
    if trained and seen == "refuse":
        raise DataError(
            f"the model was trained on {len(trained):,} of {len(every):,} vessels: a score on them shows what it knows"
            " by heart",
            "give other vessels; --seen skip leaves these out, --seen mark scores them apart",
        )
    if trained == every:
        raise DataError(f"the model was trained on all {len(every):,} vessels", "give vessels that it does not know")
    if trained:
        log.info(f"trained on {len(trained):,} of the vessels: {'left out' if seen == 'skip' else 'scored apart'}")
    return trained


def parts(rows: Predictions, split: Split | None, job: ClassifyEvalJob) -> dict[str, Predictions]:
    """Divide the rows: new vessels, those the model was chosen on, regions of both, those it was trained on."""
    if split is None:
        return {"all": rows, **_regions(rows, job.regions)}
    sides = np.array([split.side(vessel) for vessel in rows.vessels])
    trained, chosen = sides == "train", sides == "valid"
    if chosen.any():
        log.warn(
            f"{len(set(rows.keep(chosen).vessels)):,} vessels chose the model in training (early stopping, best_model):"
            " their score flatters a little"
        )
    named = {"new vessels": ~trained & ~chosen, "validation vessels": chosen}
    divided = {name: rows.keep(which) for name, which in named.items() if which.any()}
    divided |= _regions(rows.keep(~trained), job.regions)
    if trained.any() and job.seen == "mark":
        divided["TRAINED ON"] = rows.keep(trained)
    return divided


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
    windows = {row.window for row in segments} - {0}
    train = read_segments(job.baseline, job.tracks.cut_as(sorted(windows))).rows if job.baseline else []
    scored = set(rows.vessels)
    if split is not None:
        train = [one for one in train if split.side(one.vessel) == "train"]
    train = [one for one in train if one.vessel not in scored and one.label is not None]
    known = np.array([one.label for one in train], dtype=np.int64) if train else rows.truth
    shares = baseline.majority(known, len(rows), len(rows.classes))
    found = {"majority class": evaluate.measure(_instead(rows, shares), job.bootstrap, job.seed)}
    if job.baseline:
        test = [one for one in segments if one.vessel in scored and one.label is not None]
        names = read_description(resolve(job.model)).features if job.model else ()
        groups = ", ".join(dict.fromkeys(GROUPS[name] for name in names or NAMES))
        log.info(f"boosted trees: {len(train):,} rows train, {len(test):,} test; on {groups}")
        told = baseline.trees(train, test, len(rows.classes), job.seed, names)
        found["boosted trees"] = evaluate.measure(_of(test, told, rows.classes), job.bootstrap, job.seed)
    return found


def _instead(rows: Predictions, probabilities: NDArray[np.float64]) -> Predictions:
    return Predictions(rows.classes, rows.truth, probabilities, rows.vessels, rows.places)


def _of(rows: list[Segment], probabilities: NDArray[np.float64], classes: tuple[str, ...]) -> Predictions:
    truth = np.array([one.label for one in rows], dtype=np.int64)
    places = np.array([one.place or (np.nan, np.nan) for one in rows], dtype=np.float64).reshape(len(rows), 2)
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
