"""`anabatic monitor`: which figures, in which form, once or again and again."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from anabatic.core.errors import ConfigError, Failure
from anabatic.core.jsonl import JsonlWriter, finite
from anabatic.monitor import outputs, runs, screen
from anabatic.monitor.pick import Filter
from anabatic.monitor.sampler import Frame, Sampler
from anabatic.monitor.screen import History
from anabatic.monitor.sources import Machine
from anabatic.monitor.terminal import Terminal

FIRST_SECONDS = 15.0
"""How long the first reading may take; npu-smi is ended after ten."""
_PATIENCE = 0.5
"""Seconds without a picture on a terminal."""
_END = ("q", "Q", "\x1b")
"""Keys that end the live screen."""
SHORTEST = 0.1
_LONGEST_PAUSE = 2.0
"""Between two frames of a recording."""
_WIDTH = 120
"""Where the output is no terminal and COLUMNS is not set."""

Form = Literal["screen", "json", "csv"]


@dataclass(frozen=True)
class Options:
    """What the command was asked for.

    Attributes:
        once: one reading, then end.
        interval: seconds between readings; None: one second on a screen, and one reading only in other forms.
        log: file that every reading is appended to.
        replay: recording to show instead of this machine.
        prom: host and port to serve figures at.
        run: folder of a training run shown beside the devices.
    """

    form: Form = "screen"
    once: bool = False
    interval: float | None = None
    log: Path | None = None
    replay: Path | None = None
    prom: tuple[str, int] | None = None
    run: Path | None = None
    filter: Filter = field(default_factory=Filter)

    def check(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            ConfigError: an interval that is too short, or two options that exclude each other.
        """
        if self.interval is not None and not SHORTEST <= self.interval <= 86_400:
            raise ConfigError(f"--interval is {self.interval:g}, expected {SHORTEST:g} to 86400 seconds", "try 1")
        if self.replay and (self.log or self.prom or self.run):
            raise ConfigError(
                "--replay shows a recording: it goes with neither --log, --prom nor a run", "leave one out"
            )
        if self.once and self.prom:
            raise ConfigError("--prom serves until it is stopped, --once ends at once", "leave one out")


def run(options: Options) -> int:
    """Show, print, record and serve as asked; return the exit code: 1 where no device could be read.

    Raises:
        ConfigError: options that exclude each other, a device that is not here, no run in the folder.
        Failure: nothing answered in time; a file or a port refuses.
    """
    options.check()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no bars
    reader = runs.RunReader(options.run) if options.run else None
    show = _Show(options, reader)
    if options.replay is not None:
        return _replay(options, show)
    with ExitStack() as stack:
        sampler = Sampler(Machine(), options.interval or 1.0)
        stack.callback(sampler.close)
        if options.form == "screen" and _continues(options) and sys.stdout.isatty() and not _waited(sampler):
            return 0
        frame = sampler.frame(0, FIRST_SECONDS)
        if frame is None:
            raise Failure(
                f"no device answered within {FIRST_SECONDS:g} s: the driver hangs",
                "look at `dmesg`; `npu-smi info` (or `nvidia-smi`) will hang too",
            )
        options.filter.require(frame.snapshot)
        record = JsonlWriter(options.log) if options.log else None
        if record is not None:
            stack.callback(record.close)
        if not _continues(options):
            if record is not None:
                record.write(outputs.log_row(frame))
            return show.once(frame)
        if options.prom is not None:
            _serve(options.prom, sampler, reader, stack)
        return _watch(show, sampler, record, options, stack)


def _waited(sampler: Sampler) -> bool:
    """Show that the first reading takes its time; return False when the user would not wait for it."""
    if sampler.frame(0, _PATIENCE) is not None:
        return True
    with Terminal() as terminal:
        started = time.monotonic()
        while sampler.frame() is None and (past := time.monotonic() - started) < FIRST_SECONDS:
            terminal.draw(screen.waiting(past, terminal.size()[0]))
            if terminal.key(_PATIENCE) in _END:
                return False
    return True


def _continues(options: Options) -> bool:
    """True when the command goes on after the first reading: only a terminal, or who asks for it, wants that."""
    if options.once:
        return False
    asked = options.interval is not None or options.prom is not None or options.log is not None
    return asked or (options.form == "screen" and sys.stdout.isatty())


