"""What `anabatic checkpoint list` and `verify` tell of the checkpoints of a run. Nothing here needs torch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anabatic.config.loading import yaml_reader
from anabatic.config.sections.common import Evaluate
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import align_columns, format_duration, format_size, parse_whole
from anabatic.core.json_reader import to_finite_number
from anabatic.monitor.run_data import RunFiles
from anabatic.train.checkpoint import manifest
from anabatic.train.checkpoint.run_state import BestTracker

_COLUMNS = ("step", "age", "size", "ranks", "strategy", "command", "best", "state")


def list_checkpoints(path: Path, evaluations: Iterable[dict[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return a row for each checkpoint, oldest first: step, path, age_s, bytes, usable, whole, fault, best, world_size,
    strategy, command. Sizes alone are compared: `usable` where they agree, `whole` where the manifest is sealed, too.

    Args:
        evaluations: rows of the run's evaluations, where somebody has read them already; else `metrics.jsonl` is read.

    Raises:
        DataError: there is none.
    """
    found = manifest.resolve_checkpoints(path)
    best = find_best_step(found[0].parent, evaluations)
    return [_describe_checkpoint(one, best) for one in found]


def _describe_checkpoint(path: Path, best: int | None) -> dict[str, Any]:
    problem = manifest.find_first_fault(path, checksums=False)
    known: dict[str, Any] = {}
    if not problem or not problem.startswith(manifest.MANIFEST_FILE):
        known = manifest.read_manifest(path)
    fault = problem or ("" if manifest.is_sealed(known) else manifest.NOT_SEALED)
    named = parse_whole(path.name.rpartition("-")[2])
    step = known.get("step") if named is None else named
    saved = known.get("saved") or path.stat().st_mtime
    return {
        "step": step,
        "path": str(path),
        "age_s": round(max(0.0, time.time() - saved), 1),
        "bytes": sum(file.stat().st_size for file in path.glob("*") if file.is_file()),
        "usable": not problem,
        "whole": not fault,
        "fault": fault,
        "best": step is not None and step == best,
        **{key: known.get(key) for key in ("world_size", "strategy", "command")},
    }


def find_best_step(run: Path, evaluations: Iterable[dict[str, Any]] | None = None) -> int | None:
    """Return the step of the best evaluation of a run so far, by its `eval.metric`; None without one."""
    files = RunFiles(run)
    try:
        tree = yaml_reader.read_yaml(files.config).tree
    except ConfigError:  # a checkpoint that was copied out of its run
        return None
    judge = Evaluate()
    settings = tree.get("eval")
    judge.metric = settings.get("metric", judge.metric) if isinstance(settings, dict) else judge.metric
    best = BestTracker()
    for row in files.iter_metrics("eval") if evaluations is None else evaluations:
        values = (row.get("step"), row.get("valid_loss"), row.get(f"valid_{judge.metric}"))
        if row.get("kind") == "eval" and None not in map(to_finite_number, values):
            best.record_evaluation(row["step"], row, judge)
    found: int | None = best.best.get("step")
    return found


def format_table(found: list[dict[str, Any]]) -> str:
    """Return rows as text in columns, one line each."""
    lines = align_columns([_COLUMNS, *(_format_cells(row) for row in found)], range(4))
    return "\n".join(lines) + "\n"


def _format_cells(row: dict[str, Any]) -> tuple[str, ...]:
    unknown = {key: "-" if row[key] is None else str(row[key]) for key in ("step", "world_size", "strategy", "command")}
    return (
        unknown["step"],
        _format_age(row["age_s"]),
        format_size(row["bytes"]),
        unknown["world_size"],
        unknown["strategy"],
        unknown["command"],
        "best" if row["best"] else "",
        row["fault"] or "whole",
    )


def _format_age(seconds: float) -> str:
    return f"{seconds / 86400:.0f}d" if seconds >= 2 * 86400 else format_duration(seconds)


@dataclass
class VerificationResult:
    """A checkpoint whose files were read.

    Attributes:
        files: of the manifest.
        faults: what is wrong, each with the name of the file.
        sealed: the manifest has a checksum of its own, which it matches.
    """

    path: str
    files: int = 0
    bytes: int = 0
    faults: list[str] = field(default_factory=list)
    sealed: bool = False

    @property
    def is_complete(self) -> bool:
        """Everything is as it was written, and that is known."""
        return self.sealed and not self.faults

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {**asdict(self), "whole": self.is_complete}

    def format_text(self) -> str:
        """Return one line, or one per fault."""
        if not self.faults:
            state = "whole" if self.is_complete else f"{manifest.NOT_SEALED}; what it says matches"
            return f"{self.path}: {state}, {self.files} files, {format_size(self.bytes)}\n"
        return "".join(f"{self.path}: {fault}\n" for fault in self.faults)


def verify_checkpoints(path: Path, advance: manifest.ByteCallback) -> list[VerificationResult]:
    """Read every file of the checkpoints and compare it with its size and checksum.

    Args:
        advance: told the bytes that were read.

    Raises:
        DataError: there is none.
    """
    found = []
    for one in manifest.resolve_checkpoints(path):
        faults = list(manifest.find_faults(one, advance=advance))
        is_read = not any(fault.startswith(manifest.MANIFEST_FILE) for fault in faults)
        known = manifest.read_manifest(one) if is_read else {}
        files = known.get("files", {})
        size = sum(entry["bytes"] for entry in files.values())
        found.append(VerificationResult(str(one), len(files), size, faults, manifest.is_sealed(known)))
    return found
