"""Logging: one plain line per message to stderr, from rank 0 only, and the lines of every rank to its own file."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from anabatic.core.formatting import escape_control_characters

LOGGER = logging.getLogger("anabatic")


def get_rank() -> int:
    """Return this process's rank as its launcher set it (`RANK`, 0 without a launcher)."""
    return int(os.environ.get("RANK", "0"))


class _LineFormatter(logging.Formatter):
    def __init__(self, colour: bool) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        coloured: str = getattr(record, "coloured", "") if self.colour else ""
        text = coloured or escape_control_characters(record.getMessage(), kept="\n\t")
        if record.levelno >= logging.WARNING:
            level = record.levelname.lower()
            text = f"\x1b[33m{level}:\x1b[0m {text}" if self.colour else f"{level}: {text}"
        return text


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:  # the name is logging's
        """Stop writing the file, with one warning: by default a full disk fills the terminal with tracebacks."""
        reason = sys.exc_info()[1]
        LOGGER.removeHandler(self)
        with contextlib.suppress(OSError):  # closing retries the write of the buffer
            self.close()
        warn(f"{self.baseFilename} is not written any more: {reason}")


def should_use_colour() -> bool:
    """Return whether stderr is a terminal and `NO_COLOR` (no-color.org) is not set."""
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")


def setup_logging(verbose: bool = False) -> None:
    """Send messages to stderr, from rank 0 only. Called once by the command line."""
    LOGGER.handlers.clear()
    LOGGER.propagate = False
    LOGGER.setLevel(logging.DEBUG if verbose else logging.INFO)
    if get_rank() == 0:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_LineFormatter(should_use_colour()))
        LOGGER.addHandler(handler)


def add_log_file(path: Path) -> None:
    """Also append the messages of this process, with the time, to `path` (`rank-N.log` in a run folder)."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)


@contextlib.contextmanager
def keep_handlers() -> Iterator[None]:
    """Close the log files that are added inside: for jobs in a process that goes on afterwards."""
    before = list(LOGGER.handlers)
    try:
        yield
    finally:
        for handler in [handler for handler in LOGGER.handlers if handler not in before]:
            LOGGER.removeHandler(handler)
            handler.close()


def info(message: str, coloured: str = "") -> None:
    """Log one line for the user; `coloured` replaces it on a terminal with colours."""
    LOGGER.info(message, extra={"coloured": coloured})


def info_in_signal_handler(message: str) -> None:
    """Log one line from a signal handler: the code that it interrupts may be in the middle of writing a line itself."""
    threading.Thread(target=info, args=(message,), name="signal-message").start()


def warn(message: str) -> None:
    """Log one line that the user should act on."""
    LOGGER.warning(message)


def debug(message: str) -> None:
    """Log one line for the developer (`--debug`)."""
    LOGGER.debug(message)
