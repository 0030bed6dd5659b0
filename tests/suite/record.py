"""Seconds of each test file, and of every test that takes more than two, kept in one file of the repository.

`python scripts/run_tests.py record` writes it from a whole run; ordinary runs leave an artifact in build/ only.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core.paths import write_atomic
from suite.groups import ROOT, TESTS, SuiteError

RECORD = TESTS / "seconds.json"
TABLE = ROOT / "docs" / "dev" / "test-seconds.md"
ARTIFACTS = ROOT / "build" / "tests"
WHOLE = ARTIFACTS / "whole"
"""Exists where the last run in this folder came to its end, was no shard, and had no failure."""
ARTIFACT = "ANABATIC_TEST_ARTIFACT"
"""Variable with the beginning of the names of the files that get the seconds of each test; unset: none are written."""
NOT_RUN = "not run"
"""Outcome of a test for which there was no time."""
LONG = 2.0
"""Seconds of a test without its fixtures; what takes more in a group without processes belongs to `process`."""


@dataclass
class Measured:
    """One test of a run.

    Attributes:
        seconds: wall seconds with the fixtures that it is first to use.
        call: wall seconds without fixtures.
        cpu: CPU seconds, with those of its processes.
        outcome: passed, failed, skipped or `NOT_RUN`.
    """

    test: str
    group: str
    seconds: float
    call: float
    cpu: float
    outcome: str

    @property
    def file(self) -> str:
        """The file it is in, relative to the project."""
        return self.test.split("::")[0]


@dataclass
class Record:
    """What the repository keeps of the last whole run: seconds by file as [wall, CPU], and by long test."""

    machine: str = ""
    files: dict[str, tuple[float, float]] = field(default_factory=dict)
    tests: dict[str, tuple[float, float]] = field(default_factory=dict)

    def seconds_of(self, file: str, unknown: float = 5.0) -> float:
        """Return the wall seconds of a file; of a new one, a guess."""
        return self.files.get(file, (unknown, unknown))[0]


def read_record(path: Path = RECORD) -> Record:
    """Return the record; an empty one where there is none yet.

    Raises:
        SuiteError: it is torn, as by a merge.
    """
    if not path.exists():
        return Record()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = {name: (float(wall), float(cpu)) for name, (wall, cpu) in content["files"].items()}
        tests = {name: (float(wall), float(cpu)) for name, (wall, cpu) in content["tests"].items()}
        return Record(content["machine"], files, tests)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = f"it is written by `make test-record`; as it was: git checkout main -- {RECORD.relative_to(ROOT)}"
        raise SuiteError(f"{path}: {type(error).__name__}: {error}", hint) from error


def read_artifacts(folder: Path = ARTIFACTS) -> list[Measured]:
    """Return what the last run has measured, each test once: of the fuzz tests, the run with all cases.

    A line that a killed run left half written is reported and left out.
    """
    found: dict[str, Measured] = {}
    for path in sorted(folder.glob("*.jsonl")):  # quick-* comes before rest-*
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                one = Measured(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                print(f"{path}: a broken line is left out: {line[:80]}")
                continue
            found[one.test] = one
    return list(found.values())


def build_record(measured: Iterable[Measured], machine: str) -> Record:
    """Add up the tests of a whole run."""
    files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    tests: dict[str, tuple[float, float]] = {}
    for one in measured:
        files[one.file][0] += one.seconds
        files[one.file][1] += one.cpu
        if one.call > LONG:
            tests[one.test] = (round(one.call, 1), round(one.cpu, 1))
    rounded = {name: (round(wall, 1), round(cpu, 1)) for name, (wall, cpu) in sorted(files.items())}
    return Record(machine, rounded, dict(sorted(tests.items())))


def write_record(record: Record) -> None:
    """Write the file of the repository, one line a file and a test, and the table of the developer notes."""
    parts: dict[str, Any] = {"machine": record.machine, "files": record.files, "tests": record.tests}
    lines = ["{", f'"machine": {json.dumps(parts["machine"])},']
    for name in ("files", "tests"):
        rows = [f"{json.dumps(key)}: {json.dumps(list(value))}" for key, value in parts[name].items()]
        lines += [f'"{name}": {{', ",\n".join(rows), "}" + ("," if name == "files" else "")]
    write_atomic(RECORD, "\n".join([*lines, "}"]) + "\n")
    write_atomic(TABLE, render_table(record))


def render_table(record: Record) -> str:
    """Return the page of the developer notes: seconds by group, the longest files and tests."""
    from suite.groups import find_group, read_groups

    groups: dict[str, list[float]] = {group.name: [0.0, 0.0, 0.0] for group in read_groups() if group.folder}
    for file, (wall, cpu) in record.files.items():
        group = find_group(file)
        assert group is not None, file
        row = groups[group.name]
        row[0], row[1], row[2] = row[0] + 1, row[1] + wall, row[2] + cpu
    lines = [
        "# Seconds of the tests",
        "",
        f"Written by `python scripts/run_tests.py record`, from a whole run on {record.machine}; the figures of every",
        "file are in `tests/seconds.json`. Wall seconds include waiting; tests of one file run in turn, files",
        "beside each other. A test that is first to use something shared (a model, a build) pays for it.",
        "",
        "| folder of the group | files | wall s | CPU s |",
        "|---|--:|--:|--:|",
        *(f"| {name} | {count:.0f} | {wall:,.0f} | {cpu:,.0f} |" for name, (count, wall, cpu) in groups.items()),
        f"| all | {len(record.files)} | {sum(w for w, _ in record.files.values()):,.0f} "
        f"| {sum(c for _, c in record.files.values()):,.0f} |",
    ]
    for title, rows, number in (("file", record.files, 40), ("test", record.tests, 40)):
        longest = sorted(rows.items(), key=lambda row: -row[1][0])[:number]
        lines += ["", f"| the {len(longest)} longest, by {title} | wall s | CPU s |", "|---|--:|--:|"]
        lines += [f"| `{_in_cell(name)}` | {wall:,.0f} | {cpu:,.0f} |" for name, (wall, cpu) in longest]
    return "\n".join(lines) + "\n"


def _in_cell(name: str) -> str:
    return name.replace("|", "\\|")
