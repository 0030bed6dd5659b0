"""The page that compares runs, and the command that writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.cli.report import report
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, Failure
from anabatic.train.report.comparison import compare_runs
from anabatic.train.report.comparison_page import choose_names, write_comparison
from anabatic.train.report.run_data import read_run
from unit.fake_runs import HOSTILE_TEXT, write_jsonl
from unit.train.report_pages import Page


def write_run(folder: Path, lr: float = 0.1, loss: float = 2.0, steps: int = 30, **more: Any) -> Path:
    """Write a run whose held-out loss ends at `loss`."""
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"step": step, "kind": "train", "loss": loss + 3 / step, "lr": lr, "tokens": 10 * step}
        for step in range(1, steps + 1)
    ]
    rows += [{"step": step, "kind": "eval", "valid_loss": loss + 1 / step} for step in range(10, steps + 1, 10)]
    write_jsonl(folder / "metrics.jsonl", rows)
    (folder / "config.yaml").write_text(f"out: {folder.name}\noptim:\n  lr: {lr}\n", encoding="utf-8")
    sources = more.get("sources") or {"train": [{"source": "a.txt", "kind": "text"}]}
    write_jsonl(folder / "events.jsonl", [{"event": "start"}, {"event": "data", **sources}])
    return folder


def read_sources(folder: Path) -> dict[str, Any]:
    """What a run says of its data."""
    return list(json_reader.read_json_lines(folder / "events.jsonl"))[-1]


def compare(folders: list[Path], tmp_path: Path, language: Any = "en") -> Page:
    return Page(write_comparison(folders, tmp_path / "c.html", language))


def test_settings_figures_and_curves(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", 0.1, 2.0), write_run(tmp_path / "two", 0.2, 1.5)]
    page = compare(runs, tmp_path)
    assert "2 runs compared" in page.text
    assert "held-out loss, lowest 2.033 1.533 best" in page.text
    assert "training loss, last 2.100 1.600 held-out" in page.text and "optimizer steps 30 30" in page.text
    assert "optim.lr 0.1 0.2" in page.text and " out " not in page.text
    assert [series["name"] for series in page.charts()[0]] == [["one", "one"], ["two", "two"]]
    assert [series["colour"] for series in page.charts()[0]] == [11, 12]
    labels = [value for _, name, value in page.attributes if name == "aria-label"]
    assert any(label.startswith("Held-out loss, nats per token, last values: one 2.033") for label in labels)
    assert page.text.count("Training: plain text of a.txt.") == 1


def test_no_best_where_runs_share_it(tmp_path: Path) -> None:
    page = compare([write_run(tmp_path / "one"), write_run(tmp_path / "two")], tmp_path)
    assert " best" not in page.text and "All settings are the same." in page.text


def test_damaged_runs_are_named_and_do_not_spoil_the_others(tmp_path: Path) -> None:
    torn, empty = tmp_path / "torn", tmp_path / "empty"
    for folder in (torn, empty):
        folder.mkdir()
    (torn / "metrics.jsonl").write_text('{"step": 1, "lo')
    (torn / "config.yaml").write_text("[")
    (torn / "summary.json").write_bytes(b"\xff{")
    (empty / "config.yaml").write_text("")
    page = compare([torn, write_run(tmp_path / "good"), empty], tmp_path)
    for words in ("torn has written no metrics", "torn has no readable config.yaml", "empty has written no metrics"):
        assert words in page.text
    assert "torn summary.json is left out" in page.text
    assert "training loss, last – 2.100 –" in page.text
    assert "The settings of fewer than two runs are known." in page.text
    assert len(page.charts()[0]) == 1
    nothing = compare([torn, empty], tmp_path)
    assert "None of the runs has written any metrics." in nothing.text and nothing.charts() == []


def test_one_value_each_is_a_figure(tmp_path: Path) -> None:
    page = compare([write_run(tmp_path / name, loss=2.0, steps=1) for name in ("one", "two")], tmp_path)
    assert page.charts() == []
    assert "Learning rate 0.1 one, after step 1 0.1 two, after step 1" in page.text


def test_eight_runs_with_hostile_and_long_names(tmp_path: Path) -> None:
    names = [
        "<img src=x onerror=alert(1)>",
        "n" * 250,
        "{name}",
        "</script>".replace("/", "∕"),
        "名",
        " ",
        "'\"&",
        "\x1b[31m",
    ]
    runs = [write_run(tmp_path / name, lr=at) for at, name in enumerate(names)]
    page = compare(runs, tmp_path)
    assert "<img" not in page.source
    assert "\x1b" not in page.source and len(page.charts()[0]) == 8
    assert {series["name"][0] for series in page.charts()[0]} == set(names)
    (runs[0] / "config.yaml").write_text(json.dumps({"data": HOSTILE_TEXT.replace("\ud800", "")}))
    assert compare(runs[:2], tmp_path).source.count("<script>") == 1
    more = write_run(tmp_path / "ninth")
    with pytest.raises(ConfigError, match="9 runs, at most 8"):
        write_comparison([*runs, more], tmp_path / "d.html")
    assert not (tmp_path / "d.html").exists()


def test_names_tell_the_runs_apart(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "base", tmp_path / "b" / "base", tmp_path / "sft"]
    assert choose_names(folders) == ["a/base", "b/base", "sft"]


def test_heldout_data_that_differ_are_said_to(tmp_path: Path) -> None:
    text, chat = {"source": "a.txt", "kind": "text"}, {"source": "a.jsonl", "kind": "conversations"}
    one = write_run(tmp_path / "one", sources={"train": [text], "heldout": [text], "heldout_fraction": 0.1})
    two = write_run(tmp_path / "two", sources={"train": [text], "heldout": [chat]})
    same = write_run(tmp_path / "same", sources={"train": [text], "heldout": [text], "heldout_fraction": 0.1})
    page = compare([one, two], tmp_path)
    assert "The runs name different held-out data" in page.text
    assert page.text.count("are of another kind than the training data") == 1
    assert "Held out: 10 % of them." in page.text and "Held out: conversations of a.jsonl." in page.text
    assert "different held-out" not in compare([one, same], tmp_path).text
    lower = [
        write_run(tmp_path / f"lower-{at}", loss=1.0, sources=read_sources(one)) for at, one in enumerate([one, two])
    ]
    for other, best in zip(lower, (1, None), strict=True):
        figures = {row.name: row.best for row in compare_runs([read_run(one, "one"), read_run(other, "other")]).figures}
        assert figures["valid_loss"] == best


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    report(Path("one"), lang="zh")
    assert capsys.readouterr().out == "one/report.html\n" and '<html lang="zh">' in (one / "report.html").read_text()
    report(one, two, lang="en")
    assert capsys.readouterr().out == "comparison.html\n"
    assert '<html lang="en">' in Path("comparison.html").read_text()
    report(one, two, out="new/c.html")
    assert Path("new/c.html").is_file()
    report(one, out=str(tmp_path))
    assert (tmp_path / "report.html").is_file()


def test_what_the_command_refuses(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    write_run(tmp_path / "pipeline" / "base")
    (tmp_path / "link").symlink_to(one)
    for folders, message, hint in (
        ([], "no run is named", "anabatic report runs/one runs/two"),
        ([one, one], "are the same run", "name each run once"),
        ([one, tmp_path / "link"], "are the same run", "name each run once"),
        ([one, tmp_path / "none"], "is not a folder", "name the folder of a run"),
        ([tmp_path / "pipeline"], "holds none of metrics.jsonl", "pipeline/base"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            report(*folders)
        assert hint in str(caught.value.hint)
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="cannot write"):
        report(one, out=str(tmp_path / "file" / "c.html"))
