"""Programs of other projects on simulated NPUs: scripts/sim_programs.py, its files, and the table that it writes."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = "ANABATIC_TEST_PROGRAMS"
SPEC = """
title: Some program
version: 1.0
requirements: [torch==2.13.0, thing==1.0]
defaults: {losses: "loss ([0-9.]+)", tolerance: 0.5}
runs:
  - name: first
    one: thing train --model {model} --out {work}/out
    two: torchrun --standalone --nproc_per_node 2 -m thing.train --model {model}
    cpu: --cpu
    expected:
      1: {match: no kernel, en: it has no kernel, zh: 没有算子}
"""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    return importlib.import_module("sim_programs")


def read_program(path: Path) -> Any:
    """Return what the file says; the fixture `programs` has made the module importable."""
    return importlib.import_module("sim_program_specs").read_program(path)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "thing.yaml"
    path.write_text(SPEC, encoding="utf-8")
    return path


def test_every_file_is_read_and_has_a_row(programs: ModuleType) -> None:
    found = programs.read_programs()
    assert {"transformers", "accelerate", "peft", "trl", "torch"} <= {program.name for program in found}
    keys = programs.expected_keys(found)
    assert len(keys) == len(set(keys))
    assert set(programs.read_results()) <= set(keys)
    assert [row.run for row in programs.list_rows(found, {})] == [key.rpartition("@")[0] for key in keys]


def test_pages_show_the_results(programs: ModuleType) -> None:
    results = programs.read_results()
    rows = programs.list_rows(programs.read_programs(), results)
    for language, folder in enumerate(("en", "zh")):
        page = (ROOT / programs.PAGE.format(language=folder)).read_text(encoding="utf-8")
        shown = page.partition(programs.BEGIN)[2].partition(programs.END)[0].strip()
        assert shown == programs.render_table(rows, language), "python scripts/sim_programs.py --docs --only none"


def test_known_causes_are_those_of_the_files(programs: ModuleType) -> None:
    runs = {run.key: run for program in programs.read_programs() for run in program.runs}
    unexpected = [
        f"{key}: {row.result} {row.cause.get('en', '')}"
        for key, row in programs.read_results().items()
        if not programs.is_expected(runs[row.run], row)
    ]
    assert not unexpected


def test_reads_a_file(programs: ModuleType, spec: Path) -> None:
    program = read_program(spec)
    (run,) = program.runs
    assert (run.key, run.tolerance, run.cpu, sorted(run.commands())) == ("thing/first", 0.5, ("--cpu", "--cpu"), [1, 2])
    assert programs.shown_command(run.command) == "thing train"
    assert programs.shown_command(run.command_two) == "torchrun --standalone --nproc_per_node 2 -m thing.train"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("thing==1.0", "thing>=1.0", "thing>=1.0 is not pinned"),
        ("title", "titel", "unknown keys"),
        ("cpu: --cpu", "gpu: --cpu", "unknown keys of a run"),
        ("loss ([0-9.]+)", "loss [0-9.]+", "losses needs one group"),
        ("match: no kernel, ", "", "expected: "),
    ],
)
def test_mistakes_in_a_file_are_named(programs: ModuleType, spec: Path, old: str, new: str, message: str) -> None:
    spec.write_text(SPEC.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=f"thing.yaml: .*{message}"):
        read_program(spec)


def side(programs: ModuleType, code: int, output: str) -> object:
    losses = programs.find_losses("loss ([0-9.]+)", output)
    return programs.Side(code, 1.0, losses, programs.find_error(output) if code else "", output)


@pytest.mark.parametrize(
    ("npu", "cpu", "result", "cause"),
    [
        ((0, "loss 1.0\nloss 2.0"), (0, "loss 1.0\nloss 2.0"), "equal", ""),
        ((0, "loss 1.0\nloss 2.0"), (0, "loss 1.0\nloss 2.25"), "close", ""),
        ((0, "loss 1.0\nloss 2.0"), (0, "loss 1.0\nloss 3.0"), "differs", ""),
        ((0, "loss 1.0"), (0, "loss 1.0\nloss 2.0"), "differs", "1 losses, on the CPU 2"),
        ((0, ""), (0, ""), "differs", "0 losses, on the CPU 0"),
        ((1, "ValueError: no kernel for this"), (0, "loss 1.0"), "fails", "it has no kernel"),
        ((1, "[rank0]: KeyError: 'x'\nChildFailedError: y"), (1, "no"), "fails everywhere", "KeyError: 'x'"),
    ],
)
def test_judges_both_sides(
    programs: ModuleType, spec: Path, npu: tuple[int, str], cpu: tuple[int, str], result: str, cause: str
) -> None:
    program = read_program(spec)
    outcome = programs.judge(program, program.runs[0], 1, side(programs, *npu), side(programs, *cpu))
    assert (outcome.result, outcome.cause.get("en", "")) == (result, cause)


def test_table_in_both_languages(programs: ModuleType, spec: Path) -> None:
    program = read_program(spec)
    run = program.runs[0]
    good = side(programs, 0, "loss 1.0"), side(programs, 0, "loss 1.25")
    bad = side(programs, 1, "NotImplementedError: a <b> | c"), None
    rows = [programs.judge(program, run, 2, *good), programs.judge(program, run, 1, *bad)]
    english, chinese = (programs.render_table(rows, language).splitlines() for language in (0, 1))
    words = "`torchrun --standalone --nproc_per_node 2 -m thing.train`"
    assert english[2] == f"| Some program, first | 1.0 | {words} | 2 | 1 | 2.5e-01 | losses within tolerance |"
    assert english[3].endswith("| 1 | - | - | fails: NotImplementedError: a &lt;b> \\| c |")
    assert chinese[2].endswith("| loss 在容差内 |") and len(english) == len(chinese) == 4


def test_programs_run_as_the_table_says(programs: ModuleType) -> None:
    if not os.environ.get(RUN):
        pytest.skip(f"hours, and several GB of environments: set {RUN}=1, or to names of programs")
    chosen = os.environ[RUN]
    names = [] if chosen == "1" else chosen.split(",")
    bad = []
    for program in programs.read_programs():
        for run in program.runs if not names or program.name in names else ():
            for devices in run.commands():
                outcome = programs.run_devices(program, run, devices)
                if not programs.is_expected(run, outcome):
                    bad.append(f"{run.key}@{devices}: {outcome.result} {outcome.cause.get('en', '')}")
    assert not bad
