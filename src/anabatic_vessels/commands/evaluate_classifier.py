"""`anabatic classify eval`: scores of a vessel classifier, as tables, files and plots."""

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

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder, write_atomic
from anabatic_vessels.commands import predict_classes
from anabatic_vessels.config.evaluation import ClassifyEvalJob, parse_bounds
from anabatic_vessels.io import split_file as splits
from anabatic_vessels.io import vessel_splits
from anabatic_vessels.io.description import read_description
from anabatic_vessels.io.split_file import VesselSplit
from anabatic_vessels.metrics import classification, predictions, score_tables
from anabatic_vessels.metrics.classification import VesselEvaluation
from anabatic_vessels.metrics.predictions import Predictions
from anabatic_vessels.model import baselines
from anabatic_vessels.model.trajectory_classifier import TrajectoryClassifier
from anabatic_vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import Segment


def run(job: ClassifyEvalJob) -> None:
    """Score, print the tables to stdout and write eval.json, confusion matrices and plots.

    Raises:
        ConfigError: scikit-learn is required and not installed.
        DataError: the predictions, the data or the model cannot be used, or vessels were seen in training.
        Failure: a file cannot be written.
    """
    rows, split, segments = _load_or_compute_predictions(job)
    for reason, count in rows.counts.items():
        if count:
            log.info(f"{count:,} {reason}")
    parts = split_predictions(rows, split, job)
    evaluations = {
        name: classification.evaluate_predictions(part, job.bootstrap, job.seed) for name, part in parts.items()
    }
    main_part = parts[next(iter(parts))]
    baseline_evaluations = _measure_baselines(job, main_part, split, segments)
    out = _output_folder(job)
    RunFolder(out).create_folder()
    sys.stdout.write(score_tables.format_report(evaluations, baseline_evaluations))
    _write_results(job, out, evaluations, baseline_evaluations)


def _output_folder(job: ClassifyEvalJob) -> Path:
    if job.out:
        return Path(job.out)
    return Path(job.model) / "eval" if job.model else Path(job.predictions[0]).resolve().parent / "eval"


def _load_or_compute_predictions(job: ClassifyEvalJob) -> tuple[Predictions, VesselSplit | None, list[Segment]]:
    """Return the rows to score, the split of the model, and the segments of the rows if data is given."""
    if job.predictions:
        segments = read_segments(job.data, job.tracks).rows if job.data else []
        loaded = predictions.read_predictions(job.predictions, job.classes)
        training_vessels = _find_training_vessels(loaded.split, loaded.vessels, job.seen) if loaded.split else set()
        is_trained = np.array([vessel in training_vessels for vessel in loaded.vessels])
        return loaded.select_rows(~is_trained) if job.seen == "skip" else loaded, loaded.split, segments
    classifier = TrajectoryClassifier(job.model, job.device, job.batch_tokens)
    segment_set = predict_classes.read_classifier_segments(job.data, job.tracks, classifier)
    labelled = [segment for segment in segment_set if segment.label is not None]
    if not labelled:
        raise DataError(f"none of {len(segment_set):,} segments has a class", "a score needs to know the right answers")
    split = splits.load_split(classifier.folder / vessel_splits.SPLIT_FILE)
    training_vessels = _find_training_vessels(split, [segment.vessel for segment in labelled], job.seen)
    if job.seen == "skip":
        labelled = [segment for segment in labelled if segment.vessel not in training_vessels]
    rows = _make_predictions(
        labelled, predict_classes.predict_probabilities(classifier, labelled), classifier.class_names
    )
    rows.counts["segments without a class"] = sum(segment.label is None for segment in segment_set)
    return rows, split, labelled


def _find_training_vessels(split: VesselSplit, vessels: Sequence[str], seen: str) -> set[str]:
    """Return the vessels that the model was trained on.

    Raises:
        DataError: there are such vessels and `seen` is `refuse`, or all are such vessels.
    """
    all_vessels = set(vessels)
    training_vessels = {vessel for vessel in all_vessels if split.find_side(vessel) == "train"}
    if training_vessels and seen == "refuse":
        raise DataError(
            f"the model was trained on {len(training_vessels):,} of {len(all_vessels):,} vessels: a"
            " score on them measures what it memorized",
            "give other vessels; --seen skip leaves these out, --seen mark scores them apart",
        )
    if training_vessels == all_vessels:
        raise DataError(
            f"the model was trained on all {len(all_vessels):,} vessels", "give vessels that it does not know"
        )
    if training_vessels:
        log.info(
            f"trained on {len(training_vessels):,} of the vessels: {'left out' if seen == 'skip' else 'scored apart'}"
        )
    return training_vessels


