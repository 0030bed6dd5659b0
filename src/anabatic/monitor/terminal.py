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

from anabatic.monitor.screen import Line, fit, paint

# xterm: another screen, no cursor; and back.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _REST_OF_LINE, _REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


class Terminal:
    """The terminal on stdout, while a `with` block lasts; keys come from stdin where it is a terminal too."""

    def __init__(self) -> None:
        self._colour = not os.environ.get("NO_COLOR")
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before: list[Any] = []
        self._handler: Any = None

    def __enter__(self) -> Terminal:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._handler = signal.signal(signal.SIGTERM, _interrupt)
        self._write(_ENTER)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._handler)
        if self._keys is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)
        self._write(_LEAVE)

    def size(self) -> tuple[int, int]:
        """Return columns and lines now."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return size.columns or 80, size.lines or 24

    def draw(self, lines: Sequence[Line]) -> None:
        """Draw `lines` from the top; nothing is cleared first, so nothing flickers."""
        width, height = self.size()
        shown = [paint(fit(line, width), self._colour) + _REST_OF_LINE for line in lines[:height]]
        self._write(_HOME + "\r\n".join(shown) + _REST_OF_SCREEN)

    def key(self, seconds: float) -> str:
        """Wait for a key, `seconds` at most; return it or an empty string."""
        waits = [] if self._keys is None else [self._keys]
        ready, _, _ = select.select(waits, [], [], seconds)
        if not ready:
            return ""
        pressed = os.read(ready[0], 64).decode("utf-8", "replace")
        return pressed if len(pressed) == 1 else ""  # an arrow key begins with escape

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
