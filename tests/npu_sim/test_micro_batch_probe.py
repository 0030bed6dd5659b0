"""`--auto` where memory runs out on one of two devices: the real allocator's refusal, and all ranks begin anew."""

from __future__ import annotations

import json

from anabatic.testing.tiny_models import save_tiny_chat_model
from npu_sim.conftest import Sim


def run_out(sim: Sim, *layout: str) -> str:
    """Train on two devices, the second of which refuses its third allocation; return what was said."""
    save_tiny_chat_model(sim.folder)
    said = "the wind moves upward along the slope " * 12
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": said}]
    (sim.folder / "rows.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 100), encoding="utf-8")
    words = [
        "anabatic",
        "sft",
        "--auto",
        "--model",
        "model",
        "--data.train",
        "rows.jsonl",
        "--data.valid-fraction",
        "0",
    ]
    words += [*layout, "--device.nproc", "2", "--batch.seq-len", "128", "--log.every", "1"]
    words += ["--batch.micro-batch-tokens", "512", "--batch.global-batch-tokens", "1024", "--schedule.max-steps", "2"]
    words += ["--log.samples", "0", "--out", "run", "--train-on-inputs"]
    done = sim.command(*words, flags=["--npus", "2", "--fault", "oom@1#3"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 1, NPU out of memory. Tried to allocate" in done.stderr
    assert json.loads((sim.folder / "run" / "summary.json").read_text())["finished"]
    return done.stderr


def test_ranks_start_again_with_half_the_micro_batch(sim: Sim) -> None:
    said = run_out(sim, "--parallel.strategy", "ddp")
    assert "at micro-batches of 512 tokens x 1, 1,024 a step: now 256 tokens x 2, 1,024 a step" in said
    state = json.loads((sim.folder / "run" / "auto.json").read_text())
    assert (state["lowered"], state["micro"], state["batch"]) == (1, 256, 1024)
    rows = [json.loads(line) for line in (sim.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = (row["tokens"] for row in rows if row["kind"] == "train")
    assert 0.8 * 1024 < first <= 1024 and 0.8 * 1024 < second - first <= 1024  # no row fits into what is left


def test_stages_start_again_with_half_the_micro_batch(sim: Sim) -> None:
    said = run_out(sim, "--parallel.pipeline", "2")
    assert "at micro-batches of 512 tokens x 2, 1,024 a step: now 256 tokens x 4, 1,024 a step" in said