def _serve(where: tuple[str, int], sampler: Sampler, reader: runs.RunReader | None, stack: ExitStack) -> None:
    from anabatic.monitor import exporter

    def text() -> str:
        frame = sampler.frame()
        assert frame is not None
        return outputs.prometheus(frame, reader.read().figures() if reader else {})

    port = stack.enter_context(exporter.serve(where, text))
    sys.stderr.write(f"serving http://{where[0]}:{port}/metrics\n")


def _watch(show: _Show, sampler: Sampler, record: JsonlWriter | None, options: Options, stack: ExitStack) -> int:
    silent = options.form == "screen" and not sys.stdout.isatty() and (options.prom or options.log)
    live = options.form == "screen" and sys.stdout.isatty()
    terminal = stack.enter_context(Terminal()) if live else None
    number = 0
    while True:
        frame = sampler.frame(number, None if terminal is None else 0.0)
        assert frame is not None
        if frame.number > number:
            number = frame.number
            if record is not None:
                record.write(outputs.log_row(frame))
            if not silent and terminal is None:
                show.next(frame)
        if terminal is not None:
            terminal.draw(show.picture(frame, *terminal.size()))
            if terminal.key(min(options.interval or 1.0, 1.0)) in _END:
                return 0


def _replay(options: Options, show: _Show) -> int:
    assert options.replay is not None
    frames = outputs.replay(options.replay)
    first = next(frames)
    options.filter.require(first.snapshot)
    if options.once:
        for first in frames:
            show.note(first)
        return show.once(first)
    if options.form != "screen" or not sys.stdout.isatty():
        for frame in _chain(first, frames):
            show.next(frame)
        return 0
    with Terminal() as terminal:
        before = first
        for frame in _chain(first, frames):
            pause = min(max(frame.snapshot.taken_at - before.snapshot.taken_at, 0.0), _LONGEST_PAUSE)
            if terminal.key(pause if options.interval is None else options.interval) in _END:
                return 0
            terminal.draw(show.picture(frame, *terminal.size()))
            before = frame
    return show.once(before)


def _chain(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


class _Show:
    """Frames as lines, in the form that was asked for."""

    def __init__(self, options: Options, reader: runs.RunReader | None) -> None:
        self._options, self._reader = options, reader
        self._history = History()
        self._heading = True

    def note(self, frame: Frame) -> None:
        """Take a frame into the histories."""
        self._history.add(frame)

    def picture(self, frame: Frame, width: int, height: int | None) -> list[screen.Line]:
        """Return the screen of a frame."""
        self._history.add(frame)
        run = runs.lines(self._reader.read(), max(width, screen.NARROWEST)) if self._reader else []
        return screen.render(frame, self._options.filter.apply(frame.snapshot), self._history, width, height, run)

    def next(self, frame: Frame) -> None:
        """Print a frame."""
        sys.stdout.write(self._text(frame))
        sys.stdout.flush()

    def once(self, frame: Frame) -> int:
        """Print a frame and return the exit code.

        Raises:
            Failure: there is nothing to print.
        """
        if frame.problem and not frame.snapshot.devices and self._options.form == "screen" and not self._reader:
            raise Failure(frame.problem, frame.hint)
        self.next(frame)
        return 1 if frame.problem and not frame.snapshot.devices else 0

    def _text(self, frame: Frame) -> str:
        shown = self._options.filter.apply(frame.snapshot)
        if self._options.form == "json":
            row = outputs.row(frame, shown)
            if self._reader is not None:
                row["run"] = vars(self._reader.read())
            return json.dumps(finite(row), ensure_ascii=False) + "\n"
        if self._options.form == "csv":
            heading, self._heading = self._heading, False
            return outputs.csv_lines(shown, heading)
        width, colour = _width(), sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        lines = self.picture(frame, width, None)
        return "".join(f"{screen.paint(screen.fit(line, width), colour)}\n" for line in lines)


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    return os.get_terminal_size(sys.stdout.fileno()).columns or _WIDTH if sys.stdout.isatty() else _WIDTH
