"""`anabatic bench` as typed: what it refuses before anything is measured, and other programs beside ours."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from anabatic.bench import command_comparison
from anabatic.cli.app import main
from anabatic.core.errors import Failure


def run(words: list[str]) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    return int(caught.value.code or 0)


SFT = ["--", "sft", "--model", "nowhere", "--data", "rows.jsonl"]
COMPARE = ["compare", "--plot", "off", "--repeats", "2", "--warm-up", "0"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["train", "--steps", "0", *SFT], "steps is 0"),
        (["train", "--repeats", "0", *SFT], "repeats is 0"),
        (["train", "--warm-up", "-1", *SFT], "warm_up is -1"),
        (["train", "--length", "1", *SFT], "length is 1"),
        (["train", "--steps", "1.5", *SFT], "steps"),
        (["train", "--", "sft", "--model", "x"], "data.train is empty"),
        (["train", "--", "chat", "-m", "x"], "chat is not a command that trains"),
        (["train", "--length", "4096", *SFT], "length is 4096, and batch.seq_len 1024"),
        (["train", "--length", "64", "--", "rl", "--model", "x", "--data", "x", "--tokenizer", "x"], "rl"),
        (["train", *SFT, "--tokenizer", "synthetic:"], "is for pretrain alone"),
        (["scaling", "--npus", "1,x", *SFT], "npus is '1,x'"),
        (["scaling", "--npus", "0,1", *SFT], "npus is '0,1'"),
        (["scaling", "--nproc", "2,2", *SFT], "name each number once"),
        (
            ["scaling", "--npus", "1,2", *SFT, "--parallel.tensor", "2"],
            "parallel.tensor is 2, which does not divide 1 device",
        ),
        (["infer", "--new-tokens", "1"], "--new-tokens is 1"),
        (["infer", "--model", "nowhere-at-all"], "nowhere-at-all"),
        (["infer", "--quantize", "nf4", "--depth", "1"], "the weights are random"),
        (["infer", "--batching.max-len", "100"], "batching.max_len is 100, and a prompt with its answer has 192"),
        (["infer", "--device.nproc", "2"], "device.nproc is 2"),
        (["tokenize", "--mib", "0"], "mib is 0"),
        (["tokenize", "--tokenizer", "nowhere"], "no tokenizer in nowhere"),
        (["tokenize", "--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["collective", "--nproc", "1"], "one process exchanges nothing"),
        (["collective", "--mib", "0"], "mib is 0"),
        (["io", "--depth", "0"], "depth is 0"),
        (["io", "--batch-tokens", "10"], "--batch-tokens is 10"),
        ([*COMPARE, "--ours", "anabatic --version"], "which command?"),
        ([*COMPARE, "--", "true"], "ours is not given"),
        ([*COMPARE, "--ours", "anabatic --version", "--limit", "0", "--", "true"], "limit is 0"),
        ([*COMPARE, "--ours", "'torn", "--", "true"], "close the quotation marks"),
        ([*COMPARE, "--ours", "anabatic --version", "--figure", "(", "--", "true"], "is no regular expression"),
        ([*COMPARE, "--ours", "anabatic --version", "--figure", "x", "--", "true"], "has 0 groups"),
        ([*COMPARE, "--ours", "anabatic --version", "--", "no-such-program"], "there is no program no-such-program"),
        ([*COMPARE, "--ours", "anabatic --version", "--", "echo", "{data}"], "peer has {data}, and no data is given"),
        ([*COMPARE, "--ours", "anabatic --version", "--data", "x", "--", "echo", "{data}"], "ours has no {data}"),
        ([*COMPARE, "--ours", "show {data}", "--data", "x", "--", "echo", "{data}"], "data is x, which is not there"),
    ],
)
def test_what_cannot_be_measured(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *words]) == 2
    said = capsys.readouterr().err
    assert why in said and "hint: " in said and "Traceback" not in said
    assert not list(tmp_path.rglob("bench.json"))


@pytest.mark.process
def test_two_programs_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    peer = [
        sys.executable,
        "-S",
        "-c",
        "import sys; print('step 1 | 5 tok/s', 'at 1,250.5 tok/s', sys.argv[1])",
        "{out}",
    ]
    ours = [*COMPARE, "--out", "both", "--ours", "anabatic --version", "--figure", r"([\d.,]+)(?: tok/s|$)"]
    assert run(["bench", *ours, "--", *peer]) == 0
    shown = capsys.readouterr().out
    assert "wall time, peer / ours" in shown and "more than 1 speaks for ours" in shown
    figures = {one["name"]: one for one in json.loads(Path("both/bench.json").read_text())["figures"]}
    assert figures["printed, peer"]["values"] == [1250.5, 1250.5]
    ratio = figures["wall time, peer / ours"]["values"]
    walls = [figures[f"wall time, {side}"]["values"] for side in ("peer", "ours")]
    assert ratio == [pytest.approx(a / b) for a, b in zip(*walls, strict=True)]
    assert all(value > 0 for one in figures.values() for value in one["values"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("950", 950),
        ("12.3K", 12_300),
        ("1,234.5", 1234.5),
        ("4.0M", 4e6),
        ("1.2 B", 1.2e9),
        ("2e3", 2000),
        ("7Kelvin", 7),
    ],
)
def test_a_shortened_number_counts_whole(text: str, value: float) -> None:
    """A log of ours says 12.3K tok/s."""
    said = f"step 1/2 | loss 5.7 | 1.0K tok/s\nstep 2/2 | loss 5.6 | {text} tok/s\n"
    assert command_comparison.extract_metric(
        "ours", said, re.compile(r"([\w.,]+(?: B)?) tok/s"), Path("log")
    ) == pytest.approx(value)


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit('out of luck')", "peer ended with exit code 1: out of luck"),
        ("pass", "peer printed nothing"),
        ("print('fast')", "peer printed nothing that fits"),
        ("print('0 tok/s')", "no number above 0"),
        ("import sys; print('\\x1b[31m' + 'x' * 9999); sys.exit(3)", "peer ended with exit code 3: ...xxx"),
    ],
)
def test_a_peer_that_fails_is_named(
    code: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*COMPARE, "--ours", "anabatic --version", "--figure", r"(\d\S*)"]
    assert run(["bench", *words, "--", sys.executable, "-S", "-c", code]) == 1
    said = capsys.readouterr().err
    assert why in said and "peer.log" in said and not list(tmp_path.rglob("bench.json"))
    assert "\x1b" not in said and len(said) < 1000


@pytest.mark.process
def test_a_peer_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"peer did not end within 0\.2 s") as caught:
        command_comparison.run_command("peer", ["sh", "-c", "sleep 100 & wait"], tmp_path, None, 0.2)
    assert "--limit" in caught.value.hint
