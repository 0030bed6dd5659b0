"""Splits by vessel: no vessel on two sides, classes in the same shares, the same every time."""

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
    """Vessel ids of each side; stored beside a model and enforced when it is evaluated."""

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
        """Return what `save` writes."""
        return {"seed": self.seed, "train": list(self.train), "valid": list(self.valid), "test": list(self.test)}

    def save(self, path: Path) -> None:
        """Write it as JSON.

        Raises:
            Failure: the file cannot be written.
        """
        write_atomic(path, json.dumps(self.as_json(), ensure_ascii=False, indent=1) + "\n")


def load_split(path: Path) -> VesselSplit:
    """Read a split.

    Raises:
        DataError: the file is missing or holds no split, or a vessel is on two sides.
    """
    try:
        found = json_reader.read_json_file(path)
        train, valid, test = (tuple(map(str, found.get(name, []))) for name in ("train", "valid", "test"))
        split = VesselSplit(train, valid, test, int(found["seed"]))
    except (OSError, *BROKEN_DATA_ERRORS) as error:
        raise DataError(f"{path}: no split: {error}", "it is written by `anabatic classify train`") from error
    twice = (
        set(split.train) & set(split.valid) | set(split.train) & set(split.test) | set(split.valid) & set(split.test)
    )
    if twice:
        raise DataError(f"{path}: {len(twice)} vessels on two sides, such as {min(twice)}", "write the split again")
    return split


def make_folds(labels: Mapping[str, int | None], count: int, seed: int = 0) -> list[tuple[str, ...]]:
    """Deal the vessels into `count` folds, every class evenly.

    Args:
        labels: class of each vessel; None: not known, dealt as a class of its own.
        count: number of folds.
        seed: another one deals otherwise.

    Raises:
        DataError: fewer vessels than folds.
    """
    if len(labels) < count or count < 2:
        raise DataError(f"{len(labels)} vessels for {count} folds", "use fewer folds, at least 2, or more vessels")
    by_class: dict[int, list[str]] = defaultdict(list)
    for vessel, label in labels.items():
        by_class[-1 if label is None else label].append(vessel)
    dealt: list[list[str]] = [[] for _ in range(count)]
    place = 0
    for label in sorted(by_class):
        for vessel in sorted(by_class[label], key=lambda one: _hash_vessel(one, seed)):
            dealt[place % count].append(vessel)
            place += 1
    return [tuple(sorted(fold)) for fold in dealt]


def make_split(labels: Mapping[str, int | None], valid: float = 0.15, test: float = 0.0, seed: int = 0) -> VesselSplit:
    """Hold out shares of the vessels of each class; a class of two vessels or more is in `train` and `valid`.

    Classes of one vessel are trained on: where there are no others, nobody is held out.

    Raises:
        DataError: the shares leave nothing to train on.
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
        vessels = sorted(by_class[label], key=lambda one: _hash_vessel(one, seed))
        held = [_count_held_out(len(vessels), valid), _count_held_out(len(vessels), test)]
        held[1] = min(held[1], len(vessels) - held[0] - 1)  # somebody of every class is trained on
        sides["valid"] += vessels[: held[0]]
        sides["test"] += vessels[held[0] : sum(held)]
        sides["train"] += vessels[sum(held) :]
    return VesselSplit(tuple(sorted(sides["train"])), tuple(sorted(sides["valid"])), tuple(sorted(sides["test"])), seed)


def find_majority_labels(rows: Iterable[Any]) -> dict[str, int | None]:
    """Return the class of each vessel: the most frequent of its segments."""
    counted: dict[str, dict[int | None, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        counted[row.vessel][row.label] += 1
    return {vessel: max(seen, key=lambda label: (seen[label], label is not None)) for vessel, seen in counted.items()}


def _count_held_out(vessels: int, share: float) -> int:
    return min(max(1, round(vessels * share)), vessels // 2) if share else 0


def _hash_vessel(vessel: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{vessel}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
