"""What a machine says of the files of a job."""

from __future__ import annotations

from pathlib import Path

from anabatic.launch.preflight import machine_report


def test_files_that_are_there_and_data_that_are_not(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    recipe = {
        "data.train": [str(rows), "stdlib:", f"{tmp_path}/gone.jsonl@0.5"],
        "data.valid": [f"{tmp_path}/*.parquet"],
        "model": "Qwen/Qwen3-0.6B",
        "tokenizer": str(tmp_path),
        "out": "runs/x",
        "seed": 3,
    }
    assert dict(machine_report._measure_job_files(recipe)) == {
        f"data.train: {rows}": [1, 3],
        f"data.train: {tmp_path}/gone.jsonl@0.5": None,
        f"data.valid: {tmp_path}/*.parquet": None,
        f"tokenizer: {tmp_path}": [1, 3],
    }
