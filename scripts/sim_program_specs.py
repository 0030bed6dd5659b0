"""Files of scripts/programs: what sim_programs.py installs and runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent / "programs"


@dataclass(frozen=True)
class Run:
    """One command of a program."""

    program: str
    name: str
    command: str
    """For one device; `{model}`, `{data}`, `{work}` and `{source}` are folders, `{here}` is scripts/programs."""
    command_two: str | None
    """For two devices."""
    cpu: tuple[str, str]
    """Words that follow `command` and `command_two` on the CPU."""
    losses: str | None
    """A regular expression whose first group is a loss, once per step."""
    tolerance: float
    expected: Mapping[int, Mapping[str, str]]
    """Devices -> the known cause of a failure, by language, with `match`: what stands in its output."""
    on_cpu: bool
    """False: the program refuses to run without an accelerator."""
    like: str | None
    """Another run, PROGRAM/RUN or PROGRAM/RUN@DEVICES, whose losses on the CPU this one must have: the same training,
    split otherwise."""
    environment: Mapping[str, str]
    cpu_environment: Mapping[str, str]
    seconds: int

    @property
    def key(self) -> str:
        """Name on the command line and in results.json."""
        return f"{self.program}/{self.name}"

    def commands(self) -> dict[int, str]:
        """Return the command by number of devices."""
        pairs = ((1, self.command), (2, self.command_two))
        return {devices: text for devices, text in pairs if text}


@dataclass(frozen=True)
class Source:
    """A repository at one commit."""

    repository: str
    commit: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """One file of scripts/programs."""

    name: str
    title: str
    version: str
    requirements: tuple[str, ...]
    bare: tuple[str, ...]
    """Requirements that are installed without their dependencies."""
    removed: tuple[str, ...]
    """Files below site-packages that are removed: PyPI's wheel has them for CUDA, and the program can do without."""
    runs: tuple[Run, ...]
    sources: tuple[Source, ...] = ()
    """Checkouts: `{source}`, `{source_2}`."""
    inputs: bool = True
    """True: the run needs the tiny models and rows of inputs.py, made with this environment's transformers."""


_PROGRAM_KEYS = {"title", "version", "requirements", "bare", "removed", "runs", "source", "inputs", "defaults"}
_RUN_KEYS = {
    "name",
    "one",
    "two",
    "cpu",
    "cpu_two",
    "losses",
    "tolerance",
    "expected",
    "on_cpu",
    "like",
    "environment",
    "cpu_environment",
    "seconds",
}


def read_program(path: Path) -> Program:
    """Return a program from its file.

    Raises:
        ValueError: a key is unknown or missing, a version is not pinned, or a pattern has no group.
    """
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    _require(set(table) <= _PROGRAM_KEYS, path, f"unknown keys {sorted(set(table) - _PROGRAM_KEYS)}")
    _require({"title", "version", "requirements", "runs"} <= set(table), path, "title, version, requirements, runs")
    for requirement in (*table["requirements"], *table.get("bare", ())):
        _require("==" in requirement, path, f"{requirement} is not pinned with ==")
    sources = table.get("source") or []
    sources = sources if isinstance(sources, list) else [sources]
    for source in sources:
        _require(set(source) == {"repository", "commit", "paths"}, path, "source: repository, commit, paths")
        _require(re.fullmatch(r"[0-9a-f]{40}", str(source["commit"])), path, "source.commit: 40 hex digits")
    defaults = table.get("defaults") or {}
    runs = tuple(_read_run(path, {**defaults, **row}) for row in table["runs"])
    _require(len({run.name for run in runs}) == len(runs), path, "two runs have the same name")
    return Program(
        name=path.stem,
        title=table["title"],
        version=str(table["version"]),
        requirements=tuple(table["requirements"]),
        bare=tuple(table.get("bare", ())),
        removed=tuple(table.get("removed", ())),
        runs=runs,
        sources=tuple(Source(row["repository"], row["commit"], tuple(row["paths"])) for row in sources),
        inputs=table.get("inputs", True),
    )


def _read_run(path: Path, row: Mapping[str, Any]) -> Run:
    _require(set(row) <= _RUN_KEYS, path, f"unknown keys of a run: {sorted(set(row) - _RUN_KEYS)}")
    _require("name" in row and ("one" in row or "two" in row), path, "a run has a name, and `one` or `two`")
    losses = row.get("losses")
    _require(losses is None or re.compile(losses).groups == 1, path, f"{row['name']}: losses needs one group")
    expected = row.get("expected") or {}
    for devices, cause in expected.items():
        _require(devices in (1, 2) and set(cause) == {"match", "en", "zh"}, path, "expected: {1|2: {match, en, zh}}")
    return Run(
        program=path.stem,
        name=str(row["name"]),
        command=row.get("one", ""),
        command_two=row.get("two"),
        cpu=(row.get("cpu", ""), row.get("cpu_two", row.get("cpu", ""))),
        losses=losses,
        tolerance=float(row.get("tolerance", 1e-4)),
        expected=expected,
        on_cpu=row.get("on_cpu", "like" not in row),
        like=row.get("like"),
        environment=row.get("environment") or {},
        cpu_environment=row.get("cpu_environment") or {},
        seconds=int(row.get("seconds", 900)),
    )


def _require(condition: object, path: Path, what: str) -> None:
    if not condition:
        raise ValueError(f"{path.name}: {what}")


def read_programs(folder: Path = FOLDER) -> list[Program]:
    """Return all programs, in the order of their files' names."""
    return [read_program(path) for path in sorted(folder.glob("*.yaml"))]
