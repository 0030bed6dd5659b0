"""Trainings on data sets of a hub: the commit of the first start is what every later start reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from e2e.hub_home import HubHome
from unit.hub.hub_server import SHA


def rows(answer: str) -> bytes:
    turns = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{answer} {n}"}] for n in range(40)
    ]
    return b"".join(json.dumps({"messages": messages}).encode() + b"\n" for messages in turns)


def train(hub: HubHome, out: Path, *more: str) -> str:
    words = f"sft --model {hub.model} --data hf:acme/rows --out {out} --batch.seq-len 64 --schedule.max-steps 6"
    return hub.anabatic(*words.split(), "--save.every", "2", "--log.every", "1", *more)


def losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_continues_reads_the_rows_it_began_with(hub: HubHome, tmp_path: Path, nproc: int) -> None:
    more = ("--nproc", str(nproc))
    hub.hold(rows("yes"))
    said = train(hub, tmp_path / "whole", *more)
    assert said.count("license mit") == 1, said  # by rank 0, not by the command that starts the processes, too
    asked = hub.hub.asked
    assert [path for path in asked if "train.jsonl" in path and path.startswith("FILE")] == [asked[-1]]  # by one only
    parts = tmp_path / "parts"
    shutil.copytree(tmp_path / "whole", parts)
    for name in ("checkpoint-4", "checkpoint-6", "final_model", "best_model"):  # killed after step 2
        shutil.rmtree(parts / name, ignore_errors=True)
    (parts / "summary.json").unlink()
    record = (parts / "datasets.json").read_text(encoding="utf-8")
    (entry,) = json.loads(record).values()
    assert entry["commit"] == SHA and entry["license"] == "mit"
    hub.change("train.jsonl", rows("no"))
    train(hub, parts, *more)
    assert (parts / "datasets.json").read_text(encoding="utf-8") == record
    train(hub, tmp_path / "new", *more)
    assert losses(parts)[-4:] == losses(tmp_path / "whole")[2:]
    assert len(losses(parts)) == 6
    assert losses(tmp_path / "new") != losses(tmp_path / "whole")
