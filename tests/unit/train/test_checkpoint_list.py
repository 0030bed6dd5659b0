"""`anabatic checkpoint list` and `verify`: what is there, and which file is not as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anabatic.cli.app import main
from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Save
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.parallel.process_groups import World
from anabatic.train.checkpoint import manifest
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.checkpoint.saver import CheckpointSaver
from unit.fake_runs import write_jsonl

STATE = RunState(TrainProgress(), about={"command": "sft", "strategy": "zero3"})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints, of which the second is the best."""
    folder = RunFolder(tmp_path / "run")
    folder.create_folder()
    device = select_device(DeviceConfig(type="cpu", threads=1))
    with CheckpointSaver(folder, Save(keep_last=9, background="off"), device, World()) as saver:
        for step in (5, 10, 15):
            saver.save(step, {"model.a": torch.ones(300)}, STATE)
    folder.config.write_text("eval:\n  metric: accuracy\n")
    rows = [
        {"step": step, "kind": "eval", "valid_loss": loss, "valid_accuracy": accuracy}
        for step, loss, accuracy in ((5, 3.0, 0.1), (10, 2.0, 0.9), (15, 1.0, 0.5))
    ]
    write_jsonl(folder.metrics, rows)
    return folder.root


def called(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *map(str, words)])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def damage(run: Path) -> None:
    """Flip a byte of one, tear another, leave a third half-uploaded."""
    flipped = run / "checkpoint-5" / "__0_0.distcp"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    torn = run / "checkpoint-10" / "state.json"
    torn.write_bytes(torn.read_bytes()[:-3])
    (run / "checkpoint-10" / "rng-0.safetensors").unlink()
    (run / "checkpoint-15" / "manifest.json").unlink()


def test_list_shows_every_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "list", run)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and lines[0] == ["step", "age", "size", "ranks", "strategy", "command", "best", "state"]
    assert [line[0] for line in lines[1:]] == ["5", "10", "15"]
    assert [line[-2:] for line in lines[1:]] == [["sft", "whole"], ["best", "whole"], ["sft", "whole"]]
    rows: list[dict[str, Any]] = json.loads(called(capsys, "list", run / "checkpoint-10", "--json")[1])
    (row,) = rows
    assert row["whole"] and row["best"] and row["age_s"] < 60 and row["bytes"] > 1200
    assert (row["step"], row["world_size"], row["strategy"], row["command"]) == (10, 1, "zero3", "sft")


def test_verify_names_every_broken_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "verify", run)
    assert code == 0 and out.count(": whole, 4 files, 8.") == 3
    damage(run)
    code, out, _ = called(capsys, "verify", run)
    size = (run / "checkpoint-10" / "state.json").stat().st_size
    assert code == 1 and out.splitlines() == [
        f"{run}/checkpoint-5: __0_0.distcp does not match its checksum",
        f"{run}/checkpoint-10: rng-0.safetensors is missing",
        f"{run}/checkpoint-10: state.json has {size} of {size + 3} bytes",
        f"{run}/checkpoint-15: manifest.json cannot be read (No such file or directory)",
    ]
    code, out, _ = called(capsys, "verify", run / "checkpoint-10", "--json")
    assert code == 1 and len(json.loads(out)[0]["faults"]) == 2
    code, out, _ = called(capsys, "list", run)
    assert code == 0 and out.splitlines()[1].endswith("whole")  # contents are not read
    assert out.splitlines()[3].endswith("manifest.json cannot be read (No such file or directory)")


@pytest.mark.parametrize("odd", [{"saved": "today"}, {"command": ["sft"]}, {"step": "15"}, {"world_size": [2]}])
def test_a_manifest_that_is_none_of_ours_is_passed_over(
    run: Path, odd: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoint-15" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    code, out, _ = called(capsys, "list", run)
    assert code == 0 and "manifest.json is torn" in out.splitlines()[-1]
    assert manifest.find_newest_valid(run).name == "checkpoint-10"


def test_names_of_a_manifest_lead_nowhere_else(run: Path) -> None:
    file = run / "checkpoint-15" / "manifest.json"
    known = json.loads(file.read_text())
    known["files"]["../checkpoint-10/state.json"] = known["files"]["state.json"]
    file.write_text(json.dumps(known))
    assert manifest.find_first_fault(run / "checkpoint-15") == "manifest.json is torn"
    file.write_text("[" * 100_000)
    assert manifest.find_first_fault(run / "checkpoint-15") == "manifest.json is torn"


def test_odd_settings_and_rows_beside_checkpoints_are_passed_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoint-20").write_text("a file")
    (run / "config.yaml").write_text("eval: 3\n")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "eval", "step": "x", "valid_loss": "y"}\nnull\n{"kind": "eval", "valid_loss": []}\n')
    code, out, _ = called(capsys, "list", run)
    lines = out.splitlines()
    assert code == 0 and lines[3].split()[-2:] == ["best", "whole"]
    assert "cannot be read (Not a directory)" in lines[4]
    code, _, said = called(capsys, "list", run / "config.yaml")
    assert code == 2 and "is no folder" in said


@pytest.mark.parametrize("verb", ["list", "verify", "export"])
def test_a_folder_without_checkpoints_is_the_users_mistake(
    run: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    more = ["--out", run.parent / "exported"] if verb == "export" else []
    code, _, err = called(capsys, verb, run.parent, *more)
    assert code == 2 and f"error: {run.parent} holds no checkpoint\nhint: name one of its runs: {run}" in err
    code, _, err = called(capsys, verb, run.parent / "nowhere", *more)
    assert code == 2 and "does not exist" in err


def test_export_refuses_what_it_cannot_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([run], "out is not given"),
        ([run, "--out", run], f"{run} exists already"),
        ([run, "--out", run / "new", "--dtype", "int8"], "--dtype"),
        ([run, "--out", run / "new"], "checkpoint-15 holds no config.yaml"),
    ):
        code, _, err = called(capsys, "export", *words)
        assert code == 2 and said in err, err
    damage(run)
    code, _, err = called(capsys, "export", run, "--out", run / "new")
    assert code == 2 and f"none of the 3 checkpoints in {run} is whole" in err
    assert err.count(" is not used: ") == 3 and not (run / "new").exists()
