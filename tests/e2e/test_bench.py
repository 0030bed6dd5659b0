"""`anabatic bench` on what starts processes: trainings, and collectives."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from e2e.home import Home


def test_a_training_is_measured_on_one_device_and_on_two(home: Home, tmp_path: Path) -> None:
    train = home.pretrain(tmp_path / "own", more={"log.every": 7})
    options = ["--npus", "1,2", "--steps", 2, "--repeats", 2, "--length", 64, "--plot", "off", "--out", tmp_path]
    said = home.anabatic("bench", "scaling", *options, "--", *train)
    result = json.loads((tmp_path / "bench.json").read_text())
    figures = {(one["name"], one["at"]): one for one in result["figures"]}
    speeds = [figures["tokens/s", at]["median"] for at in (1.0, 2.0)]
    assert all(len(figures["tokens/s", at]["values"]) == 2 for at in (1.0, 2.0)) and min(speeds) > 0
    assert figures["speed-up", 2.0]["median"] == pytest.approx(speeds[1] / speeds[0])
    assert figures["efficiency", 2.0]["median"] == pytest.approx(speeds[1] / speeds[0] / 2)
    assert figures["tokens a step", 1.0]["median"] == pytest.approx(512, rel=0.1)
    assert figures["tokens a step", 2.0]["median"] == pytest.approx(512, rel=0.1)  # strong scaling
    assert "efficiency" in said.out and "share one processor" in said.out
    assert (tmp_path / "devices-2" / "training.log").is_file()
    assert not (tmp_path / "devices-2" / "run").exists() and not (tmp_path / "own").exists()
    left = [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(one.info["cmdline"] or [])]
    assert not left


def test_collectives_of_two_processes(home: Home, tmp_path: Path) -> None:
    sizes = ["--mib", "0.01", "0.1", "--repeats", 2, "--device.type", "cpu", "--nproc", 2]
    said = home.anabatic("bench", "collective", *sizes, "--plot", "off", "--out", tmp_path)
    result = json.loads((tmp_path / "bench.json").read_text())
    assert {one["name"] for one in result["figures"]} == {"all_reduce", "all_gather", "reduce_scatter", "broadcast"}
    assert sorted({one["at"] for one in result["figures"]}) == [10480.0, 104856.0]
    assert all(one["median"] > 0 and one["planned"] is None for one in result["figures"])
    assert "collectives of 2 processes, gloo" in said.out
