"""Run folders as the page of runs gets them, however damaged or long."""

from __future__ import annotations

import os
import time

import pytest

from anabatic.core import json_reader
from anabatic.monitor import run_data
from anabatic_studio import run_browser
from anabatic_studio.run_browser import RunBrowser
from suite.fake_runs import HOSTILE_TEXT, write_jsonl, write_training_run


def only(found):
    (row,) = found.list_runs()["runs"]
    return row["id"]


def test_runs_are_found_and_folders_that_are_none_are_not(tmp_path):
    for name in ("a", "group/b", "a/checkpoint-3/x", ".trash/c", "one/two/three/four/five/deep"):
        write_training_run(tmp_path / name, steps=5)
    (tmp_path / "empty").mkdir()
    os.symlink(tmp_path / "a", tmp_path / "linked")
    found = RunBrowser(tmp_path).list_runs()
    assert sorted(row["name"] for row in found["runs"]) == ["a", "group/b"]
    assert {row["state"] for row in found["runs"]} == {"dead"}
    assert {row["step"] for row in found["runs"]} == {5}


def test_the_latest_are_shown_when_there_are_many(tmp_path, monkeypatch):
    monkeypatch.setattr(run_browser, "MAX_RUNS", 2)
    for age, name in enumerate(("c", "a", "b")):
        write_jsonl(tmp_path / name / "metrics.jsonl", [{"step": 1, "kind": "train", "time": time.time() - age}])
        os.utime(tmp_path / name / "metrics.jsonl", (1000 - age, 1000 - age))
    found = RunBrowser(tmp_path).list_runs()
    assert [row["name"] for row in found["runs"]] == ["c", "a"]
    assert found["left_out"] == 1


@pytest.mark.parametrize("key", ["", "..", "a", "../a", "0" * 12, "%2e%2e"])
def test_nothing_that_is_asked_becomes_a_path(tmp_path, key):
    write_training_run(tmp_path / "a", steps=5)
    found = RunBrowser(tmp_path)
    found.list_runs()
    for ask in (found.get_curves, found.get_details, found.render_report, lambda key: found.read_log(key, 0)):
        with pytest.raises(KeyError):
            ask(key)


