"""A screen that is drawn again and again, in place, and leaves the terminal as it was."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

from anabatic.monitor.screen import StyledLine, colorize_line, fit_line

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
