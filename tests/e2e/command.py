"""Commands as a user types them, in processes of their own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from anabatic.core import json_reader
from e2e import warm

LONGEST = 600
"""Seconds after which a command counts as hung."""


SEED = int(os.environ.get("ANABATIC_TEST_SEED") or time.time_ns() % 1_000_000)


def draw(name: str) -> random.Random:
    """Random numbers for one test; ANABATIC_TEST_SEED=... repeats a run that failed."""
    print(f"ANABATIC_TEST_SEED={SEED}")
    return random.Random(f"{SEED} {name}")


@dataclass
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Running = subprocess.Popen[str] | warm.Warm


def start(
    words: Sequence[object], cache: Path, program: Sequence[str] = (), more: Mapping[str, str] | None = None
) -> Running:
    """Start `PROGRAM anabatic WORDS`; its tokenised shards go to `cache`, and `more` are further variables."""
    line = [*program, sys.executable, "-m", "anabatic", *map(str, words)]
    variables = {**os.environ, "ANABATIC_CACHE": str(cache), "GOMP_SPINCOUNT": "1000", **(more or {})}
    server = warm.simulated(cache) if "sim" in program else warm.plain()
    if (started := server.start(line, variables, Path.cwd())) is not None:
        return started
    return subprocess.Popen(
        line,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: Running, code: int | None = 0) -> Result:
    """Wait for a command and check its exit code; None: any."""
    try:
        out, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        kill(process)
        out, err = process.communicate()
        raise AssertionError(f"hung: {process.args}\n{out}\n{err}") from None
    assert code is None or process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return Result(process.returncode, out, err)


def kill(process: Running) -> None:
    """kill -9 for a command and everything that it has started, whose locks are free then."""
    children = psutil.Process(process.pid).children(recursive=True)
    for one in (*children, process):
        one.kill()
    psutil.wait_procs(children, timeout=LONGEST)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss as logged; every step at most once."""
    rows = [row for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
    found = {row["step"]: row["loss"] for row in rows}
    assert len(found) == len(rows), "a step was recorded twice"
    return found


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """(step, held-out loss) of every evaluation."""
    return [
        (row["step"], row["valid_loss"])
        for row in json_reader.read_json_lines(folder / "metrics.jsonl")
        if row["kind"] == "eval"
    ]


def events(folder: Path) -> list[str]:
    """The names of a run's events, in order."""
    return [row["event"] for row in json_reader.read_json_lines(folder / "events.jsonl")]


def checkpoints(folder: Path) -> list[int]:
    """Steps of the checkpoint folders."""
    return sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))


def summary(folder: Path) -> dict[str, Any]:
    """The run's own account of itself."""
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return content


def wait_for_step(process: Running, folder: Path, step: int) -> None:
    """Wait until this process, which has just been started, and not one before it, has logged `step`."""
    since = time.time()  # psutil's create_time may be a second too early: the boot time has whole seconds
    rows = folder / "metrics.jsonl"
    wait_for(
        process, lambda: any(row["step"] >= step and row["time"] > since for row in json_reader.read_json_lines(rows))
    )


def wait_for(process: Running, condition: Callable[[], bool]) -> None:
    """Wait while a command runs until something is true."""
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert process.poll() is None, f"ended too early: {process.communicate()[1]}"
        assert time.monotonic() < deadline, "never came"
        time.sleep(0.004)


def interrupt(process: Running, folder: Path, step: int, number: signal.Signals, code: int) -> Result:
    """Send a signal once `step` is logged, and wait for the exit code. SIGKILL goes to all its processes."""
    wait_for_step(process, folder, step)
    if number == signal.SIGKILL:
        kill(process)
    else:
        process.send_signal(number)
    return end(process, code)
