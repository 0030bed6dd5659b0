"""Evaluations on data sets of a hub: the commit of the first one is what every later one reads."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from e2e.hub_home import CARD, LATER, HubHome
from unit.hub.hub_server import SHA

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


@pytest.fixture
def hub_home(hub: HubHome) -> HubHome:
    hub.hold(texts("yes"))
    return hub


def evaluate(hub: HubHome, out: Path, *more: str, model: Path | None = None) -> tuple[dict[str, Any], str]:
    """Return eval.json, and what was said."""
    said = hub.anabatic("eval", model or hub.model, "--out", out, *more)
    return json.loads((out / "eval.json").read_text(encoding="utf-8")), said


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_repeated_evaluation_reads_the_text_of_the_first(tmp_path: Path, hub_home: HubHome, nproc: int) -> None:
    more = ("--data.valid", "hf:acme/rows", "--nproc", str(nproc))
    first, said = evaluate(hub_home, tmp_path / "eval", *more)
    assert said.count("license mit") == 1, said
    record = {"commit": SHA, "subset": "", "split": "train", "license": "mit", "files": 1}
    assert first["data_sets"] == {"hf:acme/rows": record | {"bytes": len(texts("yes"))}}
    hub_home.change("train.jsonl", texts("other"))
    again, said = evaluate(hub_home, tmp_path / "eval", *more)
    assert again == first
    assert LATER not in said
    anew, said = evaluate(hub_home, tmp_path / "eval", *more, "--resume", "never")
    assert anew["data_sets"]["hf:acme/rows"]["commit"] == LATER
    assert anew["bits_per_byte"] != first["bits_per_byte"]
    assert said.count("license mit") == 1, said
    after, _ = evaluate(hub_home, tmp_path / "eval", *more)
    assert after == anew


def test_the_training_decides_which_rows_are_held_out(tmp_path: Path, hub_home: HubHome) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("{}\n", encoding="utf-8")
    (run / "final_model").symlink_to(hub_home.model)
    record = {"hf:acme/rows": {"commit": SHA, "subset": "", "split": "train", "license": "mit"}}
    (run / "datasets.json").write_text(json.dumps(record), encoding="utf-8")
    evaluate(hub_home, tmp_path / "warm", "--data.valid", "hf:acme/rows")  # the cache knows this commit
    hub_home.change("train.jsonl", texts("other"))
    held_out = ("--data.train", "hf:acme/rows", "--data.valid-fraction", "0.2")
    for resume in ("auto", "never"):
        found, _ = evaluate(hub_home, tmp_path / "eval", *held_out, "--resume", resume, model=run)
        assert found["data_sets"]["hf:acme/rows"]["commit"] == SHA
    assert json.loads((run / "datasets.json").read_text(encoding="utf-8")) == record


def test_tasks_of_the_hub_keep_their_commit(tmp_path: Path, hub_home: HubHome) -> None:
    hub_home.hub.files = {"README.md": CARD, "default/test/0000.parquet": questions(0)}
    (tmp_path / "mine.yaml").write_text(TASK, encoding="utf-8")
    more = ("--tasks", str(tmp_path / "mine.yaml"))
    first, said = evaluate(hub_home, tmp_path / "eval", *more)
    ((name, record),) = first["data_sets"].items()
    assert name == "hf:acme/rows@refs/convert/parquet/default:test"
    assert (record["commit"], record["license"], record["files"]) == (SHA, "mit", 1)
    assert said.count("license mit") == 1, said
    assert f"`{SHA}`, mit." in (tmp_path / "eval" / "eval.md").read_text(encoding="utf-8")
    hub_home.change("default/test/0000.parquet", questions(1))
    samples = (tmp_path / "eval" / "samples.jsonl").read_text(encoding="utf-8")
    again, said = evaluate(hub_home, tmp_path / "eval", *more)
    assert again["data_sets"] == first["data_sets"] and LATER not in said
    assert (tmp_path / "eval" / "samples.jsonl").read_text(encoding="utf-8") == samples
    anew, _ = evaluate(hub_home, tmp_path / "eval", *more, "--resume", "never")
    assert anew["data_sets"][name]["commit"] == LATER
    assert (tmp_path / "eval" / "samples.jsonl").read_text(encoding="utf-8") != samples


def test_a_damaged_record_is_refused(tmp_path: Path, hub_home: HubHome) -> None:
    out = tmp_path / "eval"
    out.mkdir()
    (out / "eval_datasets.json").write_text('{"hf:acme/rows": {}}', encoding="utf-8")
    with pytest.raises(AssertionError, match="is damaged, and tells which commits") as caught:
        evaluate(hub_home, out, "--data.valid", "hf:acme/rows")
    assert "--resume never" in str(caught.value)
    evaluate(hub_home, out, "--data.valid", "hf:acme/rows", "--resume", "never")
