"""A run that was killed or interrupted continues as if nothing had happened, to the last bit."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from anabatic.core import json_reader
from e2e import command
from e2e.home import STEPS, Home

ROWS = {"log.rows": True}
MISALIGNED = {"log.every": 3}
"""Rows at steps that are no checkpoint's: each is a mean that a checkpoint cuts in two."""


ENDS = ((signal.SIGTERM, 143), (signal.SIGKILL, -9), (signal.SIGUSR1, 143), (signal.SIGINT, 130))
"""Signals and exit codes: schedulers expect 0 of a job that saved itself."""


@pytest.fixture(scope="module")
def killed(home: Home) -> Path:
    """A run folder left by `kill -9` at some step that is not the first nor the last checkpoint."""
    out = home.root / "killed"
    process = home.start(*home.pretrain(out, more=ROWS))
    command.interrupt(process, out, command.draw("killed").randint(11, STEPS - 12), signal.SIGKILL, -9)
    assert not (out / "final_model").exists() and command.checkpoints(out)
    return out


@pytest.fixture(scope="module")
def sparse(home: Home) -> Path:
    """A run that nobody disturbed, with a row every third step."""
    out = home.root / "sparse"
    home.anabatic(*home.pretrain(out, more=MISALIGNED))
    return out


def read(folder: Path) -> dict[int, list[list[int]]]:
    """Step -> the pieces of data that all ranks read in it."""
    found: dict[int, list[list[int]]] = {}
    for file in folder.glob("rows-rank-*.jsonl"):
        for line in json_reader.read_json_lines(file):
            found[line["step"]] = sorted(found.get(line["step"], []) + line["rows"])
    assert list(sorted(found)) == list(range(1, STEPS + 1))
    pieces = [tuple(row) for rows in found.values() for row in rows]
    assert len(pieces) == len(set(pieces)) > STEPS
    return found


def same(found: Path, expected: Path) -> None:
    """The rows, the evaluations and the models of two runs are equal to the bit."""
    assert command.losses(found) == command.losses(expected)
    assert command.evaluations(found) == command.evaluations(expected)
    for name in ("best_model", "final_model"):
        weights = [(folder / name / "model.safetensors").read_bytes() for folder in (found, expected)]
        assert weights[0] == weights[1], name
    keys = ("finished", "steps", "tokens", "train_loss", "valid_loss")
    assert [command.summary(found)[key] for key in keys] == [command.summary(expected)[key] for key in keys]


def test_killed_and_continued_from_the_last_whole_checkpoint(
    home: Home, base: Path, killed: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(killed, tmp_path / "again")
    before, newest = command.checkpoints(out)
    tensors = out / f"checkpoint-{newest}" / "__0_0.distcp"
    size = tensors.stat().st_size
    with open(tensors, "r+b") as file:
        file.truncate(size // 2)
    again = home.anabatic(*home.pretrain(out))
    assert f"warning: {tensors.parent} is not used: __0_0.distcp has {size // 2} of {size} bytes" in again.err
    assert f"continuing from {out / f'checkpoint-{before}'}: step {before}" in again.err
    same(out, base)
    assert command.events(out).count("resume") == 1


def test_from_one_process_to_two_and_back(home: Home, base: Path, killed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(killed, tmp_path / "again")
    at = command.checkpoints(out)[-1]
    step = command.draw("two and back").randint(at + 1, STEPS - 6)
    two = home.start(*home.pretrain(out, 2, more=ROWS))
    stopped = command.interrupt(two, out, step, signal.SIGTERM, 143)
    assert f"checkpoint-{at}: step {at}" in stopped.err and "saved; the same command continues" in stopped.err
    home.anabatic(*home.pretrain(out, more=ROWS))
    assert read(out) == read(base)  # the same pieces in every step: none twice, none lost
    rows, wanted = command.losses(out), command.losses(base)
    assert list(rows) == list(wanted) and command.summary(out)["finished"]
    assert list(rows.values()) == pytest.approx(list(wanted.values()), rel=2e-3)


def test_signals_and_kills_between_two_rows(home: Home, sparse: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    at = sorted(command.draw("chain").sample(range(6, STEPS - 9), 4))
    done = 0
    for step, (number, code) in zip(at, ENDS, strict=True):
        process = home.start(*home.pretrain(out, more=MISALIGNED))
        err = command.interrupt(process, out, max(step, done + 1), number, code).err
        assert command.checkpoints(out)[-1] > done or number == signal.SIGKILL
        done = command.checkpoints(out)[-1]
        if number != signal.SIGKILL:
            assert f"{number.name}: saving at the end of this step" in err
            assert f"stopped after step {done}: saved; the same command continues" in err
            assert command.events(out)[-1] == "stop" and not (out / "summary.json").exists()
    home.anabatic(*home.pretrain(out, more=MISALIGNED))
    same(out, sparse)


def test_two_processes_are_killed_and_go_on(home: Home, base2: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    step = command.draw("two killed").randint(6, STEPS - 6)
    command.interrupt(home.start(*home.pretrain(out, 2)), out, step, signal.SIGKILL, -9)
    home.anabatic(*home.pretrain(out, 2))
    same(out, base2)
