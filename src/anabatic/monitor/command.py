"""`anabatic monitor`: choose the readings and their form, print once or redraw the screen in place."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import parse_whole
from anabatic.core.json_reader import JsonlWriter, replace_nonfinite
from anabatic.monitor import output_formats, run_lines, run_reader, screen
from anabatic.monitor.device_filter import DeviceFilter
from anabatic.monitor.sampler import DeviceSampler, Frame
from anabatic.monitor.screen import StyledLine, UtilizationHistory, colorize_line, fit_line
from anabatic.monitor.sources.selection import MachineSource

FIRST_READING_SECONDS = 15.0
"""Seconds allowed for the first reading; npu-smi is stopped after ten."""
_DRAW_SECONDS = 0.5
"""Seconds without a picture on a terminal."""
_QUIT_KEYS = ("q", "Q", "\x1b")
"""Keys that end the live screen."""
MIN_INTERVAL = 0.1
_MAX_REPLAY_PAUSE = 2.0
"""Between two frames of a recording."""
_DEFAULT_WIDTH = 120
"""Width if the output is not a terminal and COLUMNS is not set."""

OutputFormat = Literal["screen", "json", "csv"]


@dataclass(frozen=True)
class MonitorOptions:
    """Options of the command.

    Attributes:
        once: one reading, then end.
        interval: seconds between readings; None: one second on a screen, and one reading only in other forms.
        log: file that every reading is appended to.
        replay: recording to show instead of this machine.
        prom: host and port to serve figures at.
        run: folder of a training run shown beside the devices.
    """

    output_format: OutputFormat = "screen"
    once: bool = False
    interval: float | None = None
    log: Path | None = None
    replay: Path | None = None
    prom: tuple[str, int] | None = None
    run: Path | None = None
    filter: DeviceFilter = field(default_factory=DeviceFilter)

    def check_options(self) -> None:
        """Check what can be checked before anything is read.

        Raises:
            ConfigError: an interval that is too short, or two options that exclude each other.
        """
        if self.interval is not None and not MIN_INTERVAL <= self.interval <= 86_400:
            raise ConfigError(f"--interval is {self.interval:g}, expected {MIN_INTERVAL:g} to 86400 seconds", "try 1")
        if self.replay and (self.log or self.prom or self.run):
            raise ConfigError(
                "--replay shows a recording: it goes with neither --log, --prom nor a run", "leave one out"
            )
        if self.once and self.prom:
            raise ConfigError("--prom serves until it is stopped, --once ends at once", "leave one out")


def run(options: MonitorOptions) -> int:
    """Show, print, record and serve as asked; return the exit code: 1 where no device could be read.

    Raises:
        ConfigError: options that exclude each other, a device that is not here, no run in the folder.
        Failure: nothing answered in time; a file or a port refuses.
    """
    options.check_options()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 has no bars
    reader = run_reader.RunReader(options.run) if options.run else None
    show = _FramePrinter(options, reader)
    if options.replay is not None:
        return _run_replay(options, show)
    with ExitStack() as stack:
        sampler = DeviceSampler(MachineSource(), options.interval or 1.0)
        stack.callback(sampler.close)
        if (
            options.output_format == "screen"
            and _is_continuous(options)
            and sys.stdout.isatty()
            and not _wait_first_reading(sampler)
        ):
            return 0
        frame = sampler.get_frame(0, FIRST_READING_SECONDS)
        if frame is None:
            raise Failure(
                f"no device answered within {FIRST_READING_SECONDS:g} s: the driver hangs",
                "look at `dmesg`; `npu-smi info` (or `nvidia-smi`) will hang too",
            )
        options.filter.require_devices(frame.snapshot)
        record = JsonlWriter(options.log) if options.log else None
        if record is not None:
            stack.callback(record.close)
        if not _is_continuous(options):
            if record is not None:
                record.write(output_formats.frame_to_log_row(frame))
            return show.print_once(frame)
        if options.prom is not None:
            _start_exporter(options.prom, sampler, reader, stack)
        return _run_live(show, sampler, record, options, stack)


def _wait_first_reading(sampler: DeviceSampler) -> bool:
    """Show that the first reading takes its time; return False when the user would not wait for it."""
    if sampler.get_frame(0, _DRAW_SECONDS) is not None:
        return True
    with LiveTerminal() as terminal:
        started = time.monotonic()
        while sampler.get_frame() is None and (past := time.monotonic() - started) < FIRST_READING_SECONDS:
            terminal.draw_lines(screen.render_waiting(past, terminal.get_size()[0]))
            if terminal.read_key(_DRAW_SECONDS) in _QUIT_KEYS:
                return False
    return True


def _is_continuous(options: MonitorOptions) -> bool:
    """True when the command continues after the first reading: only a terminal, or who asks for it, wants that."""
    if options.once:
        return False
    is_requested = options.interval is not None or options.prom is not None or options.log is not None
    return is_requested or (options.output_format == "screen" and sys.stdout.isatty())


def _start_exporter(
    where: tuple[str, int], sampler: DeviceSampler, reader: run_reader.RunReader | None, stack: ExitStack
) -> None:
    from anabatic.monitor import exporter

    def render_metrics() -> str:
        frame = sampler.get_frame()
        assert frame is not None
        if reader is None:
            return output_formats.format_prometheus(frame, {})
        run = reader.read()
        return output_formats.format_prometheus(frame, run.get_figures(), run.get_rank_figures())

    port = stack.enter_context(exporter.serve_metrics(where, render_metrics))
    sys.stderr.write(f"serving http://{where[0]}:{port}/metrics\n")


def _run_live(
    show: _FramePrinter, sampler: DeviceSampler, record: JsonlWriter | None, options: MonitorOptions, stack: ExitStack
) -> int:
    silent = options.output_format == "screen" and not sys.stdout.isatty() and (options.prom or options.log)
    live = options.output_format == "screen" and sys.stdout.isatty()
    terminal = stack.enter_context(LiveTerminal()) if live else None
    number = 0
    while True:
        frame = sampler.get_frame(number, None if terminal is None else 0.0)
        assert frame is not None
        if frame.number > number:
            number = frame.number
            if record is not None:
                record.write(output_formats.frame_to_log_row(frame))
            if not silent and terminal is None:
                show.print_frame(frame)
        if terminal is not None:
            terminal.draw_lines(show.render_frame(frame, *terminal.get_size()))
            if terminal.read_key(min(options.interval or 1.0, 1.0)) in _QUIT_KEYS:
                return 0


def _run_replay(options: MonitorOptions, show: _FramePrinter) -> int:
    assert options.replay is not None
    frames = output_formats.read_recording(options.replay)
    first = next(frames)
    options.filter.require_devices(first.snapshot)
    if options.once:
        for first in frames:
            show.add_history(first)
        return show.print_once(first)
    if options.output_format != "screen" or not sys.stdout.isatty():
        for frame in _chain_frames(first, frames):
            show.print_frame(frame)
        return 0
    with LiveTerminal() as terminal:
        before = first
        for frame in _chain_frames(first, frames):
            pause = min(max(frame.snapshot.taken_at - before.snapshot.taken_at, 0.0), _MAX_REPLAY_PAUSE)
            if terminal.read_key(pause if options.interval is None else options.interval) in _QUIT_KEYS:
                return 0
            terminal.draw_lines(show.render_frame(frame, *terminal.get_size()))
            before = frame
    return show.print_once(before)


def _chain_frames(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


class _FramePrinter:
    """Frames as lines, in the form that was asked for."""

    def __init__(self, options: MonitorOptions, reader: run_reader.RunReader | None) -> None:
        self._options, self._reader = options, reader
        self._history = UtilizationHistory()
        self._needs_heading = True

    def add_history(self, frame: Frame) -> None:
        """Take a frame into the histories."""
        self._history.add_frame(frame)

    def render_frame(self, frame: Frame, width: int, height: int | None) -> list[screen.StyledLine]:
        """Return the screen of a frame."""
        self._history.add_frame(frame)
        run = run_lines.format_run_lines(self._reader.read(), max(width, screen.MIN_WIDTH)) if self._reader else []
        return screen.render_screen(
            frame, self._options.filter.filter_snapshot(frame.snapshot), self._history, width, height, run
        )

    def print_frame(self, frame: Frame) -> None:
        """Print a frame."""
        sys.stdout.write(self._format_frame(frame))
        sys.stdout.flush()

    def print_once(self, frame: Frame) -> int:
        """Print a frame and return the exit code.

        Raises:
            Failure: there is nothing to print.
        """
        if (
            frame.problem
            and not frame.snapshot.devices
            and self._options.output_format == "screen"
            and not self._reader
        ):
            raise Failure(frame.problem, frame.hint)
        self.print_frame(frame)
        return 1 if frame.problem and not frame.snapshot.devices else 0

    def _format_frame(self, frame: Frame) -> str:
        snapshot = self._options.filter.filter_snapshot(frame.snapshot)
        if self._options.output_format == "json":
            row = output_formats.frame_to_row(frame, snapshot)
            if self._reader is not None:
                row["run"] = vars(self._reader.read())
            return json.dumps(replace_nonfinite(row), ensure_ascii=False) + "\n"
        if self._options.output_format == "csv":
            heading, self._needs_heading = self._needs_heading, False
            return output_formats.format_csv(snapshot, heading)
        width, colour = _get_width(), sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        lines = self.render_frame(frame, width, None)
        return "".join(f"{screen.colorize_line(screen.fit_line(line, width), colour)}\n" for line in lines)


def _get_width() -> int:
    if columns := parse_whole(os.environ.get("COLUMNS"), 6):
        return columns
    return (
        os.get_terminal_size(sys.stdout.fileno()).columns or _DEFAULT_WIDTH if sys.stdout.isatty() else _DEFAULT_WIDTH
    )


# xterm: another screen, no cursor; and back.
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_CURSOR_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class LiveTerminal:
    """The terminal on stdout, while a `with` block lasts; keys come from stdin where it is a terminal too."""

    def __init__(self) -> None:
        self._colour = not os.environ.get("NO_COLOR")
        self._key_input = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._saved_attributes: list[Any] = []
        self._saved_handler: Any = None

    def __enter__(self) -> LiveTerminal:
        if self._key_input is not None:
            self._saved_attributes = termios.tcgetattr(self._key_input)
            tty.setcbreak(self._key_input)
        self._saved_handler = signal.signal(signal.SIGTERM, _raise_interrupt)
        self._write_text(_ENTER_SCREEN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._saved_handler)
        if self._key_input is not None:
            termios.tcsetattr(self._key_input, termios.TCSADRAIN, self._saved_attributes)
        self._write_text(_LEAVE_SCREEN)

    def get_size(self) -> tuple[int, int]:
        """Return columns and lines now."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return size.columns or 80, size.lines or 24

    def draw_lines(self, lines: Sequence[StyledLine]) -> None:
        """Draw `lines` from the top; nothing is cleared first, so nothing flickers."""
        width, height = self.get_size()
        coloured = [colorize_line(fit_line(line, width), self._colour) + _CLEAR_LINE for line in lines[:height]]
        self._write_text(_CURSOR_HOME + "\r\n".join(coloured) + _CLEAR_BELOW)

    def read_key(self, seconds: float) -> str:
        """Wait for a key, `seconds` at most; return it or an empty string."""
        waits = [] if self._key_input is None else [self._key_input]
        ready, _, _ = select.select(waits, [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(ready[0], 64).decode("utf-8", "replace")
        return pressed if len(pressed) == 1 else ""  # an arrow key begins with escape

    def _write_text(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
