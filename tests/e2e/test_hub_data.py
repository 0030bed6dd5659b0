"""Trainings on data sets of a hub: the commit of the first start is what every later start reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.testing.random_models import build_byte_tokenizer, build_random_model
from unit.hub.hub_server import SHA, Hub, serving


def rows(answer: str) -> bytes:
    turns = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{answer} {n}"}] for n in range(40)
    ]
    return b"".join(json.dumps({"messages": messages}).encode() + b"\n" for messages in turns)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_random_model(len(build_byte_tokenizer(folder))).save_pretrained(folder)
    return folder


def train(base: Path, out: Path, url: str, cache: Path, *more: str) -> str:
    variables = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(cache / "hf"),
        "ANABATIC_CACHE": str(cache / "shards"),
        "HF_HUB_OFFLINE": "0",
    }
    words = f"sft --model {base} --data hf:acme/rows --out {out} --batch.seq-len 64 --schedule.max-steps 6"
    done = subprocess.run(
        [sys.executable, "-m", "anabatic", *words.split(), "--save.every", "2", "--log.every", "1", *more],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(out: Path) -> list[float]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "train"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_that_continues_reads_the_rows_it_began_with(base: Path, tmp_path: Path, nproc: int) -> None:
    more = ("--nproc", str(nproc))
    hub = Hub({"README.md": b"---\nlicense: mit\n---\n", "train.jsonl": rows("yes")}, "acme/rows")
    with serving(hub) as served:
        said = train(base, tmp_path / "whole", served.url, tmp_path / "c1", *more)
        assert said.count("license mit") == 1, said  # by rank 0, not by the command that starts the processes, too
        assert [path for path in hub.asked if "train.jsonl" in path and path.startswith("FILE")] == [
            hub.asked[-1]
        ]  # one process downloads
        parts = tmp_path / "parts"
        shutil.copytree(tmp_path / "whole", parts)
        for name in ("checkpoint-4", "checkpoint-6", "final_model", "best_model"):  # killed after step 2
            shutil.rmtree(parts / name, ignore_errors=True)
        (parts / "summary.json").unlink()
        record = (parts / "datasets.json").read_text(encoding="utf-8")
        (entry,) = json.loads(record).values()
        assert entry["commit"] == SHA and entry["license"] == "mit"
        hub.files["train.jsonl"] = rows("no")
        hub.commit = "f" * 40
        train(base, parts, served.url, tmp_path / "c1", *more)
        assert (parts / "datasets.json").read_text(encoding="utf-8") == record
        train(base, tmp_path / "new", served.url, tmp_path / "c1", *more)
    assert losses(parts)[-4:] == losses(tmp_path / "whole")[2:]
    assert len(losses(parts)) == 6
    assert losses(tmp_path / "new") != losses(tmp_path / "whole")
