"""What libraries wrote to the standard error of the ranks: kept in the logs, explained where a rank left no message."""

from __future__ import annotations

import os
from pathlib import Path

from anabatic.core import relaunch
from anabatic.core.paths import RunFolder
from anabatic.launch.local.worker_reports import WorkerReport

_MAX_TAIL_BYTES = 65536
"""Bytes of the end that are read: what took a process down stands there."""


def read_stderr_tail(folder: Path, rank: int) -> str:
    """The end of what the libraries of a rank wrote in one start; empty when they wrote nothing."""
    path = folder / relaunch.NATIVE_STDERR_FILE.format(rank)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def append_to_rank_logs(folder: Path, ranks: list[int], out: Path | None) -> None:
    """Add it to the ranks' logs in the run folder."""
    for rank in ranks if out is not None and out.is_dir() else ():
        if written := read_stderr_tail(folder, rank):
            with open(RunFolder(str(out)).log_path(rank), "a", encoding="utf-8") as log:
                log.write(written if written.endswith("\n") else f"{written}\n")


def explain_stderr(written: str) -> str:
    """One line from what `anabatic explain` knows of it; empty when that is nothing."""
    if not written or os.environ.get(relaunch.EXPLAIN_VARIABLE) == "0":
        return ""
    from anabatic.doctor import knowledge_base, language
    from anabatic.doctor.explain import diagnosis, rendering

    return rendering.format_hint(
        diagnosis.explain_text(written, knowledge_base.load_knowledge()), language.choose_language(None, os.environ)
    )


def explain_failure(folder: Path, told: WorkerReport) -> str:
    """The hint about the first message, for a rank that was taken down before it could explain itself."""
    if told.silent_ranks or not told.messages:
        return ""
    return explain_stderr(
        "\n".join([told.format_messages()[0], *(read_stderr_tail(folder, rank) for rank in told.failed)])
    )
