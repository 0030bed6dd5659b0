"""The notebooks of `examples/notebooks`: every cell runs, in order, with small inputs in place of the parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model

NOTEBOOKS = Path(__file__).parents[2] / "examples" / "notebooks"
CPU: dict[str, Any] = {"device": {"type": "cpu", "threads": 1}}
SHORT: dict[str, Any] = {
    "schedule": {"max_steps": 4},
    "batch": {"seq_len": 64, "micro_batch_tokens": 256, "global_batch_tokens": 256},
    **CPU,
}


def run_cells(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Execute the cells; the one with the tag `parameters` gets these in place of its own, all of them known to it."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    found: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        assert not cell.get("outputs"), "notebooks are kept without outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), found)
            if "parameters" in cell["metadata"].get("tags", ()):
                assert set(parameters) <= set(found), "an unknown parameter"
                found |= parameters
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fine_tune(folder: Path) -> None:
    save_tiny_chat_model(folder)
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(100)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = run_cells("fine_tune", {"MODEL": str(folder / "model"), "DATA": "rows.jsonl", "MORE": SHORT})
    assert found["run"].is_finished and isinstance(found["answer"], str) and found["held_out"]
    assert list(found["losses"]) == [1, 4]


def test_pretrain() -> None:
    size = {**SHORT, "log": {"samples": 0}}
    parameters = {
        "DATA": "stdlib:#40",
        "VOCAB_SIZE": 300,
        "MODEL": {"depth": 1, "width": 64},
        "PRETRAIN": {**size, "eval": {"every": 2, "sample_prompts": ["def "]}},
        "TUNE": {"data": "task:arithmetic#60", **size},
    }
    found = run_cells("pretrain", parameters)
    assert found["base"].is_finished and found["tuned"].is_finished and found["base"].samples
    assert isinstance(found["answer"], str)


def test_vessels(folder: Path) -> None:
    pytest.importorskip("h3", reason="the extra vessels is not installed")
    lines = ["MMSI,BaseDateTime,LAT,LON,SOG,COG,Heading,VesselType"]
    for vessel in range(24):
        kind, speed = ((30, 4), (60, 18), (70, 11))[vessel % 3]
        for minute in range(40):
            turn = (minute * 37 + vessel) % 90 if kind == 30 else 0
            lines.append(
                f"{367000000 + vessel},2020-01-01T00:{minute:02d}:00,{30 + vessel * 0.1 + minute * 0.002:.5f},"
                f"{-80 + minute * speed * 0.0003:.5f},{speed},{(90 + turn) % 360},{(90 + turn) % 360},{kind}"
            )
    (folder / "ais.csv").write_text("\n".join(lines) + "\n")
    (folder / "unseen.csv").write_text("\n".join(lines).replace("3670000", "3680000") + "\n")
    parameters = {
        "AIS": "ais.csv",
        "UNSEEN": "unseen.csv",
        "WORDS": {"tracks": {"format": "motion", "min_points": 4, "points": [12]}},
        "TRAIN": {**SHORT, "model": {"depth": 1}, "head": {"trees": 0}},
    }
    found = run_cells("vessels", parameters)
    assert found["run"].is_finished and found["scores"]
