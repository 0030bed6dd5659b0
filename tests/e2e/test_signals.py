"""Signals to every process of a job, as Slurm and systemd send them: any number in any order, and it saves once."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from anabatic.core import json_reader
from e2e import command
from e2e.home import Home
from e2e.test_launch import launch

FORKED = 5
"""Processes of a job with two ranks: launcher, agent, the one that forks the ranks, the ranks."""


def everybody(process: command.Running) -> list[psutil.Process]:
    """A command and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(process.pid)
        return [own, *own.children(recursive=True)]
    return []


def shower(process: command.Running, number: signal.Signals, times: int, draw: random.Random, gap: float) -> None:
    """Send a signal to every process of a command, so often, in random order and with random gaps."""
    for _ in range(times):
        found = everybody(process)
        draw.shuffle(found)
        for one in found:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                os.kill(one.pid, number)
            time.sleep(draw.uniform(0, gap))


def same(out: Path, base: Path) -> None:
    """What a run has computed is, to the bit, what one has that nobody disturbed."""
    assert command.losses(out) == command.losses(base)
    assert command.evaluations(out) == command.evaluations(base)
    weights = [(folder / "final_model" / "model.safetensors").read_bytes() for folder in (out, base)]
    assert weights[0] == weights[1]


def _are_there(process: command.Running, count: int) -> bool:
    return len(everybody(process)) >= count


def saved(out: Path) -> list[int]:
    """Steps of all checkpoints, in the order in which they were written."""
    return [row["step"] for row in json_reader.read_json_lines(out / "events.jsonl") if row["event"] == "checkpoint"]


def stops(out: Path) -> list[int]:
    """Steps after which the run was stopped."""
    return [row["step"] for row in json_reader.read_json_lines(out / "events.jsonl") if row["event"] == "stop"]


@pytest.mark.parametrize("processes", [1, 2])
def test_every_process_is_told_to_end_again_and_again(
    home: Home, both: tuple[Path, Path], tmp_path: Path, processes: int
) -> None:
    """In the middle of steps, checkpoints and evaluations alike: every run falls into another one."""
    draw, out, base = command.draw(f"group {processes}"), tmp_path / "run", both[processes - 1]
    words = [*(launch("--max-restarts", 2) if processes > 1 else []), *home.pretrain(out, processes)]
    for round_, (number, times, code) in enumerate(
        [(signal.SIGTERM, 1, 143), (signal.SIGTERM, 5, 143), (signal.SIGINT, 2, 130), (signal.SIGUSR1, 3, 143)]
    ):
        process = home.start(*words)
        command.wait_for_step(process, out, 6 * round_ + draw.randint(4, 7))
        time.sleep(draw.uniform(0, 0.03))
        shower(process, number, times, draw, 0.02)
        said = command.end(process, code).err
        assert said.count(": saving at the end of this step") == 1 and said.count("stopped after step ") == 1, said
        assert "all processes start again" not in said and "starting again" not in said
        assert len(stops(out)) == round_ + 1 and stops(out)[-1] == saved(out)[-1] == command.checkpoints(out)[-1]
        assert len(saved(out)) == len(set(saved(out))), "a step was saved twice"
    command.end(home.start(*words))
    same(out, base)


def test_before_anything_could_be_saved(home: Home, base2: Path, tmp_path: Path) -> None:
    """From the first process to the first step; the run then begins as if nothing had been."""
    draw, out = command.draw("before"), tmp_path / "run"
    words = [*launch("--max-restarts", 2), *home.pretrain(out, 2)]
    for count in (2, 3, FORKED):
        process = home.start(*words)
        command.wait_for(process, functools.partial(_are_there, process, count))
        shower(process, signal.SIGTERM, 2, draw, 0.1)
        said = command.end(process, 143).err
        assert "error: " not in said and "start again" not in said and "starting again" not in said, said
    command.end(home.start(*words))
    same(out, base2)
