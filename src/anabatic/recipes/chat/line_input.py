"""What a user types: lines that go on, blocks of several, and at a terminal editing, completion and a history.

The history is a file that only its owner can read: what people ask a model is theirs.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from anabatic.core import log
from anabatic.core.paths import get_cache_root

BLOCK_MARK = '"""'
"""A line of this alone begins and ends a message of several lines."""
MAX_HISTORY_LINES = 1000
PROMPT, CONTINUATION_PROMPT = "> ", "... "
EXIT_HINT = "(Ctrl-D or /exit leaves)"


def read_messages(history: bool, words: Sequence[str]) -> Iterator[str]:
    """Yield what the user types, message by message, until the input ends.

    Args:
        history: keep the lines for the next time, at a terminal.
        words: commands that the tabulator completes.
    """
    message = MultilineMessage()
    for line in _read_terminal_lines(message, history, words) if _is_interactive() else sys.stdin:
        if (text := message.add_line(line)) is not None:
            yield text
    if message.is_incomplete:
        yield message.take_message()


def replace_undecodable_text() -> None:
    """Bytes that are no UTF-8 on stdin, and characters that stdout's encoding lacks, must not end a conversation."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


class MultilineMessage:
    """Lines that belong together: a backslash at the end continues a line on the next, and a block has its marks."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._block = False

    @property
    def is_incomplete(self) -> bool:
        """True when further lines are awaited."""
        return self._block or bool(self._parts)

    def add_line(self, line: str) -> str | None:
        """Take a line; return the message when it is whole."""
        text = line.rstrip("\r\n")
        mark = text.strip() == BLOCK_MARK
        if mark and (self._block or not self._parts):
            self._block = not self._block
            return None if self._block else self.take_message()
        if self._block:
            self._parts.append(text)
            return None
        goes_on = text.endswith("\\")
        self._parts.append(text[:-1] if goes_on else text)
        return None if goes_on else self.take_message()

    def take_message(self) -> str:
        """Return the message as far as it was typed, and begin anew."""
        text = "\n".join(self._parts)
        self.clear_lines()
        return text

    def clear_lines(self) -> None:
        """Begin anew."""
        self._parts.clear()
        self._block = False


def _read_terminal_lines(message: MultilineMessage, history: bool, words: Sequence[str]) -> Iterator[str]:
    """Yield lines typed at a terminal until Ctrl-D; Ctrl-C forgets what was typed of a message."""
    import readline

    readline.set_completer_delims(" \t\n")
    readline.set_completer(_make_completer(readline, words))
    readline.parse_and_bind("tab: complete")
    known = _LineHistory(readline) if history else None
    try:
        while True:
            try:
                yield input(CONTINUATION_PROMPT if message.is_incomplete else PROMPT)
            except KeyboardInterrupt:
                message.clear_lines()
                sys.stdout.write("\n")
                log.info(EXIT_HINT)
            except EOFError:
                sys.stdout.write("\n")
                return
    finally:
        if known is not None:
            known.save_history()


def _make_completer(readline: Any, words: Sequence[str]) -> Any:
    """Return readline's function that completes commands at the beginning of a line."""

    def complete_command(text: str, state: int) -> str | None:
        if readline.get_begidx() or not text.startswith("/"):
            return None
        fitting = [f"{word} " for word in words if word.startswith(text)]
        return fitting[state] if state < len(fitting) else None

    return complete_command


class _LineHistory:
    """readline's history in a file."""

    def __init__(self, readline: Any) -> None:
        self._readline = readline
        path = get_cache_root() / "chat_history"
        self._path: Path | None = path
        try:
            _create_private_file(path)
            readline.read_history_file(path)
        except (OSError, ValueError) as error:  # ValueError: it is no text
            log.warn(f"{path} is no history and is not used: {error}")
            self._path = None
        readline.set_history_length(MAX_HISTORY_LINES)

    def save_history(self) -> None:
        """Write what was typed; a history that cannot be written is reported, and costs nothing else."""
        if self._path is None:
            return
        try:
            self._readline.write_history_file(self._path)
            self._path.chmod(0o600)
        except OSError as error:
            log.warn(f"{self._path} cannot be written: {error.strerror}")


def _create_private_file(path: Path) -> None:
    """Make sure that a file is there, and that it is its owner's alone.

    Raises:
        OSError: it cannot be, for example because it is a link or somebody else's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)
