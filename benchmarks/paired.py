"""Compare programs that take turns: each in its own process, the same share of the same minutes.

The machine is shared and its clock moves, so two figures of different minutes are not compared. Every side is started
and warmed up once; then they run in alternation, a few seconds each, and ratios are taken turn by turn. What counts is
CPU time (all threads of the process); the wall clock is shown beside it.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Read by libgomp when torch loads it: threads that wait without spinning, as the command line sets it for every job.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def peak_memory() -> int:
    """The peak of this process's resident set in bytes (`ru_maxrss` would start at the peak of the parent)."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


@dataclass
class Turn:
    tokens: int = 0
    steps: int = 0
    cpu: float = 0.0
    wall: float = 0.0
    first: float = 0.0
    """Wall time of the first step."""


class Over(Exception):
    """The comparison is over."""


class Turns:
    """A side's end of the line: call `step` after every optimizer step; it waits when the turn is over."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self.turn: Turn | None = None

    def begin(self, **facts: Any) -> None:
        """Say that everything is set up, and wait for the first turn."""
        self.line.send({"base": peak_memory(), **facts})
        self._wait()

    def _wait(self) -> None:
        seconds = self.line.recv()
        if seconds is None:
            self.line.send(peak_memory())
            raise Over
        self.seconds = seconds
        self.turn = Turn()
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def step(self, tokens: int) -> None:
        """Count a step's real target tokens."""
        turn = self.turn
        assert turn is not None
        turn.tokens += tokens
        turn.steps += 1
        turn.wall = time.perf_counter() - self.wall
        turn.first = turn.first or turn.wall
        if turn.steps >= 2 and turn.wall >= self.seconds:
            turn.cpu = time.process_time() - self.cpu
            self.line.send(turn)
            self._wait()

    def finish(self, **facts: Any) -> None:
        """Say that the work is done, in place of another turn, and what came of it."""
        self.line.send(facts)
        raise Over


def _child(work: Callable[..., None], line: Connection, arguments: tuple[Any, ...]) -> None:
    with suppress(Over):
        work(Turns(line), *arguments)
    os._exit(0)  # threads and atexit hooks of the peer have nothing left to save


def in_own_process(work: Callable[..., None], *arguments: Any) -> None:
    """Prepare something without leaving its memory here, where every side would start from it."""
    process = multiprocessing.get_context("spawn").Process(target=work, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


@dataclass
class Result:
    """What one side did."""

    turns: list[Turn] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    start_up: float = 0.0
    peak: int = 0

    def rates(self, clock: str) -> list[float]:
        return [turn.tokens / getattr(turn, clock) for turn in self.turns]


class _Running:
    def __init__(self, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, other = context.Pipe()
        start = time.perf_counter()
        self.process = context.Process(target=_child, args=(work, other, arguments))
        self.process.start()
        other.close()
        self.result = Result()
        self.result.facts = self._receive()
        self.result.start_up = time.perf_counter() - start

    def _receive(self) -> Any:
        try:
            return self.line.recv()
        except EOFError:
            self.process.join()
            raise SystemExit(f"a side ended with exit code {self.process.exitcode}") from None

    def turn(self, seconds: float) -> Turn | dict[str, Any]:
        """Give it a turn; the facts of `finish` where its work is done."""
        self.line.send(seconds)
        return self._receive()

    def timed_turn(self, seconds: float) -> Turn:
        turn = self.turn(seconds)
        assert isinstance(turn, Turn), "a side of a comparison of rates has no end"
        return turn

    def end(self) -> Result:
        self.line.send(None)
        self.result.peak = self._receive()
        self.process.join()
        return self.result


@contextmanager
def _closing(sides: dict[str, _Running]) -> Iterator[None]:
    try:
        yield
    finally:
        for side in sides.values():
            if side.process.is_alive():
                side.process.terminate()


def alternate(
    sides: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], rounds: int, seconds: float, warm_up: float
) -> dict[str, Result]:
    """Start every side, warm it up, then give each a turn of `seconds`, `rounds` times over."""
    running: dict[str, _Running] = {}
    with _closing(running):
        for name, (work, arguments) in sides.items():
            running[name] = _Running(work, arguments)
            running[name].result.start_up += running[name].timed_turn(warm_up).first  # compilation is in the first step
        for _ in range(rounds):
            for side in running.values():
                side.result.turns.append(side.timed_turn(seconds))
        return {name: side.end() for name, side in running.items()}


def to_the_end(
    sides: dict[str, tuple[Callable[..., None], tuple[Any, ...]]], seconds: float
) -> dict[str, dict[str, Any]]:
    """Start every side and give each a turn of `seconds` over and over until all have finished; return their facts."""
    running: dict[str, _Running] = {}
    facts: dict[str, dict[str, Any]] = {}
    with _closing(running):
        for name, (work, arguments) in sides.items():
            running[name] = _Running(work, arguments)
        while len(facts) < len(running):
            for name, side in running.items():
                if name not in facts and isinstance(end := side.turn(seconds), dict):
                    facts[name] = {**side.result.facts, **end}
    return {name: facts[name] for name in sides}


def table(results: dict[str, Result], peer: str) -> None:
    """Print every side beside `peer`: medians of rates, medians of the ratios of like turns with their range."""
    print(
        f"  {'':22} {'tokens/CPU s':>12} {'tokens/s':>10} {'per step':>9} {'CPU ratio (range)':>20} {'wall':>6} "
        f"{'peak MiB':>9} {'ratio':>6} {'less start':>10} {'starts in':>9}"
    )
    other = results[peer]
    for name, result in results.items():
        cpu, wall = result.rates("cpu"), result.rates("wall")
        ratios = sorted(a / b for a, b in zip(cpu, other.rates("cpu"), strict=True))
        walls = [a / b for a, b in zip(wall, other.rates("wall"), strict=True)]
        tokens = sum(turn.tokens for turn in result.turns) / sum(turn.steps for turn in result.turns)
        own = result.peak - result.facts["base"]
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        print(
            f"  {name:22} {statistics.median(cpu):12,.0f} {statistics.median(wall):10,.0f} {tokens:9,.0f} {spread:>20} "
            f"{statistics.median(walls):6.2f} {result.peak / 2**20:9,.0f} {result.peak / other.peak:6.2f} "
            f"{own / (other.peak - other.facts['base']):10.2f} {result.start_up:7.1f} s"
        )