def split_predictions(rows: Predictions, split: VesselSplit | None, job: ClassifyEvalJob) -> dict[str, Predictions]:
    """Split the rows: new vessels, validation vessels of the training, regions of both, training vessels."""
    if split is None:
        return {"all": rows, **_select_regions(rows, job.regions)}
    sides = np.array([split.find_side(vessel) for vessel in rows.vessels])
    is_train, is_valid = sides == "train", sides == "valid"
    if is_valid.any():
        log.warn(
            f"{len(set(rows.select_rows(is_valid).vessels)):,} vessels chose the model in training (early stopping, "
            f"best_model):"
            " their score flatters a little"
        )
    masks = {"new vessels": ~is_train & ~is_valid, "validation vessels": is_valid}
    parts = {name: rows.select_rows(mask) for name, mask in masks.items() if mask.any()}
    parts |= _select_regions(rows.select_rows(~is_train), job.regions)
    if is_train.any() and job.seen == "mark":
        parts["TRAINED ON"] = rows.select_rows(is_train)
    return parts


def _select_regions(rows: Predictions, regions: Mapping[str, str]) -> dict[str, Predictions]:
    if regions and np.isnan(rows.places).all():
        raise DataError("the rows do not say where they are: no region can be scored", "predict on AIS tables again")
    selected = {}
    for name, box in regions.items():
        mask = classification.is_inside_box(rows.places, parse_bounds(name, box))
        if not mask.any():
            raise DataError(f"no row is in region {name} ({box})", "the order is SOUTH,NORTH,WEST,EAST")
        selected[name] = rows.select_rows(mask)
    return selected


def _measure_baselines(
    job: ClassifyEvalJob, rows: Predictions, split: VesselSplit | None, segments: list[Segment]
) -> dict[str, VesselEvaluation]:
    """Evaluate the baselines on the same vessels."""
    windows = {row.window for row in segments} - {0}
    train = read_segments(job.baseline, job.tracks.with_window_lengths(sorted(windows))).rows if job.baseline else []
    scored = set(rows.vessels)
    if split is not None:
        train = [segment for segment in train if split.find_side(segment.vessel) == "train"]
    train = [segment for segment in train if segment.vessel not in scored and segment.label is not None]
    labels = np.array([segment.label for segment in train], dtype=np.int64) if train else rows.truth
    majority = _replace_probabilities(rows, baselines.predict_majority(labels, len(rows), len(rows.classes)))
    evaluations = {"majority class": classification.evaluate_predictions(majority, job.bootstrap, job.seed)}
    if job.baseline:
        test = [segment for segment in segments if segment.vessel in scored and segment.label is not None]
        names = read_description(job.model).features if job.model else ()
        groups = ", ".join(dict.fromkeys(FEATURE_GROUPS[name] for name in names or FEATURE_NAMES))
        log.info(f"boosted trees: {len(train):,} rows train, {len(test):,} test; on {groups}")
        probabilities = baselines.fit_and_predict_trees(train, test, len(rows.classes), job.seed, names)
        evaluations["boosted trees"] = classification.evaluate_predictions(
            _make_predictions(test, probabilities, rows.classes), job.bootstrap, job.seed
        )
    return evaluations


def _replace_probabilities(rows: Predictions, probabilities: NDArray[np.float64]) -> Predictions:
    return Predictions(rows.classes, rows.truth, probabilities, rows.vessels, rows.places)


def _make_predictions(rows: list[Segment], probabilities: NDArray[np.float64], classes: tuple[str, ...]) -> Predictions:
    truth = np.array([row.label for row in rows], dtype=np.int64)
    positions = np.array([row.place or (np.nan, np.nan) for row in rows], dtype=np.float64).reshape(len(rows), 2)
    return Predictions(classes, truth, probabilities, tuple(row.vessel for row in rows), positions)


def _write_results(
    job: ClassifyEvalJob,
    out: Path,
    evaluations: dict[str, VesselEvaluation],
    baseline_evaluations: dict[str, VesselEvaluation],
) -> None:
    """Write eval.json, and for the first part the confusion matrices, the reliability table and the plots."""
    name, main = next(iter(evaluations.items()))
    if job.figures:
        for level, scores in (("segment", main.segments), ("vessel", main.vessels)):
            title = f"{scores.rows:,} {level}s: accuracy {scores.accuracy:.3f}, macro-F1 {scores.macro_f1:.3f}"
            write_atomic(out / f"confusion_{level}.svg", score_tables.draw_confusion(scores, title))
        levels = [("segments", *main.segment_calibration), ("vessels", *main.vessel_calibration)]
        write_atomic(
            out / "reliability.svg", score_tables.draw_reliability(levels, f"How sure, and how often right: {name}")
        )
    for level, scores in (("segment", main.segments), ("vessel", main.vessels)):
        names = [score.name for score in scores.classes]
        table = [["true \\ predicted", *names]]
        table += [[label, *map(str, row)] for label, row in zip(names, scores.confusion.tolist(), strict=True)]
        write_atomic(out / f"confusion_{level}.csv", _format_csv(table))
    result: dict[str, Any] = {"model": job.model or None, "predictions": job.predictions or None, "data": job.data}
    result["parts"] = {key: part.as_json() for key, part in evaluations.items()}
    result["baselines"] = {key: part.as_json() for key, part in baseline_evaluations.items()}
    write_atomic(out / "eval.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    log.info(f"wrote {out}/eval.json, confusion matrices and reliability")


def _format_csv(rows: list[list[str]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()
