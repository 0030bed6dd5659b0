"""Splits by vessel: deterministic and stratified by class; no vessel is on two sides."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import BROKEN_DATA_ERRORS, DataError
from anabatic.core.paths import write_atomic


@dataclass(frozen=True)
class VesselSplit:
    """Vessel ids of each side; stored with a model and enforced when it is evaluated."""

    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...] = ()
    seed: int = 0

    def find_side(self, vessel: str) -> str:
        """Return `train`, `valid` or `test`; empty: the vessel is new."""
        for name in ("train", "valid", "test"):
            if vessel in self._side_sets()[name]:
                return name
        return ""

    def _side_sets(self) -> dict[str, frozenset[str]]:
        if "_cached" not in self.__dict__:
            sides = {name: frozenset(getattr(self, name)) for name in ("train", "valid", "test")}
            object.__setattr__(self, "_cached", sides)
        cached: dict[str, frozenset[str]] = self.__dict__["_cached"]
        return cached

    def as_json(self) -> dict[str, Any]:
        """Return the content that `save` writes."""
        return {"seed": self.seed, "train": list(self.train), "valid": list(self.valid), "test": list(self.test)}

    def save(self, path: Path) -> None:
        """Write the split as JSON.

        Raises:
            Failure: the file cannot be written.
        """
        write_atomic(path, json.dumps(self.as_json(), ensure_ascii=False, indent=1) + "\n")


def load_split(path: Path) -> VesselSplit:
    """Read a split.

    Raises:
        DataError: the file is missing or is not a split, or a vessel is on two sides.
    """
    try:
        tree = json_reader.read_json_file(path)
        train, valid, test = (tuple(map(str, tree.get(name, []))) for name in ("train", "valid", "test"))
        split = VesselSplit(train, valid, test, int(tree["seed"]))
    except (OSError, *BROKEN_DATA_ERRORS) as error:
        raise DataError(f"{path}: no split: {error}", "it is written by `anabatic classify train`") from error
    duplicates = (
        set(split.train) & set(split.valid) | set(split.train) & set(split.test) | set(split.valid) & set(split.test)
    )
    if duplicates:
        raise DataError(
            f"{path}: {len(duplicates)} vessels on two sides, such as {min(duplicates)}", "write the split again"
        )
    return split


def make_folds(labels: Mapping[str, int | None], num_folds: int, seed: int = 0) -> list[tuple[str, ...]]:
    """Distribute the vessels over `num_folds` folds, stratified by class.

    Args:
        labels: class of each vessel; None: unknown, treated as a separate class.
        num_folds: number of folds.
        seed: seed of the assignment.

    Raises:
        DataError: fewer vessels than folds.
    """
    if len(labels) < num_folds or num_folds < 2:
        raise DataError(f"{len(labels)} vessels for {num_folds} folds", "use fewer folds, at least 2, or more vessels")
    by_class: dict[int, list[str]] = defaultdict(list)
    for vessel, label in labels.items():
        by_class[-1 if label is None else label].append(vessel)
    folds: list[list[str]] = [[] for _ in range(num_folds)]
    position = 0
    for label in sorted(by_class):
        for vessel in sorted(by_class[label], key=lambda vessel_id: _hash_vessel(vessel_id, seed)):
            folds[position % num_folds].append(vessel)
            position += 1
    return [tuple(sorted(fold)) for fold in folds]


def make_split(labels: Mapping[str, int | None], valid: float = 0.15, test: float = 0.0, seed: int = 0) -> VesselSplit:
    """Hold out fractions of the vessels of each class; a class of two vessels or more is in `train` and `valid`.

    Classes of one vessel are in `train`: if all classes are such, no vessel is held out.

    Raises:
        DataError: the fractions leave nothing to train on.
    """
    if not 0 <= valid + test < 1:
        raise DataError(
            f"valid {valid} and test {test} leave nothing to train on", "use shares that sum to less than 1"
        )
    by_class: dict[int, list[str]] = defaultdict(list)
    for vessel, label in labels.items():
        by_class[-1 if label is None else label].append(vessel)
    sides: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for label in sorted(by_class):
        vessels = sorted(by_class[label], key=lambda vessel_id: _hash_vessel(vessel_id, seed))
        num_held_out = [_count_held_out(len(vessels), valid), _count_held_out(len(vessels), test)]
        num_held_out[1] = min(
            num_held_out[1], len(vessels) - num_held_out[0] - 1
        )  # every class keeps a training vessel
        sides["valid"] += vessels[: num_held_out[0]]
        sides["test"] += vessels[num_held_out[0] : sum(num_held_out)]
        sides["train"] += vessels[sum(num_held_out) :]
    return VesselSplit(tuple(sorted(sides["train"])), tuple(sorted(sides["valid"])), tuple(sorted(sides["test"])), seed)


def find_majority_labels(rows: Iterable[Any]) -> dict[str, int | None]:
    """Return the class of each vessel: the most frequent label of its segments."""
    counts: dict[str, dict[int | None, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        counts[row.vessel][row.label] += 1
    return {
        vessel: max(label_counts, key=lambda label: (label_counts[label], label is not None))
        for vessel, label_counts in counts.items()
    }


def _count_held_out(num_vessels: int, fraction: float) -> int:
    return min(max(1, round(num_vessels * fraction)), num_vessels // 2) if fraction else 0


def _hash_vessel(vessel: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{vessel}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
