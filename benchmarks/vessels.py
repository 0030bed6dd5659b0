"""How good is the vessel classifier on vessels, or in regions, that it was never trained on?

    python benchmarks/vessels.py --data ais_train.csv.gz --out runs/vessels [--folds 5] [--only 0,1] [--seed 0]
        [--region california=30,42,-126,-114 ...] [--trees-only] [-- --tracks.format motion --schedule.epochs 3 ...]

Cross-validation: the vessels are dealt into folds, every class evenly (`trajectory.split_file.make_folds`); for each
fold a classifier is trained on the others with the options behind `--`, and its `final_model` (no early stopping: the
fold chooses nothing) predicts the fold. With `--region` the vessels of each box are held out instead. Beside it stand
trees alone on the same numbers and folds. All predictions go to `OUT/model.jsonl` and `OUT/trees.jsonl`, and
`anabatic classify eval --predictions` prints the score.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic_vessels.commands import predict_classes
from anabatic_vessels.config.evaluation import parse_bounds
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.io import split_file
from anabatic_vessels.metrics import classification
from anabatic_vessels.model import forest
from anabatic_vessels.model.forest import Forest
from anabatic_vessels.model.trajectory_classifier import TrajectoryClassifier
from anabatic_vessels.words import kinematic_features
from anabatic_vessels.words.segment_reader import read_segments
from anabatic_vessels.words.segments import Segment, SegmentSet
from option_types import positive_int

CLI = (sys.executable, "-m", "anabatic")
MOVING = ("motion", "transponder", "heading")


def main() -> None:
    """Train, predict and score every part that is asked for."""
    job = arguments()
    job.out.mkdir(parents=True, exist_ok=True)
    segments = read_segments([job.data], TrackSettings(format=job.words, points=job.points))
    parts = dict(regions(segments, job.region) if job.region else folds(segments, job.folds, job.seed))
    if unknown := set(job.only) - set(parts):
        raise SystemExit(f"--only has {min(unknown)!r}, which is none of {', '.join(parts)}")
    for name, held_out in parts.items():
        if job.only and name not in job.only:
            continue
        began = time.monotonic()
        grown = None if job.trees_only else model(job, segments, held_out, name)
        if job.groups:
            trees(job, segments, held_out, job.out / f"trees-{name}.jsonl", grown)
        print(f"{name}: {len(held_out)} vessels held out, {time.monotonic() - began:.0f} s", flush=True)
    for kind in ("trees",) if job.trees_only else ("trees", "model"):
        files = [job.out / f"{kind}-{name}.jsonl" for name in parts]
        done = [path for path in files if path.exists()]
        for group in [[path] for path in done] if job.region else [done] if done else []:
            told = [str(path) for path in group]
            print(f"\n{kind} ({', '.join(path.stem for path in group)})", flush=True)
            anabatic("classify", "eval", "--predictions", *told, "--out", str(job.out / f"eval-{group[0].stem}"))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    border = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folds", type=positive_int, default=5)
    parser.add_argument("--only", default="", help="names of regions or folds, with commas between them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--region", action="append", default=[])
    parser.add_argument("--words", default="motion")
    parser.add_argument("--points", type=positive_int, nargs="+", default=[30])
    parser.add_argument("--groups", default=",".join(MOVING), help="of numbers; empty: words alone")
    parser.add_argument("--trees-only", action="store_true")
    job = parser.parse_args(sys.argv[1:border])
    job.only, job.groups = ([one for one in text.split(",") if one] for text in (job.only, job.groups))
    job.options = sys.argv[border + 1 :]
    return job


def folds(segments: SegmentSet, count: int, seed: int) -> list[tuple[str, set[str]]]:
    """Return each fold's name and vessels."""
    dealt = split_file.make_folds(split_file.find_majority_labels(segments), count, seed)
    return [(str(at), set(fold)) for at, fold in enumerate(dealt)]


def regions(segments: SegmentSet, boxes: list[str]) -> list[tuple[str, set[str]]]:
    """Return each region's name and the vessels that have a segment in it."""
    places = np.array([row.place for row in segments.rows])
    found = []
    for one in boxes:
        name, _, box = one.partition("=")
        rows = np.flatnonzero(classification.is_inside_box(places, parse_bounds(name, box)))
        found.append((name, {segments.rows[at].vessel for at in rows.tolist()}))
    return found


def trees(job: argparse.Namespace, segments: SegmentSet, held_out: set[str], path: Path, grown: Forest | None) -> None:
    """Write what trees alone say of the vessels inside `held_out`: the model's own, or fitted alike."""
    columns = [
        at
        for at, name in enumerate(kinematic_features.FEATURE_NAMES)
        if kinematic_features.FEATURE_GROUPS[name] in job.groups
    ]
    if grown is None:
        train = [row for row in segments.rows if row.vessel not in held_out]
        weights = forest.weigh_groups_equally([row.vessel for row in train])
        labels = np.array([row.label for row in train])
        grown = forest.fit_forest(numbers(train, columns), labels, weights, len(segments.classes), 250, job.seed)
    test = [row for row in segments.rows if row.vessel in held_out]
    write(path, test, grown.predict_probabilities(numbers(test, columns)), segments.classes)


def numbers(rows: list[Segment], columns: list[int]) -> np.ndarray:
    """Return these columns of the rows' numbers."""
    return np.array([row.features for row in rows], dtype=np.float32)[:, columns]


def write(path: Path, rows: list[Segment], probabilities: np.ndarray, classes: tuple[str, ...]) -> None:
    """Write predictions as `anabatic classify predict` does."""
    with open(path, "w", encoding="utf-8") as file:
        for at, (row, told) in enumerate(zip(rows, probabilities.tolist(), strict=True)):
            best = int(np.argmax(told))
            line = {"id": at, "true_label": row.label, "predicted_class": best, "class_name": classes[best]}
            line |= {"confidence": told[best], "probabilities": told, "vessel": row.vessel, "place": row.place}
            file.write(json.dumps(line) + "\n")


def model(job: argparse.Namespace, segments: SegmentSet, held_out: set[str], name: str) -> Forest | None:
    """Train on the vessels outside `held_out`, predict those inside, and return the trees beside the network."""
    run = job.out / f"run-{name}"
    sides = {row.vessel for row in segments.rows} - held_out
    split_file.VesselSplit(tuple(sorted(sides)), tuple(sorted(held_out)), (), job.seed).save(
        job.out / f"split-{name}.json"
    )
    reading = ("--tracks.format", job.words, "--tracks.points", *map(str, job.points))
    groups = ("--head.features", *job.groups) if job.groups else ()
    anabatic(
        "classify",
        "train",
        "--data",
        job.data,
        *reading,
        *groups,
        "--out",
        str(run),
        "--seed",
        str(job.seed),
        "--data.split",
        str(job.out / f"split-{name}.json"),
        "--eval.every",
        "1000000",
        *job.options,
    )
    classifier = TrajectoryClassifier(run / "final_model", DeviceConfig(threads=1))
    test = [row for row in segments.rows if row.vessel in held_out]
    write(
        job.out / f"model-{name}.jsonl", test, predict_classes.predict_probabilities(classifier, test), segments.classes
    )
    return forest.load_forest(classifier.folder) if classifier.description.trees_share else None


def anabatic(*words: str) -> None:
    """Run one command; a failure ends the benchmark."""
    subprocess.run([*CLI, *words], check=True, env=os.environ)


if __name__ == "__main__":
    main()
