"""Two machines whose cache has no shards yet tokenise together, then train as one machine would."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path

import psutil

from anabatic_testing.multiprocess import find_free_port
from e2e import command
from e2e.home import Home, Options

FEW: Options = {"schedule.max-steps": 6, "eval.tokens": 4096, "save.every": 0}


def write_rows(path: Path, text: str, broken_line: int = 0, number: int = 3000) -> Path:
    """Write more rows than one part holds (2 MiB)."""
    words = random.Random(0)
    rows = [text[start : start + 2000] for start in (words.randrange(len(text)) for _ in range(number))]
    lines = [json.dumps({"text": f"{row_number} {row}"}) for row_number, row in enumerate(rows)]
    if broken_line:
        lines[broken_line - 1] = "{broken"
    path.write_text("\n".join(lines))
    return path


def on_two_machines(home: Home, words: list[object], code: int, *options: object) -> list[command.Result]:
    at = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", find_free_port(), "--join-seconds", 120)
    started = [
        home.start("launch", *at, "--node-rank", number, "--nproc", 1, *options, "--", *words) for number in (1, 0)
    ]
    return [command.end(process, code) for process in reversed(started)]


def test_two_machines_tokenise_together_and_train_as_one(home: Home, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", home.text.read_text())
    alone, together = (dataclasses.replace(home, cache=tmp_path / name) for name in ("alone", "together"))
    alone.anabatic(*alone.pretrain(tmp_path / "one", 2, FEW | {"data.train": rows}))
    words = together.pretrain(tmp_path / "two", 1, FEW | {"data.train": rows})
    zero, one = on_two_machines(together, words, 0, "--hang-seconds", 60)
    assert "data " in zero.err and "data " not in one.err
    sets = [sorted((home.cache / "shards").iterdir()) for home in (alone, together)]
    assert [path.name for path in sets[0]] == [path.name for path in sets[1]] and len(sets[0]) == 2
    for built, expected in zip(*sets, strict=True):
        assert {file.name: file.read_bytes() for file in built.iterdir()} == {
            file.name: file.read_bytes() for file in expected.iterdir()
        }
    assert command.losses(tmp_path / "two") == command.losses(tmp_path / "one") != {}


def test_a_bad_row_is_reported_on_both_machines(home: Home, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", home.text.read_text(), 2900)
    own = dataclasses.replace(home, cache=tmp_path / "cache")
    for end in on_two_machines(own, own.pretrain(tmp_path / "run", 1, FEW | {"data.train": rows}), 2):
        assert re.search(r"^error: machine [01] \(.+\): .*rows.jsonl: line 2900: broken JSON", end.err, re.M), end.err
        assert "hint: write one JSON object a line" in end.err


def test_a_killed_tokenisation_continues_with_the_parts_that_are_missing(home: Home, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", home.text.read_text(), number=12_000)
    own = dataclasses.replace(home, cache=tmp_path / "cache")
    words = own.pretrain(tmp_path / "run", 2, FEW | {"data.train": rows, "data.valid-fraction": 0})
    process = own.start("launch", "--max-restarts", 1, "--", *words)
    shards = tmp_path / "cache" / "shards"
    command.wait_for(process, lambda: any(shards.glob(".*.parts/0*")))
    workers = psutil.Process(process.pid).children(recursive=True)
    next(one for one in workers if one.name() == "python rank 0").kill()
    said = command.end(process).err
    assert "all processes start again, restart 1 of 1" in said
    assert re.search(r"[1-9]\d* of \d+ parts are finished by an earlier start", said), said
    assert len(command.losses(tmp_path / "run")) == 6
    assert [path for path in shards.iterdir() if path.name.startswith(".")] == []
