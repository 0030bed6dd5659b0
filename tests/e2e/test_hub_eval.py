"""Evaluations on data sets of a hub: the commit of the first one is what every later one reads."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from anabatic.testing.random_models import build_byte_tokenizer, build_random_model
from unit.hub.hub_server import SHA, Hub, serving

CARD = b"---\nlicense: mit\n---\n"
LATER = "f" * 40
TASK = """
kind: choices
data: {hub: acme/rows, config: default, split: test}
prompt: "{{ question }}"
choices: ["yes", "no"]
answer: "{{ answer }}"
"""


def texts(word: str) -> bytes:
    return b"".join(json.dumps({"text": f"{word} {n}"}).encode() + b"\n" for n in range(40))


def questions(answer: int) -> bytes:
    made = io.BytesIO()
    parquet.write_table(pyarrow.table({"question": ["a?", "b?"], "answer": [answer, answer]}), made)
    return made.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    build_random_model(len(build_byte_tokenizer(folder))).save_pretrained(folder)
    return folder


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub({"README.md": CARD, "train.jsonl": texts("yes")}, "acme/rows")) as served:
        yield served


def evaluate(model: Path, out: Path, hub: Hub, *more: str) -> tuple[dict[str, Any], str]:
    """Return eval.json, and what was said."""
    cache = out.parent / "cache"
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache / "hf"),
        "ANABATIC_CACHE": str(cache / "shards"),
        "HF_HUB_OFFLINE": "0",
    }
    done = subprocess.run(
        [sys.executable, "-m", "anabatic", "eval", str(model), "--out", str(out), *more],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((out / "eval.json").read_text(encoding="utf-8")), done.stderr


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_repeated_evaluation_reads_the_text_of_the_first(model: Path, tmp_path: Path, hub: Hub, nproc: int) -> None:
    more = ("--data.valid", "hf:acme/rows", "--nproc", str(nproc))
    first, said = evaluate(model, tmp_path / "eval", hub, *more)
    assert said.count("license mit") == 1, said
    record = {"commit": SHA, "subset": "", "split": "train", "license": "mit", "files": 1}
    assert first["data_sets"] == {"hf:acme/rows": record | {"bytes": len(texts("yes"))}}
    hub.files["train.jsonl"] = texts("other")
    hub.commit = LATER
    again, said = evaluate(model, tmp_path / "eval", hub, *more)
    assert again == first
    assert LATER not in said
    anew, said = evaluate(model, tmp_path / "eval", hub, *more, "--resume", "never")
    assert anew["data_sets"]["hf:acme/rows"]["commit"] == LATER
    assert anew["bits_per_byte"] != first["bits_per_byte"]
    assert said.count("license mit") == 1, said
    after, _ = evaluate(model, tmp_path / "eval", hub, *more)
    assert after == anew


def test_the_training_decides_which_rows_are_held_out(model: Path, tmp_path: Path, hub: Hub) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}\n", encoding="utf-8")
    (run / "final_model").symlink_to(model)
    record = {"hf:acme/rows": {"commit": SHA, "subset": "", "split": "train", "license": "mit"}}
    (run / "datasets.json").write_text(json.dumps(record), encoding="utf-8")
    evaluate(model, tmp_path / "warm", hub, "--data.valid", "hf:acme/rows")  # the cache knows this commit
    hub.files["train.jsonl"] = texts("other")
    hub.commit = LATER
    held_out = ("--data.train", "hf:acme/rows", "--data.valid-fraction", "0.2")
    for resume in ("auto", "never"):
        found, _ = evaluate(run, tmp_path / "eval", hub, *held_out, "--resume", resume)
        assert found["data_sets"]["hf:acme/rows"]["commit"] == SHA
    assert json.loads((run / "datasets.json").read_text(encoding="utf-8")) == record


def test_tasks_of_the_hub_keep_their_commit(model: Path, tmp_path: Path, hub: Hub) -> None:
    hub.files = {"README.md": CARD, "default/test/0000.parquet": questions(0)}
    (tmp_path / "mine.yaml").write_text(TASK, encoding="utf-8")
    more = ("--tasks", str(tmp_path / "mine.yaml"))
    first, said = evaluate(model, tmp_path / "eval", hub, *more)
    ((name, record),) = first["data_sets"].items()
    assert name == "hf:acme/rows@refs/convert/parquet/default:test"
    assert (record["commit"], record["license"], record["files"]) == (SHA, "mit", 1)
    assert said.count("license mit") == 1, said
    assert f"`{SHA}`, mit." in (tmp_path / "eval" / "eval.md").read_text(encoding="utf-8")
    hub.files["default/test/0000.parquet"] = questions(1)
    hub.commit = LATER
    samples = (tmp_path / "eval" / "samples.jsonl").read_text(encoding="utf-8")
    again, said = evaluate(model, tmp_path / "eval", hub, *more)
    assert again["data_sets"] == first["data_sets"] and LATER not in said
    assert (tmp_path / "eval" / "samples.jsonl").read_text(encoding="utf-8") == samples
    anew, _ = evaluate(model, tmp_path / "eval", hub, *more, "--resume", "never")
    assert anew["data_sets"][name]["commit"] == LATER
    assert (tmp_path / "eval" / "samples.jsonl").read_text(encoding="utf-8") != samples


def test_a_damaged_record_is_refused(model: Path, tmp_path: Path, hub: Hub) -> None:
    out = tmp_path / "eval"
    out.mkdir()
    (out / "eval_datasets.json").write_text('{"hf:acme/rows": {}}', encoding="utf-8")
    with pytest.raises(AssertionError, match="is damaged, and tells which commits") as caught:
        evaluate(model, out, hub, "--data.valid", "hf:acme/rows")
    assert "--resume never" in str(caught.value)
    evaluate(model, out, hub, "--data.valid", "hf:acme/rows", "--resume", "never")