def test_curves_are_those_of_the_file_and_come_once(tmp_path):
    write_training_run(tmp_path / "a", steps=50)
    found = RunBrowser(tmp_path)
    key = only(found)
    answer = found.get_curves(key)
    rows = list(json_reader.read_json_lines(tmp_path / "a" / "metrics.jsonl"))
    loss = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    steps, values = answer["curves"]["loss"]["points"]
    assert steps == list(loss)
    assert values == pytest.approx(list(loss.values()), rel=1e-5)
    times = answer["curves"]["time"]["points"][1]
    assert times[:2] == pytest.approx([0, 0.34], abs=1e-3)
    assert "curves" not in found.get_curves(key, answer["version"])
    with open(tmp_path / "a" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 51, "kind": "train", "loss": 1.25}\n{"step": 52, "kind": "tr')
    new = found.get_curves(key, answer["version"])
    assert new["curves"]["loss"]["points"][0][-1] == 51
    # A run that continues from a checkpoint writes its rows anew.
    write_jsonl(tmp_path / "new.jsonl", [{"step": 1, "kind": "train", "loss": None}])
    (tmp_path / "new.jsonl").replace(tmp_path / "a" / "metrics.jsonl")
    assert found.get_curves(key, new["version"])["curves"] == {
        "loss": {"points": [[1], [None]], "smooth": [[1], [None]]}
    }


def test_a_long_file_is_read_in_pieces_and_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(run_browser, "MAX_READ_BYTES", 1 << 18)
    rows = (
        {"step": step, "kind": "train", "loss": 100.0 if step == 17_001 else 2.0 + step % 7} for step in range(20_000)
    )
    write_jsonl(tmp_path / "a" / "metrics.jsonl", rows)
    found = RunBrowser(tmp_path)
    key = only(found)
    answer, asked = found.get_curves(key), 1
    assert 0 < answer["share"] < 0.5
    while answer["share"] < 1:
        answer, asked = found.get_curves(key, answer["version"]), asked + 1
    assert asked == -(-(tmp_path / "a" / "metrics.jsonl").stat().st_size // (1 << 18))
    steps, values = answer["curves"]["loss"]["points"]
    assert len(steps) <= run_browser.MAX_CURVE_POINTS + 4
    assert (steps[0], steps[-1], max(values)) == (0, 19_999, 100.0)
    assert steps[values.index(100.0)] == 17_001
    assert found.get_details(key)["samples"] == []


def test_damaged_files_leave_the_rest(tmp_path):
    folder = tmp_path / "a"
    write_training_run(folder, steps=20)
    for name in ("metrics.jsonl", "events.jsonl", "summary.json", "eval.json"):
        with open(folder / name, "ab") as file:
            file.write(b'\n\xff\x00[[[{"step": 1e999}\n{"step": {}, "kind": []}\n' + b"[" * 5000 + b"\n")
            file.write(b'{"kind": "train", "loss": 1, "step": 1' + b"0" * 400 + b"}\n")
    write_jsonl(folder / "chat.jsonl", [{"role": HOSTILE_TEXT}])
    (folder / "checkpoint-20").mkdir()
    (folder / "rank-0.log").write_bytes(b"old\n" + b"x" * run_data.MAX_LOG_BYTES + b"\nlast \xff\n")
    os.symlink("/etc/passwd", folder / "rank-1.log")
    found = RunBrowser(tmp_path)
    key = only(found)
    assert len(found.get_curves(key)["curves"]["loss"]["points"][0]) == 20
    about = found.get_details(key)
    assert "summary.json is left out" in about["notes"][0]
    assert [(row["whole"], row["best"]) for row in about["checkpoints"]] == [(False, True)]
    assert about["checkpoints"][0]["path"].endswith("a/checkpoint-20")
    assert [row["rank"] for row in about["logs"]] == [0]
    assert found.read_log(key, 0) == "last \ufffd\n"
    with pytest.raises(KeyError):
        found.read_log(key, 1)
    assert found.render_report(key).startswith("<!doctype html>")


def test_a_folder_that_goes_away_is_no_longer_listed(tmp_path):
    write_training_run(tmp_path / "a", steps=5)
    found = RunBrowser(tmp_path)
    only(found)
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    (tmp_path / "a").rmdir()
    found._scanned_at = float("-inf")
    assert found.list_runs() == {"runs": [], "left_out": 0}


def test_pipes_links_and_folders_in_the_place_of_files(tmp_path):
    root, secret = tmp_path / "runs", tmp_path / "secret"
    secret.write_text("root:x:0:0\n", encoding="utf-8")
    write_training_run(root / "a", steps=5)
    for name in ("metrics.jsonl", "config.yaml", "summary.json", "eval.json", "chat.jsonl"):
        (root / "a" / name).unlink(missing_ok=True)
        os.mkfifo(root / "a" / name)
    write_training_run(root / "b", steps=5)
    (root / "b" / "config.yaml").unlink(missing_ok=True)
    os.symlink(secret, root / "b" / "config.yaml")
    (root / "b" / "rank-1.log").mkdir()
    (root / "b" / "summary.json").write_text("[" * 100_000, encoding="utf-8")
    (root / "c").mkdir()
    (root / "c" / "metrics.jsonl").touch()
    found = RunBrowser(root)
    for row in found.list_runs()["runs"]:
        told = (found.get_curves(row["id"]), found.get_details(row["id"]), found.render_report(row["id"]))
        assert told[0]["share"] == 1.0, row["name"]  # or the page would ask for the rest for ever
        assert "root:x" not in str(told)
    assert {row["name"] for row in found.list_runs()["runs"]} == {"a", "b", "c"}
