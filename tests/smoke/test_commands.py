"""One request, one evaluation, one plan, one training step on a simulated NPU, each by the command that users type."""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import load_file

from anabatic.core.errors import UserError
from anabatic_sim.libraries import native_build
from anabatic_testing.multiprocess import find_free_port
from e2e import command
from e2e.home import Home
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


WHEEL = "ANABATIC_TEST_SIM_WHEEL"
"""Variable that names a wheel of anabatic-sim with compiled libraries, for machines without a build or a compiler."""


def simulated(home: Home, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """Return a home whose commands run on a simulated NPU, by the user's build or a wheel; skips where none is."""
    user = Path(os.environ[isolation.SIM_CACHE])
    cache = folder / "cache"
    cache.mkdir()
    (cache / "sim").symlink_to(user / "sim")
    npu = replace(home, device="npu", cache=cache)
    if wheel := os.environ.get(WHEEL):
        (user / "sim").mkdir(parents=True, exist_ok=True)  # torch_npu is fetched into it
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheel")
        program = (sys.executable, "-m", "anabatic_sim", "--")
        return replace(npu, program=program, variables={"PYTHONPATH": str(folder / "wheel")})
    monkeypatch.setenv("ANABATIC_CACHE", str(user))
    try:
        built = native_build.find_build()
    except UserError as error:
        pytest.skip(f"no simulated NPU: {error}")
    if built is None:
        pytest.skip(
            f"no simulated NPU is compiled: `anabatic sim -- true` does it, in minutes; or name a wheel by {WHEEL}"
        )
    return replace(npu, program=(sys.executable, "-m", "anabatic", "sim", "--"))


def test_a_step_on_a_simulated_npu(home: Home, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npu, more = simulated(home, tmp_path, monkeypatch), {"tuner": "lora", "schedule.max-steps": 2}
    home.anabatic(*home.sft(tmp_path / "cpu", base, more=more))
    npu.anabatic(*npu.sft(tmp_path / "npu", base, more=more))
    found, expected = (command.losses(tmp_path / name) for name in ("npu", "cpu"))
    assert list(found) == [1, 2] and list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)
