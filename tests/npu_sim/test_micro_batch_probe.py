"""`--auto` on two devices: memory runs out on one, and all ranks begin anew; a batch that both must share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from anabatic_testing.tiny_models import save_tiny_chat_model
from npu_sim.conftest import Sim


@pytest.fixture(autouse=True)
def model(sim: Sim) -> None:
    """A model and rows to fine-tune it on, in the folder of the simulation."""
    save_tiny_chat_model(sim.folder)
    said = "the wind moves upward along the slope " * 12
    turns = [{"role": "user", "content": "go"}, {"role": "assistant", "content": said}]
    (sim.folder / "rows.jsonl").write_text("\n".join([json.dumps({"messages": turns})] * 100), encoding="utf-8")


def train(sim: Sim, npus: int, out: str, options: dict[str, object], flags: Sequence[str] = ()) -> str:
    """Fine-tune with `--auto` for two steps of 1,024 tokens; return what was said."""
    given = {"model": "model", "data.train": "rows.jsonl", "data.valid-fraction": 0, "device.nproc": npus, "out": out}
    given |= {"batch.seq-len": 128, "batch.micro-batch-tokens": 512, "batch.global-batch-tokens": 1024}
    given |= {"schedule.max-steps": 2, "log.every": 1, "log.samples": 0, **options}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    done = sim.command("anabatic", "sft", "--auto", "--train-on-inputs", *words, flags=["--npus", str(npus), *flags])
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((sim.folder / out / "summary.json").read_text())["finished"]
    return done.stderr


def run_out(sim: Sim, **layout: object) -> str:
    """Train on two devices, the second of which refuses its third allocation; return what was said."""
    options = {f"parallel.{name}": value for name, value in layout.items()}
    said = train(sim, 2, "run", options, ["--fault", "oom@1#3"])
    assert "rank 1, NPU out of memory. Tried to allocate" in said
    return said


def read_rows(sim: Sim, out: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (sim.folder / out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def test_ranks_start_again_with_half_the_micro_batch(sim: Sim) -> None:
    said = run_out(sim, strategy="ddp")
    assert "at micro-batches of 512 tokens x 1, 1,024 a step: now 256 tokens x 2, 1,024 a step" in said
    state = json.loads((sim.folder / "run" / "auto.json").read_text())
    assert (state["lowered"], state["micro"], state["batch"]) == (1, 256, 1024)
    first, second = (row["tokens"] for row in read_rows(sim, "run"))
    assert 0.8 * 1024 < first <= 1024 and 0.8 * 1024 < second - first <= 1024  # no row fits into what is left


def test_stages_start_again_with_half_the_micro_batch(sim: Sim) -> None:
    said = run_out(sim, pipeline=2)
    assert "at micro-batches of 512 tokens x 2, 1,024 a step: now 256 tokens x 4, 1,024 a step" in said


def test_a_batch_that_cannot_be_divided_is_shared(sim: Sim) -> None:
    """One micro-batch a step on two devices: a mesh is chosen in which both work on it, and they train as one does."""
    whole: dict[str, object] = {"batch.micro-batch-tokens": 1024, "device.dtype": "fp32"}
    train(sim, 1, "one", whole)
    train(sim, 2, "two", whole)
    way = json.loads((sim.folder / "two" / "auto.json").read_text())["way"]
    assert sorted(way[3:]) == [1, 1, 1, 1, 1, 2]
    for row, other in zip(read_rows(sim, "one"), read_rows(sim, "two"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
        assert other["tokens"] == row["tokens"]
