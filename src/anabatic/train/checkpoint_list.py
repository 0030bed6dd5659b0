"""What `anabatic checkpoint list` and `verify` tell of the checkpoints of a run. Nothing here needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config import yaml_file
from anabatic.config.shared import Evaluate
from anabatic.core import jsonl
from anabatic.core.errors import ConfigError
from anabatic.core.jsonl import number
from anabatic.core.paths import RunFolder
from anabatic.core.text import duration, size
from anabatic.train import manifest
from anabatic.train.best import Best

_COLUMNS = ("step", "age", "size", "ranks", "strategy", "command", "best", "state")


def rows(path: Path, evaluations: Iterable[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return a row for each checkpoint, oldest first: step, path, age_s, bytes, whole, fault, best, world_size,
    strategy, command. `whole` compares sizes alone.

    Args:
        evaluations: rows of the run's evaluations, where somebody has read them already; else `metrics.jsonl` is read.

    Raises:
        DataError: there is none.
    """
    found = manifest.named(path)
    best = best_step(found[0].parent, evaluations)
    return [_row(one, best) for one in found]


def _row(path: Path, best: int | None) -> dict[str, Any]:
    problem = manifest.fault(path, checksums=False)
    known: dict[str, Any] = {}
    if not problem or not problem.startswith(manifest.MANIFEST):
        known = manifest.read(path)
    step = int(path.name.rpartition("-")[2]) if path.name.rpartition("-")[2].isdigit() else known.get("step")
    saved = known.get("saved") or path.stat().st_mtime
    return {
        "step": step,
        "path": str(path),
        "age_s": round(max(0.0, time.time() - saved), 1),
        "bytes": sum(file.stat().st_size for file in path.glob("*") if file.is_file()),
        "whole": not problem,
        "fault": problem,
        "best": step is not None and step == best,
        **{key: known.get(key) for key in ("world_size", "strategy", "command")},
    }


def best_step(run: Path, evaluations: Iterable[dict[str, Any]] | None = None) -> int | None:
    """Return the step of the best evaluation of a run so far, by its `eval.metric`; None without one."""
    folder = RunFolder(run)
    try:
        tree = yaml_file.read(folder.config).tree
    except ConfigError:  # a checkpoint that was copied out of its run
        return None
    judge = Evaluate()
    settings = tree.get("eval")
    judge.metric = settings.get("metric", judge.metric) if isinstance(settings, dict) else judge.metric
    best = Best()
    for row in jsonl.read(folder.metrics) if evaluations is None else evaluations:
        values = (row.get("step"), row.get("valid_loss"), row.get(f"valid_{judge.metric}"))
        if row.get("kind") == "eval" and None not in map(number, values):
            best.judge(row["step"], row, judge)
    found: int | None = best.best.get("step")
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Return rows as text in columns, one line each."""
    lines = [_COLUMNS, *(_cells(row) for row in found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_COLUMNS))]
    right = {"step", "age", "size", "ranks"}
    text = ""
    for line in lines:
        cells = (
            cell.rjust(width) if name in right else cell.ljust(width)
            for cell, width, name in zip(line, widths, _COLUMNS, strict=True)
        )
        text += "  ".join(cells).rstrip() + "\n"
    return text


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    unknown = {key: "-" if row[key] is None else str(row[key]) for key in ("step", "world_size", "strategy", "command")}
    return (
        unknown["step"], _age(row["age_s"]), size(row["bytes"]), unknown["world_size"], unknown["strategy"],
        unknown["command"], "best" if row["best"] else "", row["fault"] or "whole",
    )  # fmt: skip


def _age(seconds: float) -> str:
    return f"{seconds / 86400:.0f}d" if seconds >= 2 * 86400 else duration(seconds)


@dataclass
class Verified:
    """A checkpoint whose files were read.

    Attributes:
        files: of the manifest.
        faults: what is wrong, each with the name of the file.
    """

    path: str
    files: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "whole": not self.faults}

    def text(self) -> str:
        """A line, or one for each fault."""
        if not self.faults:
            return f"{self.path}: whole, {self.files} files, {size(self.bytes)}\n"
        return "".join(f"{self.path}: {fault}\n" for fault in self.faults)


def verified(path: Path, advance: manifest.Advance) -> list[Verified]:
    """Read every file of the checkpoints and compare it with its size and checksum.

    Args:
        advance: told the bytes that were read.

    Raises:
        DataError: there is none.
    """
    found = []
    for one in manifest.named(path):
        faults = list(manifest.faults(one, advance=advance))
        known = {} if any(fault.startswith(manifest.MANIFEST) for fault in faults) else manifest.read(one)["files"]
        found.append(Verified(str(one), len(known), sum(entry["bytes"] for entry in known.values()), faults))
    return found
