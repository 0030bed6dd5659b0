"""What a report says about the data: the kinds of what was trained on and of what was held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.train.report.page import write_run_report
from unit.fake_runs import write_jsonl, write_training_run
from unit.train.report_pages import Page

TEXT, CHAT, PAIRS = ({"source": f"{kind}.x", "kind": kind} for kind in ("text", "conversations", "pairs"))
WARNING = "The held-out data are of another kind than the training data"


def write_page(tmp_path: Path, event: dict[str, Any] | None, config: str = "a: 1\n", bits: Any = None) -> str:
    write_training_run(tmp_path, steps=30)
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    write_jsonl(tmp_path / "events.jsonl", [] if event is None else [{"event": "data", **event}])
    if bits is not None:
        (tmp_path / "eval.json").write_text(
            json.dumps({"bits_per_byte": {"model": 1.5, "gzip9": 2.0, "sources": bits}})
        )
    return Page(write_run_report(tmp_path, "en")).text


@pytest.mark.parametrize(
    ("event", "sentence", "warned"),
    [
        ({"train": [TEXT]}, "Training: plain text of text.x.", False),
        (
            {"train": [TEXT], "heldout": [TEXT], "heldout_fraction": 0.02},
            "Training: plain text of text.x. Held out: 2 % of them.",
            False,
        ),
        (
            {"train": [CHAT], "heldout": [TEXT]},
            "Training: conversations of conversations.x. Held out: plain text of text.x.",
            True,
        ),
        (
            {"train": [TEXT, CHAT], "heldout": [TEXT]},
            "Training: plain text of text.x, conversations of conversations.x. Held out: plain text of text.x.",
            True,
        ),
        ({"train": [CHAT, PAIRS], "heldout": [PAIRS, CHAT]}, "Held out: preference pairs of pairs.x, conv", False),
        ({"train": [{"source": "b", "kind": "new"}], "heldout": [TEXT]}, "Training: b. Held out: plain text", False),
        ({"train": [{"source": f"{n}", "kind": "text"} for n in range(9)]}, "plain text of 3 and 5 more.", False),
        ({"train": [{"source": "p" * 300, "kind": "text"}]}, f"plain text of …{'p' * 60}.", False),
    ],
)
def test_sources_of_the_events(tmp_path: Path, event: dict[str, Any], sentence: str, warned: bool) -> None:
    text = write_page(tmp_path, event)
    assert sentence in text.replace("\u00a0", " ")
    assert (WARNING in text) is warned


@pytest.mark.parametrize("event", [{"train": "a"}, {"train": [1, {"source": 2}]}, {"train": []}, {"heldout": [TEXT]}])
def test_events_that_name_no_source(tmp_path: Path, event: dict[str, Any]) -> None:
    assert "Training: " not in write_page(tmp_path, event)


@pytest.mark.parametrize(
    ("config", "sentence", "warned"),
    [
        ("data: {train: [a.jsonl]}", "Training: a.jsonl.", False),
        ("data: {train: ['stdlib:'], valid: ['chat:en']}", "plain text of stdlib. Held out: conversations of", True),
        ("data: {train: a.txt, valid_fraction: 0.05}", "Training: a.txt. Held out: 5 % of them.", False),
    ],
)
def test_sources_of_the_settings_of_older_runs(tmp_path: Path, config: str, sentence: str, warned: bool) -> None:
    text = write_page(tmp_path, None, config)
    assert sentence in text.replace("\u00a0", " ")
    assert (WARNING in text) is warned


@pytest.mark.parametrize(
    ("bits", "sentence", "warned"),
    [
        ([TEXT], "held-out text: plain text of text.x · measured in", True),
        ([CHAT], "held-out text: conversations of conversations.x · measured in", False),
        (None, "held-out text · measured in", False),
        ("x", "held-out text · measured in", False),
    ],
)
def test_bits_per_byte_name_their_text(tmp_path: Path, bits: Any, sentence: str, warned: bool) -> None:
    text = write_page(tmp_path, {"train": [CHAT]}, bits=bits if bits is not None else [])
    assert sentence in text
    assert ("The model was last trained on another kind: conversations of conversations.x" in text) is warned
