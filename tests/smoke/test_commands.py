"""One request, one evaluation, one plan, one training step on a simulated NPU, each by the command that users type."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import load_file

from anabatic.sim import native_build
from anabatic.testing.multiprocess import find_free_port
from e2e import command
from e2e.home import Home, Options
from suite import isolation


def test_a_request_is_answered(home: Home, base: Path) -> None:
    port = find_free_port()
    server = home.start("serve", base, "--port", port, "--device.type", "cpu")
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return httpx2.get(f"{url}/health", timeout=5).status_code == 200
        except httpx2.TransportError:  # it does not listen yet
            return False

    command.wait_for(server, answers)
    body = {"model": "base", "prompt": "the wind moves", "max_tokens": 8, "temperature": 0}
    answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"].strip() and answer["usage"]["completion_tokens"] == 8
    server.send_signal(signal.SIGTERM)
    assert "served" in command.end(server).err


def test_an_evaluation_of_what_was_trained(home: Home, base: Path, tmp_path: Path) -> None:
    words = ("--data.train", home.text, "--tasks", "task:spelling#4", "--max-new-tokens", 8, "--device.type", "cpu")
    home.anabatic("eval", "--model", base, "--out", tmp_path / "eval", *words)
    found = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert found["bits_per_byte"]["model"] < 0.5 * found["bits_per_byte"]["gzip9"], "it has learned this text"
    assert set(found["tasks"]) == {"spelling"}


def test_a_plan_fits_the_chip(home: Home, base: Path, tmp_path: Path) -> None:
    planned = home.anabatic(
        "plan", "--chip", "910B3", "--npus", 8, "--json", "--", *home.sft(tmp_path / "out", base, 8)
    )
    plan = json.loads(planned.out)
    assert plan["fits"] and 0 < plan["memory_bytes"] < plan["room_bytes"] < 64 * 2**30
    weights = load_file(base / "final_model" / "model.safetensors")
    assert plan["trained"] == sum(weight.numel() for weight in weights.values())
    assert not (tmp_path / "out").exists()


def test_a_step_on_a_simulated_npu(home: Home, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABATIC_CACHE", os.environ[isolation.SIM_CACHE])
    if native_build.find_build() is None:
        pytest.skip("the simulated NPU is not compiled yet; `anabatic sim -- true` does it, in minutes")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "sim").symlink_to(native_build.simulator_folder())
    more: Options = {"tuner": "lora", "schedule.max-steps": 2}
    home.anabatic(*home.sft(tmp_path / "cpu", base, more=more))
    program = (sys.executable, "-m", "anabatic", "sim", "--")
    npu = replace(home, device="npu", program=program, cache=cache)
    npu.anabatic(*npu.sft(tmp_path / "npu", base, more=more))
    found, expected = (command.losses(tmp_path / name) for name in ("npu", "cpu"))
    assert list(found) == [1, 2] and list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
