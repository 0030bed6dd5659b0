"""A real training as a child, measured by the rows that it logs, and ended when it has been measured.

The child is the command itself under its own settings; `adapt_job` says what differs. A logged row stands for the
steps since the one before: between rows the host does not wait for the device, so a row a measurement is exact.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from anabatic.config.loading import settings
from anabatic.config.sections.common import Data, Evaluate, Save
from anabatic.core import json_reader, log, relaunch
from anabatic.core.errors import AnabaticError, ConfigError, Failure
from anabatic.core.formatting import to_printable
from anabatic.core.paths import RunFolder, write_atomic

DEFAULT_MAX_STEPS = 10_000
"""Steps of a training that names none: what depends on its length (torch.compile, the schedule) is as in a real one."""
_POLL_SECONDS = 0.1
_KILL_TIMEOUT = 10.0
"""Seconds for killed processes to be gone."""
_LOG_TAIL_LINES = 5
"""Lines of the log that are shown when the training ends without an error of ours."""


@dataclass(frozen=True)
class StepWindow:
    """Some steps in a row.

    Attributes:
        seconds_per_step: of one step; tokens_per_step: of one step, over all ranks.
        logged_row: as logged: mfu, memory_bytes, data_wait and more.
    """

    seconds_per_step: float
    tokens_per_step: float
    logged_row: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingMeasurement:
    """What a training said of itself.

    Attributes:
        startup_seconds: seconds from the start of its process to the end of its first step.
        device_event: the event of its device: name, type, dtype, world_size; resolved_sizes: sizes that it has settled
        on.
    """

    windows: list[StepWindow]
    startup_seconds: float
    device_event: Mapping[str, Any]
    resolved_sizes: Mapping[str, Any]


def adapt_job(job: Any, out: Path, steps: int, total: int) -> Any:
    """Return the job with nothing but steps: no held-out data, no saving between, a row every `steps`.

    Rows that are not text keep what they hold out; it is evaluated only after the last step.
    """
    longest = max(total, job.schedule.max_steps or DEFAULT_MAX_STEPS)
    holds_out = not isinstance(job.data, Data)
    data = job.data if holds_out else replace(job.data, valid=[], valid_fraction=0.0)
    return replace(
        job,
        out=str(out),
        data=data,
        eval=type(job.eval)(every=longest) if holds_out else Evaluate(),
        save=Save(resume="never"),
        schedule=replace(job.schedule, max_steps=longest),
        optim=replace(job.optim, on_bad_step="skip" if job.optim.on_bad_step == "rewind" else job.optim.on_bad_step),
        log=replace(job.log, every=steps, sinks=[], samples=0, rows=False),
    )


def measure_training(name: str, job: Any, folder: Path, steps: int, windows: int) -> TrainingMeasurement:
    """Train until so many windows of `steps` steps are logged, then end the training; nothing of it is kept but
    `training.log`.

    Raises:
        ConfigError, Failure: the training ended before, with what it said.
    """
    run = RunFolder(folder / "run")
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "training.log"
    write_atomic(folder / "training.yaml", settings.dump_job(adapt_job(job, run.root, steps, steps * windows)))
    words = [*relaunch.PROGRAM_COMMAND, *name.split(), "-c", str(folder / "training.yaml")]
    rows = json_reader.JsonlFollower(run.metrics)
    try:
        with open(log_path, "wb") as output, _start_process(words, output) as process:
            start = time.time()
            found: list[dict[str, Any]] = []
            while len(found) < windows + (steps > 1):  # the first step has its own row
                ended = process.poll()
                found += [row for row in rows.read_new_rows()[1] if row.get("kind") == "train"]
                if ended is not None and len(found) < windows + (steps > 1):
                    raise _build_training_error(ended, log_path)
                time.sleep(_POLL_SECONDS)
        events = {row["event"]: row for row in json_reader.read_json_lines(run.events)}
        return TrainingMeasurement(
            list(_iter_windows(found, steps))[:windows],
            found[0]["time"] - start,
            events.get("device", {}),
            events.get("model", {}).get("plan", {}),
        )
    finally:
        shutil.rmtree(run.root, ignore_errors=True)


def _iter_windows(rows: list[dict[str, Any]], steps: int) -> Iterator[StepWindow]:
    """Turn rows into windows; the row of the first step alone is left out."""
    before = {"step": 0, "tokens": 0}
    for row in rows:
        made = row["step"] - before["step"]
        tokens = (row["tokens"] - before["tokens"]) / made
        before = row
        if row["step"] == 1 and steps > 1:
            continue
        if not row["tokens_per_s"]:
            raise Failure(f"no token was trained in the steps up to {row['step']}", "look at training.log")
        yield StepWindow(tokens / row["tokens_per_s"], tokens, row)


def start_command(words: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a command in its own session that ends with this process.

    Raises:
        OSError: it cannot be started.
    """
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=relaunch.build_child_environment(),
        start_new_session=True,
        preexec_fn=relaunch.tie_to_parent,
    )


@contextmanager
def _start_process(words: list[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program; when the block is left, it and all that it has started are gone."""

    def exit_on_signal(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_on_signal)
    process = start_command(words, output)
    try:
        yield process
    finally:
        kill_process_tree(process.pid)
        process.wait()
        signal.signal(signal.SIGTERM, before)


def kill_process_tree(pid: int) -> None:
    """Kill a process and its descendants, the ancestors first: none is left to start another."""
    try:
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            log.debug(f"{one.pid} had ended")
    deadline = time.monotonic() + _KILL_TIMEOUT
    while not all(map(_has_exited, family[1:])) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _has_exited(process: psutil.Process) -> bool:
    """Whether it holds nothing any more: orphans may stay zombies for long, where nobody waits for them."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _build_training_error(code: int, log_path: Path) -> AnabaticError:
    """Return the training's own error."""
    lines = [
        line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    messages = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")]
    if not messages:
        last = " / ".join(to_printable(line) for line in lines[-_LOG_TAIL_LINES:])
        return Failure(
            f"the training ended with exit code {code}: {last or 'it said nothing'}",
            f"its output is in {log_path}",
        )
    kind = ConfigError if code == relaunch.EXIT_USER_ERROR else Failure
    return kind(messages[-1], hints[-1] if hints else f"its output is in {log_path}")
