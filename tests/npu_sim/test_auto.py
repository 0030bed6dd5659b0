"""`--auto` where memory runs out: the real allocator against a device that has too little."""

from __future__ import annotations

import json

from anabatic.data import tokenizer as tokenizers
from anabatic.models.hf import save_model
from anabatic.testing.tiny import tiny_qwen2, tiny_text, tiny_tokenizer
from npu_sim.conftest import Sim


def test_ranks_start_again_with_half_the_micro_batch(sim: Sim) -> None:
    tokens = tiny_tokenizer(sim.folder, tiny_text(sim.folder))
    model = tiny_qwen2(num_hidden_layers=3, hidden_size=256, intermediate_size=704, max_position_embeddings=512)
    save_model(model, sim.folder / "model", tokenizers.load(tokens))
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
    words += ["--parallel.strategy", "ddp", "--recompute", "full", "--device.nproc", "2", "--batch.seq-len", "128"]
    words += ["--batch.micro-batch-tokens", "8192", "--batch.global-batch-tokens", "16384", "--schedule.max-steps", "2"]
    words += ["--log.every", "1", "--log.samples", "0", "--out", "run", "--train-on-inputs"]
    done = sim.command(*words, flags=["--npus", "2", "--hbm", "112MiB"], HCCL_BUFFSIZE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "NPU out of memory" in done.stderr and "at micro-batches of 8,192 tokens x 1, 16,384 a step" in done.stderr
    state = json.loads((sim.folder / "run" / "auto.json").read_text())
    assert state["lowered"] >= 1 and state["micro"] <= 4096 and state["batch"] == 16384
    rows = [json.loads(line) for line in (sim.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first, second = (row["tokens"] for row in rows if row["kind"] == "train")
    assert 0.95 * 16384 < first <= 16384 and 0.95 * 16384 < second - first <= 16384  # no row fits into what is left
    assert json.loads((sim.folder / "run" / "summary.json").read_text())["finished"]
