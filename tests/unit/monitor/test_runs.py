"""A run's state and figures, while its files are written, after it ended, and after it died."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from anabatic.core import paths
from anabatic.core.errors import ConfigError
from anabatic.monitor import run_lines, screen
from anabatic.monitor.run_reader import RunReader


def _append(path: Path, *rows: dict[str, Any], torn: str = "") -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(row)}\n" for row in rows) + torn)


def _train(step: int, moment: float, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "time": moment,
        "kind": "train",
        "loss": 5.0 / step,
        "tokens_per_s": 1e4,
        "eta_s": 60.0,
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _append(tmp_path / "events.jsonl", {"event": "start", "step": 0, "steps": 200})
    return tmp_path


def _shown(folder: Path, width: int = 80) -> str:
    lines = [
        screen.colorize_line(line, colour=False) for line in run_lines.format_run_lines(RunReader(folder).read(), width)
    ]
    assert all(cell_len(line) <= width for line in lines[1:])
    return "\n".join(lines)


def test_a_run_that_holds_its_folder_runs(folder: Path) -> None:
    _append(folder / "metrics.jsonl", _train(10, time.time() - 9), _train(20, time.time() - 8, mfu=0.3))
    with paths.lock_folder(folder, "training run"):
        run = RunReader(folder).read()
        assert (run.state, run.why, run.total_steps, run.get_figures()["step"]) == ("running", "", 200, 20)
        text = _shown(folder)
    assert "running" in text and "step 20/200  10 %  ETA 1m00s" in text and "MFU 30.0 %" in text


def test_a_run_that_is_alive_and_silent_is_marked(folder: Path) -> None:
    _append(folder / "metrics.jsonl", *(_train(step, time.time() - 600 + step) for step in (1, 2, 3)))
    with paths.lock_folder(folder, "training run"):
        assert RunReader(folder).read().why == "no row for 10 min"


def test_looking_does_not_keep_a_run_from_starting(folder: Path) -> None:
    reader = RunReader(folder)
    for _ in range(20):
        reader.read()
        with paths.lock_folder(folder, "training run"):
            assert reader.read().state == "running"


def test_finished_stopped_and_dead(folder: Path) -> None:
    _append(folder / "metrics.jsonl", _train(1, 1000.0), _train(2, 1001.0))
    for name in ("checkpoint-9", "checkpoint-10"):
        (folder / name).mkdir()
    run = RunReader(folder).read()
    assert (run.state, run.why) == ("dead", "continues from checkpoint-10")
    _append(folder / "events.jsonl", {"event": "stop", "step": 2})
    assert RunReader(folder).read().state == "stopped"
    (folder / "summary.json").write_text('{"finished": true}', encoding="utf-8")
    assert RunReader(folder).read().state == "finished"
    assert "ETA" not in _shown(folder)


def test_rows_from_another_machine_show_that_it_runs_there(folder: Path) -> None:
    now = time.time()
    _append(folder / "metrics.jsonl", *(_train(step, now - 60 + 20 * step) for step in (1, 2, 3)))
    assert RunReader(folder).read().state == "running elsewhere"


def test_a_file_that_is_being_written_is_followed(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    reader = RunReader(folder)
    assert reader.read().last == {} and "no row yet" in _shown(folder)
    _append(path, _train(1, 1.0), torn='{"step": 2, "ti')
    assert reader.read().last["step"] == 1
    _append(path, torn='me": 2.0, "kind": "train", "loss": null}\n')
    run = reader.read()
    assert run.last["step"] == 2 and run.losses == [5.0, None]
    _append(path, {"step": 2, "kind": "eval", "valid_loss": 2.5}, torn="\x00\xff garbage\n")
    assert reader.read().valid["valid_loss"] == 2.5
    kept = "".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:1])
    paths.write_atomic(path, kept)  # a run that resumed has cut its rows off
    assert reader.read().last["step"] == 1 and reader.read().losses == [5.0]


def test_a_long_file_is_read_from_its_end(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    _append(path, *(_train(step, float(step), text="x" * 200) for step in range(1, 3000)))
    reader = RunReader(folder)
    assert reader.read().last["step"] == 2999 and len(reader.read().losses) == 600


def test_lines_that_are_no_rows_are_counted(folder: Path) -> None:
    (folder / "metrics.jsonl").write_bytes(b"\xff\x00\n[1]\n" + b"[" * 100_000 + b'\n{"step": 1')
    assert "no row yet: 3 lines of metrics.jsonl are no rows" in _shown(folder)


def test_values_that_are_no_numbers_are_not_known(folder: Path) -> None:
    _append(
        folder / "metrics.jsonl", {"step": 3, "kind": "train", "loss": "nan", "lr": None, "time": "soon", "mfu": True}
    )
    run = RunReader(folder).read()
    assert run.get_figures() == {"step": 3} and run.age_s is None
    assert "loss n/a" in _shown(folder, 40)


def test_a_pipeline_shows_the_stage_that_ran_last(tmp_path: Path) -> None:
    _append(tmp_path / "pipeline.jsonl", {"event": "stage", "stage": "base"}, {"event": "stage", "stage": "sft"})
    for stage in ("base", "sft"):
        (tmp_path / stage).mkdir()
    _append(tmp_path / "base" / "events.jsonl", {"event": "start"})
    _append(tmp_path / "base" / "metrics.jsonl", _train(7, 1.0))
    reader = RunReader(tmp_path)
    assert (reader.read().name, reader.read().last["step"]) == (str(tmp_path / "base"), 7)
    _append(tmp_path / "sft" / "events.jsonl", {"event": "start"})
    assert (reader.read().name, reader.read().last) == (str(tmp_path / "sft"), {})  # followed while it is shown


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        RunReader(tmp_path / "absent")
    (tmp_path / "a").mkdir()
    _append(tmp_path / "a" / "metrics.jsonl", _train(1, 1.0))
    with pytest.raises(ConfigError, match="holds no run") as error:
        RunReader(tmp_path)
    assert str(tmp_path / "a") in error.value.hint
