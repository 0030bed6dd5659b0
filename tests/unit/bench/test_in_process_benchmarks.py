"""What runs in this very process: the engine, the tokenizer, files and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.bench import disk_io, inference_throughput, tokenizer_throughput
from anabatic.config.bench import BenchInferJob, BenchIoJob, BenchTokenizeJob
from anabatic.config.sections.common import Data, DeviceSettings
from anabatic.core.errors import DataError
from anabatic.models import pretrained
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model

FEW: dict[str, Any] = {"repeats": 2, "warm_up": 1, "plot": "off"}
CPU = DeviceSettings(type="cpu", threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_byte_tokenizer(folder / "tokenizer")
    pretrained.save_model(build_random_model(len(tokenizer)), folder / "model", tokenizer)
    return folder / "model"


def figures(out: Path) -> dict[str, Any]:
    return {one["name"]: one for one in json.loads((out / "bench.json").read_text())["figures"]}


def test_answers_are_as_long_as_asked_for(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = BenchInferJob(
        out=str(tmp_path), model=str(model), requests=3, prompt_tokens=20, new_tokens=5, device=CPU, **FEW
    )
    assert inference_throughput.run(job) == 0
    made = figures(tmp_path)
    seconds = zip(made["first tokens of all"]["values"], made["all answers"]["values"], strict=True)
    for number, (first, whole) in enumerate(seconds):
        assert made["reading prompts"]["values"][number] == pytest.approx(60 / first)
        assert made["answers"]["values"][number] == pytest.approx(3 / whole)
        assert made["writing answers"]["values"][number] == pytest.approx(12 / max(whole - first, 1e-9))
    assert "3 prompts of 20 tokens, 5 new ones each, 3 at once" in capsys.readouterr().out


def test_more_than_the_model_has_positions_for_is_refused(model: Path, tmp_path: Path) -> None:
    job = BenchInferJob(out=str(tmp_path), model=str(model), prompt_tokens=200, device=CPU, **FEW)
    with pytest.raises(DataError, match="max_len is 264, the model has 128 positions"):
        inference_throughput.run(job)
    assert not (tmp_path / "bench.json").exists()


@pytest.mark.parametrize("own", [False, True])
def test_text_of_ones_own_or_made_up(
    own: bool, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "the wind moves upward"}\n' * 50)
    data = Data(train=[str(rows)] if own else [])
    job = BenchTokenizeJob(out=str(tmp_path), tokenizer=str(model) if own else "", mib=0.02, data=data, **FEW)
    assert tokenizer_throughput.run(job) == 0
    made = figures(tmp_path)
    assert all(value > 0 for one in made.values() for value in one["values"]) and len(made) == 4
    shown = capsys.readouterr().out
    assert ("1.0 KiB of text" if own else "of text") in shown and ("made-up words" in shown) != own
    assert not list(tmp_path.glob(".text-*"))


@pytest.mark.process
def test_files_are_written_and_read_as_a_training_does(model: Path, tmp_path: Path) -> None:
    job = BenchIoJob(out=str(tmp_path), model=str(model), batch_tokens=1024, device=CPU, **FEW)
    assert disk_io.run(job) == 0
    made = figures(tmp_path)
    kinds = [f"{what} {how}" for what in ("model", "checkpoint") for how in ("saved", "loaded", "loaded, not cached")]
    assert set(made) == {*kinds, "batches read"}
    assert all(len(one["values"]) == 2 and min(one["values"]) > 0 for one in made.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]
