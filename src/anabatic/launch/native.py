"""What libraries wrote to the standard error of the ranks: kept in the logs, explained where a rank left no message."""

from __future__ import annotations

import os
from pathlib import Path

from anabatic.core import child
from anabatic.core.paths import RunFolder
from anabatic.launch.reports import Told

_MOST = 65536
"""Bytes of the end that are read: what took a process down stands there."""


def text(folder: Path, rank: int) -> str:
    """The end of what the libraries of a rank wrote in one start; empty when they wrote nothing."""
    path = folder / child.NATIVE.format(rank)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _MOST))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def keep(folder: Path, ranks: list[int], out: Path | None) -> None:
    """Add it to the ranks' logs in the run folder."""
    for rank in ranks if out is not None and out.is_dir() else ():
        if written := text(folder, rank):
            with open(RunFolder(str(out)).log(rank), "a", encoding="utf-8") as log:
                log.write(written if written.endswith("\n") else f"{written}\n")


def hint(written: str) -> str:
    """One line from what `anabatic explain` knows of it; empty when that is nothing."""
    if not written or os.environ.get(child.EXPLAIN) == "0":
        return ""
    from anabatic.doctor import explain, explain_show, knowledge, language

    return explain_show.one_line(explain.explain_text(written, knowledge.load()), language.choose(None, os.environ))


def explained(folder: Path, told: Told) -> str:
    """The hint about the first message, for a rank that was taken down before it could explain itself."""
    if told.silent or not told.messages:
        return ""
    return hint("\n".join([told.lines()[0], *(text(folder, rank) for rank in told.failed)]))
