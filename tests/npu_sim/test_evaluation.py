"""Evaluation on simulated NPUs: the CPU's likelihoods, one wait of the host a batch, and none for an item."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabatic.models.pretrained import save_model
from anabatic_testing.random_models import build_byte_tokenizer, build_random_model
from npu_sim.conftest import Sim

TASK = """
data: {files: [rows.jsonl]}
prompt: "{{ words }} and"
choices: ["up", "down", "left"]
answer: 0
"""


def waits_of(folder: Path) -> dict[str, int]:
    """File -> how often the host waited for the device in it."""
    waits: dict[str, int] = {}
    for row in json.loads((folder / "sim.json").read_text())["syncs"]:
        file = Path(row["line"].rpartition(":")[0]).name
        waits[file] = waits.get(file, 0) + row["count"]
    return waits


def test_the_cpus_likelihoods_with_one_wait_a_batch(sim: Sim) -> None:
    told = sim.program("score.py", flags=["--report", "sim.json"]).splitlines()
    assert told[-1] == "same"
    batches = int(told[-2].split()[1])
    waits = waits_of(sim.folder)
    assert 1 < batches < 20 and waits.pop("likelihood.py") <= batches
    ours = {"attention.py", "forward.py", "ops.py", "segments.py", "trees.py"}
    assert not ours & set(waits), waits


SIZES = (16, 24, 32, 40, 48, 56, 64)
"""Rows of the graphs of up to 64 replies that end one after the other."""


@pytest.mark.parametrize(
    ("tasks", "file", "most"), [("winds.yaml", "likelihood.py", 1), ("task:arithmetic", "sampling.py", 20)]
)
def test_more_items_are_no_more_waits(sim: Sim, tasks: str, file: str, most: int) -> None:
    """Choices: one batch of them all. Replies: a wait for each of the 8 tokens, and for each piece of the prompts."""
    tokenizer = build_byte_tokenizer(sim.folder / "tokenizer")
    save_model(build_random_model(len(tokenizer), max_len=128), sim.folder / "model", tokenizer)
    rows = [{"words": f"the wind {n} moves"} for n in range(64)]
    (sim.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (sim.folder / "winds.yaml").write_text(TASK)
    found = []
    for items in (16, 64):
        words = ["python", "-m", "anabatic", "eval", "model", "--tasks", f"{tasks}#{items}", "--out", "out"]
        words += ["--max-new-tokens", "8", "--batch-size", "64", "--batch-tokens", "9000", "--resume", "never"]
        done = sim.command(*words, flags=["--report", "sim.json"])
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(waits_of(sim.folder))
    few, many = found
    graphs = [waits.pop("graphs.py", 0) for waits in found]
    assert max(graphs) <= 2 * len(SIZES), graphs  # a step of a size that is met again is captured once
    replies = [waits.pop(file) + waits.pop("decode_graph.py", 0) for waits in found]
    assert min(replies) > 0 and max(replies) <= most, replies
    assert sum(few.values()) == sum(many.values()), found  # what the model's loading waits for
