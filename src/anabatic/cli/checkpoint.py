"""`anabatic checkpoint list|verify`: what a run has saved, and whether it is whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

EXIT_BROKEN = 1
"""Exit code if a file differs from what was written, or if it is not known."""


def list_checkpoints(path: Path, /, *, json_: bool = False) -> None:
    """List the checkpoints of a run. Only file sizes are compared; `verify` reads the contents.

    Parameters
    ----------
    path
        Run folder, or one checkpoint.
    json_
        Print JSON.
    """
    from anabatic.train.checkpoint import listing

    rows = listing.list_checkpoints(path.expanduser())
    text = json.dumps(rows, indent=2) + "\n" if json_ else listing.format_table(rows)
    sys.stdout.write(text)


def verify(path: Path, /, *, json_: bool = False) -> int:
    """Compare every file with its size and checksum. Exit code 1 if a checkpoint is incomplete or damaged.

    Parameters
    ----------
    path
        Run folder, or one checkpoint.
    json_
        Print JSON.
    """
    from anabatic.core.progress import show_read_progress
    from anabatic.train.checkpoint import listing

    with show_read_progress() as count_bytes:
        results = listing.verify_checkpoints(path.expanduser(), count_bytes)
    if json_:
        sys.stdout.write(json.dumps([result.to_dict() for result in results], indent=2) + "\n")
    else:
        sys.stdout.write("".join(result.format_text() for result in results))
    return EXIT_BROKEN if not all(result.is_complete for result in results) else 0
