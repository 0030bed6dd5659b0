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

from anabatic.config.vessels.evaluate import ClassifyEvalJob, parse_bounds
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.models.classifier import read_description
from anabatic.models.pretrained import resolve_model_folder
from anabatic.vessels.commands import predict_classes
from anabatic.vessels.io import split_file as splits
from anabatic.vessels.io import vessel_splits
from anabatic.vessels.io.split_file import VesselSplit
from anabatic.vessels.metrics import evaluation, plots, predictions, score_tables
from anabatic.vessels.metrics.evaluation import VesselEvaluation
from anabatic.vessels.metrics.predictions import Predictions
from anabatic.vessels.model import baselines
from anabatic.vessels.model.trajectory_classifier import TrajectoryClassifier
from anabatic.vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES
from anabatic.vessels.words.segment_reader import read_segments
from anabatic.vessels.words.segments import Segment


def run(job: ClassifyEvalJob) -> None:
    """Score, print the tables to stdout and write eval.json, confusion matrices and pictures.

    Raises:
        ConfigError: scikit-learn is needed and missing.
        DataError: the predictions, the data or the model cannot be used, or vessels were seen in training.
        Failure: a file cannot be written.
    """
    rows, split, segments = _load_or_compute_predictions(job)
    for reason, count in rows.counts.items():
        if count:
            log.info(f"{count:,} {reason}")
    divided = split_predictions(rows, split, job)
    measured = {name: evaluation.evaluate_predictions(part, job.bootstrap, job.seed) for name, part in divided.items()}
    main = divided[next(iter(divided))]
    others = _measure_baselines(job, main, split, segments)
    out = _output_folder(job)
    RunFolder(out).create_folder()
    sys.stdout.write(score_tables.format_report(measured, others))
    _write_results(job, out, measured, others)


def _output_folder(job: ClassifyEvalJob) -> Path:
    if job.out:
        return Path(job.out)
    return Path(job.model) / "eval" if job.model else Path(job.predictions[0]).resolve().parent / "eval"


def _load_or_compute_predictions(job: ClassifyEvalJob) -> tuple[Predictions, VesselSplit | None, list[Segment]]:
    """Return the rows to score, the split of the model, and the segments behind the rows where data is given."""
    if job.predictions:
        segments = read_segments(job.data, job.tracks).rows if job.data else []
        told = predictions.read_predictions(job.predictions, job.classes)
        trained = _find_training_vessels(told.split, told.vessels, job.seen) if told.split else set()
        known = np.array([vessel in trained for vessel in told.vessels])
        return told.select_rows(~known) if job.seen == "skip" else told, told.split, segments
    classifier = TrajectoryClassifier(job.model, job.device, job.batch_tokens)
    found = predict_classes.read_classifier_segments(job.data, job.tracks, classifier)
    labelled = [one for one in found if one.label is not None]
    if not labelled:
        raise DataError(f"none of {len(found):,} segments has a class", "a score needs to know the right answers")
    split = splits.load_split(classifier.folder / vessel_splits.SPLIT_FILE)
    trained = _find_training_vessels(split, [one.vessel for one in labelled], job.seen)
    if job.seen == "skip":
        labelled = [one for one in labelled if one.vessel not in trained]
    rows = _make_predictions(
        labelled, predict_classes.predict_probabilities(classifier, labelled), classifier.class_names
    )
    rows.counts["segments without a class"] = sum(one.label is None for one in found)
    return rows, split, labelled


def _find_training_vessels(split: VesselSplit, vessels: Sequence[str], seen: str) -> set[str]:
    """Return the vessels that the model was trained on.

    Raises:
        DataError: there are some and `seen` refuses them, or there are no others.
    """
    every = set(vessels)
    trained = {vessel for vessel in every if split.find_side(vessel) == "train"}
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


def split_predictions(rows: Predictions, split: VesselSplit | None, job: ClassifyEvalJob) -> dict[str, Predictions]:
    """Divide the rows: new vessels, those the model was chosen on, regions of both, those it was trained on."""
    if split is None:
        return {"all": rows, **_select_regions(rows, job.regions)}
    sides = np.array([split.find_side(vessel) for vessel in rows.vessels])
    trained, chosen = sides == "train", sides == "valid"
    if chosen.any():
        log.warn(
            f"{len(set(rows.select_rows(chosen).vessels)):,} vessels chose the model in training (early stopping, "
            f"best_model):"
            " their score flatters a little"
        )
    named = {"new vessels": ~trained & ~chosen, "validation vessels": chosen}
    divided = {name: rows.select_rows(which) for name, which in named.items() if which.any()}
    divided |= _select_regions(rows.select_rows(~trained), job.regions)
    if trained.any() and job.seen == "mark":
        divided["TRAINED ON"] = rows.select_rows(trained)
    return divided


