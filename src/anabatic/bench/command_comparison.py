"""`anabatic bench compare`: a command of ours and another program's, turn by turn on the same data.

The clock of a shared machine moves, so figures of different minutes are not compared: the two run in alternation, the
one that begins changes every round, and ratios are taken round by round. CPU time and memory are what the kernel counts
for the command and the children that it waits for (wait4(2)); the memory is that of its largest process, and never less
than the 21 MiB of the process that starts it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from anabatic.bench import environment_info, result_files
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.bench.training_probe import start_command
from anabatic.config.bench import BenchCompare
from anabatic.core import log, relaunch
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import to_printable

OURS, PEER = "ours", "peer"
_LOG_TAIL_LINES = 3
"""Lines that are shown of a command that has failed."""
_NUMBER_PATTERN = re.compile(r"([-+]?[\d,]*\.?\d+(?:[eE][-+]?\d+)?)(?:\s?([KMBT])\b)?")
_NUMBER_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
"""As `core.formatting.format_count` shortens them."""


@dataclass(frozen=True)
class CommandRun:
    """One run of a command: seconds on the clock, seconds of all its processors, bytes, and what it has printed."""

    wall: float
    cpu: float
    memory: float
    figure: float | None


def run(settings: BenchCompare, peer: Sequence[str]) -> int:
    """Measure both commands.

    Raises:
        ConfigError: a command, the data or the expression cannot be used.
        Failure: a command fails, or does not print the figure.
    """
    pattern = _compile_pattern(settings.figure)
    sides = _build_commands(settings, peer)
    load = result_files.prepare_output(settings)
    folder = Path(settings.out).expanduser()
    turns: dict[str, list[CommandRun]] = {name: [] for name in sides}
    for number in range(settings.warm_up + settings.repeats):
        counts = number >= settings.warm_up
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            made = run_command(name, sides[name], folder, pattern, settings.limit)
            if counts:
                turns[name].append(made)
        seconds = ", ".join(f"{name} {turns[name][-1].wall:.2f} s" for name in sides) if counts else "warm-up"
        log.info(f"round {number + 1} of {settings.warm_up + settings.repeats}: {seconds}")
    where = environment_info.collect_environment(load)
    title = (
        f"anabatic {shlex.join(sides[OURS][len(relaunch.PROGRAM_COMMAND) :])} compared with {shlex.join(sides[PEER])}"
    )
    result = BenchResult(
        "compare",
        title,
        build_metrics(turns[OURS], turns[PEER]),
        {"peer_command": shlex.join(peer), **asdict(settings)},
        where,
        notes=[*environment_info.caveat_notes(where), "ratios: medians over rounds; more than 1 speaks for ours"],
    )
    result_files.write_results(settings, result)
    return 0


def _compile_pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        found = re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"figure {text!r} is no regular expression: {error}", r"for example: 'tokens/s: ([\d.]+)'"
        ) from error
    if found.groups != 1:
        raise ConfigError(
            f"figure {text!r} has {found.groups} groups", r"put one around the number: 'tokens/s: ([\d.]+)'"
        )
    return found


def _build_commands(settings: BenchCompare, peer: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of both commands with the data in their place."""
    try:
        own_command = shlex.split(settings.ours)
    except ValueError as error:
        raise ConfigError(f"ours is {settings.ours!r}: {error}", "close the quotation marks") from error
    own_command = own_command[1:] if own_command[:1] == ["anabatic"] else own_command
    sides = {OURS: [*relaunch.PROGRAM_COMMAND, *own_command], PEER: list(peer)}
    uses = [name for name, words in sides.items() if any("{data}" in word for word in words)]
    if settings.data is None and uses:
        raise ConfigError(f"{uses[0]} has {{data}}, and no data is given", "give --data FILE")
    if settings.data is not None:
        if missing := [name for name in sides if name not in uses]:
            raise ConfigError(
                f"data is {settings.data}, and {missing[0]} has no {{data}}", "write {data} where it belongs"
            )
        if not Path(settings.data).expanduser().exists():
            raise ConfigError(f"data is {settings.data}, which is not there", "name a file or a folder")
    data = str(Path(settings.data or "").expanduser())
    if shutil.which(sides[PEER][0]) is None:
        raise ConfigError(f"there is no program {sides[PEER][0]}", "give its path after --")
    return {name: [word.replace("{data}", data) for word in words] for name, words in sides.items()}


