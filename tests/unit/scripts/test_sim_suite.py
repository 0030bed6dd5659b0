"""The runner of other people's tests: torn results, causes, exceptions, tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(name="suite")
def _suite(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import sim_suite

    yield sim_suite
    sys.modules.pop("sim_suite", None)


def _write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_torn_line_costs_itself_alone(suite: Any, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", {"collected": 9, "chosen": 2}, {"test": "T::a", "outcome": "passed"})
    with path.open("a") as file:
        file.write('{"test": "T::b", "outc')
    result = suite.read_file_result(path, "a.py")
    assert (result.collected, result.count("passed"), result.finished) == (9, 1, False)
    _write(path, {"test": "T::a", "outcome": "failed", "error": "x"}, {"end": 1})
    assert suite.read_file_result(path, "a.py").finished
    assert not suite.read_file_result(tmp_path / "missing", "a.py").tests


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("NotImplementedError: anabatic sim: operator npu::npu_pad is not simulated (a)", "operator npu::npu_pad"),
        ("E  ModuleNotFoundError: No module named 'PIL.Image'", "module PIL.Image"),
        ("aclnnFoo or aclnnFooGetWorkspaceSize not in libopapi.so", "aclnnFoo"),
        ("the process ended by SIGSEGV", "process ended by SIGSEGV"),
        ("first\nlast line", "last line"),
        ("FileNotFoundError: [Errno 2]: '/data/test/rows_1.csv'", "file rows_1.csv"),
        ("AssertionError: <module 'a' from '/opt/x/lib/a.py'>", "AssertionError: <module 'a' from 'a.py'>"),
        ("", "no text"),
    ],
)
def test_causes(suite: Any, text: str, cause: str) -> None:
    assert suite.find_cause(text) == cause


def test_exceptions_excuse_failures_alone(suite: Any, tmp_path: Path) -> None:
    disabled = tmp_path / "disabled.json"
    names = ["test_sum (__main__.TestX)", "test_one_npu (__main__.TestYPRIVATEUSE1)", "not a test"]
    disabled.write_text(json.dumps(dict.fromkeys(names, ["", [""]])))
    exceptions = suite.read_exceptions(disabled)
    rows = [
        {"test": f"TestX::test_{name}", "outcome": "failed", "error": "E"} for name in ("sum", "sum_npu_float32", "max")
    ]
    rows += [{"test": "TestYPRIVATEUSE1::test_one_npu", "outcome": "passed"}]
    rows += [{"test": "TestX::onnx", "outcome": "failed", "error": "No module named 'onnx.helper'"}]
    result = suite.read_file_result(_write(tmp_path / "r.jsonl", *rows), "r.py", exceptions)
    outcomes = {test: row["outcome"] for test, row in result.tests.items()}
    assert outcomes == {
        "TestX::test_sum": "excepted",
        "TestX::test_sum_npu_float32": "excepted",
        "TestX::test_max": "failed",
        "TestYPRIVATEUSE1::test_one_npu": "passed",
        "TestX::onnx": "excepted",
    }
    assert suite.format_row("r", [result]) == "| r | 0 | 1 | 1 | 0 | 0 | 0 | 3 | 50.0 % |"
    assert all(row["needs_zh"] for row in exceptions.rows)


def test_failures_run_again_and_the_rest_is_kept(suite: Any, tmp_path: Path) -> None:
    rows = [
        {"collected": 3},
        {"test": "a", "outcome": "passed"},
        {"test": "b", "outcome": "crashed"},
        {"test": "c", "outcome": "skipped"},
        {"end": 1},
    ]
    path = _write(tmp_path / "r.jsonl", *rows)
    suite.forget_results(path, "failed")
    assert set(suite.read_file_result(path, "r").tests) == {"a", "c"}
    suite.forget_results(path, "all")
    assert path.read_text() == ""


def test_a_missing_folder_is_one_clear_error(suite: Any, monkeypatch: Any, capsys: Any) -> None:
    wanted = suite.Suite("x", "scripts/x.py", "x", Path("/nowhere"), "a checkout")
    monkeypatch.setattr(sys, "argv", ["x.py"])
    with pytest.raises(SystemExit):
        suite.parse_options(wanted)
    assert "/nowhere/test is not there; --tests: a checkout" in capsys.readouterr().err
