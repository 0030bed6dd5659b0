"""The report page: what it says, what it leaves out, and that nothing a model wrote can break it."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.pipeline import PipelineJob, PipelineStage
from anabatic.core.cpu_info import parse_cpuinfo
from anabatic.core.errors import Failure
from anabatic.train.report import run_facts
from anabatic.train.report.page import write_pipeline_report, write_run_report
from suite.fake_runs import (
    EVAL_RESULTS,
    HOSTILE_TEXT,
    START_TIME,
    write_jsonl,
    write_pipeline_run,
    write_training_run,
)
from unit.train.report_pages import Page


@pytest.fixture
def demo(tmp_path: Path) -> tuple[Path, PipelineJob]:
    out = tmp_path / "demo"
    return out, write_pipeline_run(out, steps=80)


def test_a_pipeline(demo: tuple[Path, PipelineJob]) -> None:
    out, job = demo
    path = write_pipeline_report(out, job)
    assert path == out / "report.html"
    page = Page(path)
    for words in (
        "From text to a chatting model",
        "5m36s",
        "Bits per byte lower is better 1.712 17% fewer bits than gzip -9 this model 1.712 gzip -9 2.064",
        "402.7 KiB of held-out text · measured in eval",
        "spelling 94.5% baseline 0.4%",
        "parameters 6.8M training tokens 974.8K optimizer steps 119",
        "peak memory 1.5 GiB",
        "base Pretraining on the standard library's sources ✓ done 3m24s 655.4K 2.010 held-out",
        "chat A short conversation ✓ done 3.2s – –",
        "✕ wrong What is 48 + 35? 73 expected 83",
        "✓ right 你是谁? 我是 anabatic。",
        "identity 99.0% baseline 25.0% · 100 questions",
        "assistant 你好!",
        'train: ["stdlib:"]',
        "+1m31s skip step 41, reason gradient norm not finite",
        "tokenizer · Configuration vocab_size: 4096",
        "accelerator none, trained on the processor",
        "number format bf16",
        "Python",
    ):
        assert words in page.text, words
    titles = [value for _, name, value in page.attributes if name == "aria-label"]
    assert sum(title.startswith("Loss, nats per token, steps 1 to") for title in titles) == 3
    assert len(page.charts()) == 3 * 7 + 1
    assert [series["name"][0] for series in page.charts()[0]] == [
        "training, measured",
        "training, smoothed",
        "held out",
    ]


def test_nothing_is_loaded_from_elsewhere(demo: tuple[Path, PipelineJob]) -> None:
    page = Page(write_pipeline_report(*demo))
    for tag, name, value in page.attributes:
        if name in ("src", "srcset", "action", "data", "poster"):
            pytest.fail(f"<{tag} {name}={value!r}>")
        if name == "href":
            assert value.startswith(("#", "data:")), value
    assert "@import" not in page.source and "url(" not in page.source
    assert re.findall(r"https?://[^'\"\s]+", page.source) == ["http://www.w3.org/2000/svg"]
    anchors = {value for _, name, value in page.attributes if name == "id"}
    links = {value[1:] for _, name, value in page.attributes if name == "href" and value.startswith("#")}
    assert links <= anchors


def test_one_run(tmp_path: Path) -> None:
    write_training_run(tmp_path / "base", steps=60)
    page = Page(write_run_report(tmp_path / "base"))
    assert "parameters 6.8M training tokens 491.5K optimizer steps 60" in page.text
    assert page.text.count("optimizer steps") == 1
    assert "Configuration out: runs/demo/base" in page.text


def test_what_the_devices_did(tmp_path: Path) -> None:
    write_training_run(tmp_path, steps=60)
    assert "energy" not in Page(write_run_report(tmp_path)).text
    figures = {
        "device_util_pct_mean": 80.0,
        "device_util_pct_min": 60,
        "device_util_pct_max": 99,
        "device_power_w_mean": 310.0,
    }
    write_jsonl(
        tmp_path / "metrics.jsonl", [{"step": step, "kind": "train", "loss": 1.0, **figures} for step in range(1, 9)]
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary |= {"device_util_pct": 81.6, "device_power_w": 305.0, "energy_wh_per_mtoken": 12.34}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = Page(write_run_report(tmp_path))
    assert "device utilisation 82 % device power 305 W energy per million tokens 12.3 Wh" in page.text
    assert "Device utilisation: mean, least, most" in page.text and "Device power" in page.text


def hostile(folder: Path) -> None:
    """Put HOSTILE wherever a run holds text."""
    write_training_run(folder, steps=3)
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 3, "kind": "sample", "prompt": HOSTILE_TEXT, "text": HOSTILE_TEXT}) + "\n")
    events = [
        {"time": START_TIME, "event": HOSTILE_TEXT, "why": HOSTILE_TEXT},
        {"event": "device", "name": HOSTILE_TEXT, "type": "x"},
    ]
    write_jsonl(folder / "events.jsonl", events)
    (folder / "config.yaml").write_bytes(b"a: </pre><script>window.stolen = 1</script>\xff\x1b\n")
    write_jsonl(
        folder / "chat.jsonl",
        [{"role": HOSTILE_TEXT, "content": HOSTILE_TEXT}, {"role": "user", "content": [HOSTILE_TEXT]}],
    )
    example = {"prompt": HOSTILE_TEXT, "reply": HOSTILE_TEXT, "answer": HOSTILE_TEXT, "correct": False}
    task = {"accuracy": 0.5, "chance": 0.1, "n": 2, "examples": [example]}
    (folder / "eval.json").write_text(json.dumps({"tasks": {HOSTILE_TEXT: task}}), encoding="utf-8")


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    hostile(tmp_path / "stage")
    job = PipelineJob(title=HOSTILE_TEXT, stages={"stage": PipelineStage(command="sft", title=HOSTILE_TEXT)})
    page = Page(write_pipeline_report(tmp_path, job))
    code = [text for kind, text in page.scripts if kind != "application/json"]
    assert len(code) == 1
    digest = base64.b64encode(hashlib.sha256(code[0].encode()).digest()).decode()
    policy = next(value for tag, name, value in page.attributes if name == "content" and "default-src" in value)
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]", page.source)
    shown = "</pre><script>window.stolen = 1</script>\\x1b[31m\\x00 \ufffd <|im_end|>"
    assert page.text.count(shown) >= 10


def test_a_pipeline_that_has_not_run(tmp_path: Path) -> None:
    job = PipelineJob(stages={"base": PipelineStage(command="pretrain"), "chat": PipelineStage(command="chat")})
    page = Page(write_pipeline_report(tmp_path, job))
    assert tmp_path.name in page.text
    assert "base pretrain ○ not run – – – chat chat ○ not run – – –" in page.text
    assert "Results" not in page.source and page.charts() == []


def test_an_empty_run(tmp_path: Path) -> None:
    assert "processor" in Page(write_run_report(tmp_path)).text


def event(stage: str, state: str, time: float, seconds: float | None = None) -> dict[str, Any]:
    row = {"time": START_TIME + time, "event": "stage", "stage": stage, "state": state}
    return row if seconds is None else {**row, "seconds": seconds}


def test_states_of_stages(tmp_path: Path) -> None:
    rows = [
        event("a", "run", 0),
        event("a", "done", 5, 5.0),
        event("b", "run", 5),
        event("b", "interrupted", 25, 20.0),
        event("a", "skip", 30),
        event("b", "run", 30),
        event("b", "done", 40, 10.0),
        event("c", "run", 40),
        event("c", "fail", 43, 3.0),
        event("d", "skip", 44),
        event("e", "run", 50),
        event("unknown", "done", 50, 1.0),
    ]
    write_jsonl(tmp_path / "pipeline.jsonl", rows)
    job = PipelineJob(stages={name: PipelineStage(command=f"do {name}") for name in "abcde"})
    text = Page(write_pipeline_report(tmp_path, job)).text
    for words in (
        "a do a ✓ up to date 5.0s",
        "b do b ✓ done 30.0s",
        "c do c ✕ failed 3.0s",
        "d do d ○ not run –",
        "e do e … unfinished –",
        "38.0s",
    ):
        assert words in text, words


def test_one_point_and_numbers_that_are_none(tmp_path: Path) -> None:
    rows = [
        {"step": 5, "kind": "train", "loss": 3.25, "lr": 0.0, "grad_norm": None, "tokens_per_s": 100.0},
        {"step": "six", "kind": "train", "loss": 1.0},
        {"kind": "train", "loss": 1.0},
        {"step": 6, "kind": "train", "loss": True},
        {"step": 6, "kind": "eval", "valid_loss": float("nan"), "valid_bpb": "?"},
    ]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('[1]\n{"step": 7, "ki')
    page = Page(write_run_report(tmp_path))
    assert page.charts() == []
    for words in ("Loss, nats per token 3.25 training, after step 5", "Learning rate 0 learning rate, after step 5"):
        assert words in page.text
    assert "Tokens per second 100 measured, after step 5" in page.text
    assert "NaN" not in page.source and "Infinity" not in page.source


@pytest.mark.parametrize("content", ["{", "[]", "", "\x00", '{"tasks": 3, "bits_per_byte": {"model": "x"}}'])
def test_a_broken_evaluation(tmp_path: Path, content: str) -> None:
    (tmp_path / "eval.json").write_text(content)
    text = Page(write_run_report(tmp_path)).text
    assert ("eval.json is left out" in text) == (not content.startswith("{") or len(content) == 1)


def test_an_odd_evaluation(tmp_path: Path) -> None:
    task = {"accuracy": None, "chance": 1.5, "n": "many", "examples": [3, {"prompt": ["x"], "reply": None}]}
    bits = {"model": 2.5, "gzip9": None}
    (tmp_path / "eval.json").write_text(json.dumps({"bits_per_byte": bits, "tasks": {"t": task, "u": 4}}))
    text = Page(write_run_report(tmp_path)).text
    assert "t – baseline 150.0%" in text and "2.500" in text and '✕ wrong ["x"] null expected' in text


def test_pictures_of_questions_are_drawn_from_the_page_alone(tmp_path: Path) -> None:
    good = "data:image/png;base64," + base64.b64encode(b"picture").decode()
    given = [good, "https://example.org/a.png", 'data:image/png;base64,A" onerror="x', "data:text/html;base64,AAAA", 3]
    examples = [{"prompt": "What?", "reply": "it", "answer": "it", "correct": True, "picture": one} for one in given]
    task = {"accuracy": 0.75, "without_picture": 0.25, "chance": 0.2, "n": 5, "examples": examples}
    (tmp_path / "eval.json").write_text(json.dumps({"tasks": {"colour": task}}))
    page = Page(write_run_report(tmp_path))
    assert [value for tag, name, value in page.attributes if tag == "img" and name == "src"] == [good]
    assert "75.0% baseline 20.0% · without pictures 25.0%" in page.text


def test_the_last_evaluation_leads(tmp_path: Path) -> None:
    job = PipelineJob(stages={"early": PipelineStage(command="eval"), "late": PipelineStage(command="eval")})
    for name, model in (("early", 2.5), ("late", 1.5)):
        values = {**EVAL_RESULTS, "bits_per_byte": {"model": model, "gzip9": 2.0, "bytes": 10, "tokens": 3}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.json").write_text(json.dumps(values))
    text = Page(write_pipeline_report(tmp_path, job)).text
    assert "1.500 25% fewer bits than gzip -9" in text and "measured in late" in text
    (tmp_path / "late" / "eval.json").unlink()
    assert "2.500 25% more bits than gzip -9" in Page(write_pipeline_report(tmp_path, job)).text


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    write_training_run(tmp_path, steps=20_000)
    write_jsonl(tmp_path / "events.jsonl", [{"time": START_TIME, "event": "checkpoint", "step": i} for i in range(999)])
    path = write_run_report(tmp_path)
    page = Page(path)
    assert path.stat().st_size < 400_000
    assert max(len(series["x"]) for chart in page.charts() for series in chart) <= 800
    assert "799 earlier events are in events.jsonl" in page.text


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chat.jsonl", [{"role": "assistant", "content": "x" * 5000}])
    assert "x … (1,000 characters more)" in Page(write_run_report(tmp_path)).text


def test_an_older_report_survives_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run_report(tmp_path).write_text("old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Failure, match="no space left"):
        write_run_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_names_of_processors() -> None:
    assert (
        run_facts.describe_cpu_name(parse_cpuinfo("model name\t: Intel(R) Xeon(R)  Gold 6\nmodel name: x\n"))
        == "Intel Xeon Gold 6"
    )
    arm = "processor\t: 0\nCPU implementer\t: 0x48\nCPU part\t: 0xd01\n"
    assert run_facts.describe_cpu_name(parse_cpuinfo(arm)) == "HiSilicon Kunpeng-920 (TaiShan v110)"
    assert run_facts.describe_cpu_name({})


def test_commit(tmp_path: Path) -> None:
    assert run_facts.find_commit(tmp_path) is None

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "tracked").mkdir()
    (tmp_path / "ignored").mkdir()
    (tmp_path / "tracked" / "file").write_text("1")
    git("add", "tracked/file")
    git("commit", "-m", "first")
    assert (commit := run_facts.find_commit(tmp_path / "tracked")) and re.fullmatch(r"[0-9a-f]{10}", commit.zh)
    assert run_facts.find_commit(tmp_path / "ignored") is None
    (tmp_path / "tracked" / "file").write_text("2")
    commit = run_facts.find_commit(tmp_path / "tracked")
    assert commit and commit.en.endswith(" + changes") and commit.zh.endswith("（有未提交的改动）")