def _select_regions(rows: Predictions, regions: Mapping[str, str]) -> dict[str, Predictions]:
    if regions and np.isnan(rows.places).all():
        raise DataError("the rows do not say where they are: no region can be scored", "predict on AIS tables again")
    found = {}
    for name, box in regions.items():
        inside = evaluation.is_inside_box(rows.places, parse_bounds(name, box))
        if not inside.any():
            raise DataError(f"no row is in region {name} ({box})", "the order is SOUTH,NORTH,WEST,EAST")
        found[name] = rows.select_rows(inside)
    return found


def _measure_baselines(
    job: ClassifyEvalJob, rows: Predictions, split: VesselSplit | None, segments: list[Segment]
) -> dict[str, VesselEvaluation]:
    """Measure what must be beaten on the same vessels."""
    windows = {row.window for row in segments} - {0}
    train = read_segments(job.baseline, job.tracks.with_window_lengths(sorted(windows))).rows if job.baseline else []
    scored = set(rows.vessels)
    if split is not None:
        train = [one for one in train if split.find_side(one.vessel) == "train"]
    train = [one for one in train if one.vessel not in scored and one.label is not None]
    known = np.array([one.label for one in train], dtype=np.int64) if train else rows.truth
    shares = baselines.predict_majority(known, len(rows), len(rows.classes))
    found = {
        "majority class": evaluation.evaluate_predictions(_replace_probabilities(rows, shares), job.bootstrap, job.seed)
    }
    if job.baseline:
        test = [one for one in segments if one.vessel in scored and one.label is not None]
        names = read_description(resolve_model_folder(job.model)).features if job.model else ()
        groups = ", ".join(dict.fromkeys(FEATURE_GROUPS[name] for name in names or FEATURE_NAMES))
        log.info(f"boosted trees: {len(train):,} rows train, {len(test):,} test; on {groups}")
        told = baselines.fit_and_predict_trees(train, test, len(rows.classes), job.seed, names)
        found["boosted trees"] = evaluation.evaluate_predictions(
            _make_predictions(test, told, rows.classes), job.bootstrap, job.seed
        )
    return found


def _replace_probabilities(rows: Predictions, probabilities: NDArray[np.float64]) -> Predictions:
    return Predictions(rows.classes, rows.truth, probabilities, rows.vessels, rows.places)


def _make_predictions(rows: list[Segment], probabilities: NDArray[np.float64], classes: tuple[str, ...]) -> Predictions:
    truth = np.array([one.label for one in rows], dtype=np.int64)
    places = np.array([one.place or (np.nan, np.nan) for one in rows], dtype=np.float64).reshape(len(rows), 2)
    return Predictions(classes, truth, probabilities, tuple(one.vessel for one in rows), places)


def _write_results(
    job: ClassifyEvalJob, out: Path, measured: dict[str, VesselEvaluation], others: dict[str, VesselEvaluation]
) -> None:
    """Write eval.json, and of the first part the confusion matrices, the reliability table and the pictures."""
    name, main = next(iter(measured.items()))
    if job.figures:
        for level, scores in (("segment", main.segments), ("vessel", main.vessels)):
            title = f"{scores.rows:,} {level}s: accuracy {scores.accuracy:.3f}, macro-F1 {scores.macro_f1:.3f}"
            write_atomic(out / f"confusion_{level}.svg", plots.draw_confusion(scores, title))
        levels = [("segments", *main.segment_calibration), ("vessels", *main.vessel_calibration)]
        write_atomic(out / "reliability.svg", plots.draw_reliability(levels, f"How sure, and how often right: {name}"))
    for level, scores in (("segment", main.segments), ("vessel", main.vessels)):
        names = [one.name for one in scores.classes]
        table = [["true \\ predicted", *names]]
        table += [[one, *map(str, row)] for one, row in zip(names, scores.confusion.tolist(), strict=True)]
        write_atomic(out / f"confusion_{level}.csv", _format_csv(table))
    result: dict[str, Any] = {"model": job.model or None, "predictions": job.predictions or None, "data": job.data}
    result["parts"] = {one: found.as_json() for one, found in measured.items()}
    result["baselines"] = {one: found.as_json() for one, found in others.items()}
    write_atomic(out / "eval.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {out}/eval.json, confusion matrices and reliability")


def _format_csv(rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