def run_command(
    name: str, words: Sequence[str], folder: Path, pattern: re.Pattern[str] | None, limit: float
) -> CommandRun:
    """Run a command once.

    Args:
        limit: seconds that it may take.

    Raises:
        Failure: it fails, does not end, or does not print the figure.
    """
    out, log_path = folder / f"{name}-out", folder / f"{name}.log"
    shutil.rmtree(out, ignore_errors=True)
    typed = [word.replace("{out}", str(out)) for word in words]
    with open(log_path, "wb") as output:
        start = time.perf_counter()
        try:
            process = start_command(typed, output)
        except OSError as error:
            raise ConfigError(f"{name} cannot be started: {error.strerror}", f"try it alone: {typed[0]}") from error
        late = threading.Event()
        clock = threading.Timer(limit, _kill_on_timeout, (process.pid, late))
        clock.daemon = True
        clock.start()
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            clock.cancel()
        wall = time.perf_counter() - start
        process.returncode = code = os.waitstatus_to_exitcode(status)
    shutil.rmtree(out, ignore_errors=True)
    text = log_path.read_text(encoding="utf-8", errors="replace")
    if late.is_set():
        raise Failure(
            f"{name} did not end within {limit:g} s", f"its output is in {log_path}; --limit gives it more time"
        )
    if code:
        last = " / ".join(to_printable(line) for line in text.splitlines()[-_LOG_TAIL_LINES:] if line.strip())
        raise Failure(
            f"{name} ended with exit code {code}: {last or 'it said nothing'}", f"its output is in {log_path}"
        )
    return CommandRun(
        wall, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024.0, extract_metric(name, text, pattern, log_path)
    )


def _kill_on_timeout(pid: int, late: threading.Event) -> None:
    """End a command that hangs, and what it has started."""
    try:
        os.killpg(pid, signal.SIGKILL)
        late.set()
    except ProcessLookupError:
        log.debug(f"{pid} had ended")


def extract_metric(name: str, text: str, pattern: re.Pattern[str] | None, log_path: Path) -> float | None:
    """Return the last figure in what a command has printed, `12.3K` as 12,300; None where none is asked for.

    Raises:
        Failure: there is none, or it is no number above 0.
    """
    if pattern is None:
        return None
    found = pattern.findall(text)
    if not found:
        what = "printed nothing" if not text.strip() else f"printed nothing that fits {pattern.pattern!r}"
        raise Failure(f"{name} {what}", f"its output is in {log_path}")
    number = _NUMBER_PATTERN.search(found[-1])
    value = float(number[1].replace(",", "")) * _NUMBER_SUFFIXES.get(number[2], 1.0) if number else 0.0
    if value <= 0:
        raise Failure(f"{name} printed {found[-1][:80]!r}, no number above 0", f"its output is in {log_path}")
    return value


def build_metrics(our_runs: Sequence[CommandRun], peer: Sequence[CommandRun]) -> list[BenchMetric]:
    """Return both sides and the ratios of the rounds."""
    metrics = []
    for title, unit, more in (
        ("printed", "per second", True),
        ("wall time", "s", False),
        ("CPU time", "s", False),
        ("peak memory", "B", False),
    ):
        key = {"printed": "figure", "wall time": "wall", "CPU time": "cpu", "peak memory": "memory"}[title]
        own_values = [getattr(one, key) for one in our_runs]
        peer_values = [getattr(one, key) for one in peer]
        if None in own_values or None in peer_values:
            continue
        pairs = [(a / b if more else b / a) for a, b in zip(own_values, peer_values, strict=True)]
        metrics += [
            BenchMetric(f"{title}, {OURS}", unit, tuple(own_values)),
            BenchMetric(f"{title}, {PEER}", unit, tuple(peer_values)),
            BenchMetric(f"{title}, {OURS if more else PEER} / {PEER if more else OURS}", "x", tuple(pairs)),
        ]
    return metrics
