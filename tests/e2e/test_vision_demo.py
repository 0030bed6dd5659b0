"""`anabatic run vision_demo`, tiny: pictures, tokenizer, model, training, answers, score and report."""

from __future__ import annotations

import base64
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from anabatic.core import json_reader
from e2e.home import Home

pytestmark = pytest.mark.process
SMALL = """
out: {out}
stages:
  pictures: {{job: {{train: 160, held_out: 30, side: 32}}}}
  tokenizer: {{job: {{vocab_size: 300}}}}
  untrained: {{job: {{depth: 1, width: 32, tower_depth: 2, tower_width: 32}}}}
  sft: {{job: {{schedule: {{minutes: null, max_steps: 40}}, device: {{type: {device}, threads: 1}}}}}}
  seen: {{job: {{device: {{type: {device}, threads: 1}}}}}}
  unseen: {{job: {{device: {{type: {device}, threads: 1}}}}}}
  score: {{job: {{show: 3}}}}
"""
KINDS = ("colour", "shape", "count", "digit", "bars")


def read_rows(path: Path) -> list[dict[str, Any]]:
    return list(json_reader.read_json_lines(path))


def test_a_model_that_sees_from_nothing_to_the_report(home: Home, tmp_path: Path) -> None:
    out, small = tmp_path / "run", tmp_path / "small.yaml"
    small.write_text(SMALL.format(out=out, device=home.device))
    told = home.anabatic("run", "vision_demo", small)
    states = {row["stage"]: row["state"] for row in read_rows(out / "pipeline.jsonl") if row["event"] == "stage"}
    names = ["pictures", "tokenizer", "untrained", "sft", "seen", "unseen", "score"]
    assert states == dict.fromkeys(names, "done")

    asked, seen, unseen = (
        read_rows(out / name) for name in ("pictures/held_out.jsonl", "seen/answers.jsonl", "unseen/answers.jsonl")
    )
    assert len(asked) == len(seen) == len(unseen) == 30
    assert all("images" in row for row in seen) and not any("images" in row for row in unseen)
    tasks = json.loads((out / "score" / "eval.json").read_text())["tasks"]
    assert tuple(tasks) == KINDS
    for kind, task in tasks.items():
        mine = [index for index, row in enumerate(asked) if row["category"] == kind]
        right = [asked[index]["messages"][1]["content"] for index in mine]
        for key, answers in (("accuracy", seen), ("without_picture", unseen)):
            replies = [answers[index]["response"].strip() for index in mine]
            assert task[key] == sum(map(str.__eq__, replies, right)) / 6
        assert (task["n"], task["chance"]) == (6, max(Counter(right).values()) / 6)
        assert [example["reply"] for example in task["examples"]] == [seen[i]["response"].strip() for i in mine[:3]]

    page = (out / "report.html").read_text()
    shown = re.findall(r'<img class="picture" src="data:image/png;base64,([^"]+)"', page)
    pictures = [Image.open(io.BytesIO(base64.b64decode(one))).tobytes() for one in shown]
    drawn = [Image.open(out / "pictures" / row["images"][0]).tobytes() for row in asked[:15]]
    assert len(pictures) == 15 and sorted(pictures) == sorted(drawn)
    for task in tasks.values():
        assert f"without pictures {task['without_picture']:.1%}" in page and f"{task['accuracy']:.1%}" in page
    assert f"{tasks['digit']['accuracy']:7.1%}" in told.out

    again = home.anabatic("run", "vision_demo", small)
    assert again.err.count("skipped, done and unchanged") == len(names)


def test_answers_to_other_rows_are_refused(home: Home, tmp_path: Path) -> None:
    home.anabatic("vision", "draw", "--out", tmp_path, "--train", 1, "--held-out", 2, "--side", 32)
    labels = [row["messages"][1]["content"] for row in read_rows(tmp_path / "held_out.jsonl")]
    for name, given in (("right", labels), ("turned", labels[::-1]), ("short", labels[:1])):
        lines = [json.dumps({"response": "red", "label": label}) + "\n" for label in given]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    rows = tmp_path / "held_out.jsonl"
    score = ("vision", "score", "--rows", rows, "--out", tmp_path, "--answers")
    turned = home.anabatic(*score, tmp_path / "turned.jsonl", "--without", tmp_path / "right.jsonl", code=2)
    assert "line 1 answers another row" in turned.err
    short = home.anabatic(*score, tmp_path / "right.jsonl", "--without", tmp_path / "short.jsonl", code=2)
    assert "has 2 rows" in short.err
    assert not (tmp_path / "eval.json").exists()
