"""The studio's queue on simulated NPUs: jobs get devices of their own, and wait for those that are in use."""

from __future__ import annotations

import json

from anabatic_testing.tiny_models import train_tiny_tokenizer, write_tiny_text
from npu_sim.conftest import Sim


def test_jobs_get_devices_of_their_own_and_wait_for_them(sim: Sim) -> None:
    text = write_tiny_text(sim.folder)
    tokenizer = train_tiny_tokenizer(sim.folder, text)
    result = json.loads(
        sim.program("studio_queue.py", str(text), str(tokenizer), flags=["--npus", "2"]).splitlines()[-1]
    )
    assert result["states"] == ["finished"] * 3, result["logs"]
    devices = result["devices"]
    assert sorted(devices["a"] + devices["b"]) == [0, 1] and devices["c"] == [0, 1]
    assert "ab" in result["together"] and not {"ac", "bc", "abc"} & set(result["together"])
    assert "another job of the queue" in result["waited"]
    assert (sim.folder / "c" / "final_model" / "model.safetensors").is_file()
