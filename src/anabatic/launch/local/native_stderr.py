"""Standard error of native libraries in the ranks: kept in the logs, explained if a rank left no message."""

from __future__ import annotations

import os
from pathlib import Path

from anabatic.core import relaunch
from anabatic.core.paths import RunFolder
from anabatic.launch.local.worker_reports import WorkerReport

_MAX_TAIL_BYTES = 65536
"""Most bytes read from the end, where the reason for a crash is."""


def read_stderr_tail(folder: Path, rank: int) -> str:
    """Return the tail of the native standard error of a rank in one start; empty if there is none."""
    path = folder / relaunch.NATIVE_STDERR_FILE.format(rank)
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def append_to_rank_logs(folder: Path, ranks: list[int], out: Path | None) -> None:
    """Append the native standard error to the ranks' logs in the run folder."""
    for rank in ranks if out is not None and out.is_dir() else ():
        if text := read_stderr_tail(folder, rank):
            with open(RunFolder(str(out)).log_path(rank), "a", encoding="utf-8") as log:
                log.write(text if text.endswith("\n") else f"{text}\n")


def explain_stderr(text: str) -> str:
    """Return one line from the knowledge of `anabatic explain`; empty if nothing matches."""
    if not text or os.environ.get(relaunch.EXPLAIN_VARIABLE) == "0":
        return ""
    from anabatic.doctor import knowledge_base, language
    from anabatic.doctor.explain import diagnosis, rendering

    return rendering.format_hint(
        diagnosis.explain_text(text, knowledge_base.load_knowledge()), language.choose_language(None, os.environ)
    )


def explain_failure(folder: Path, report: WorkerReport) -> str:
    """Return the hint about the first message, for a rank that was killed before it could print one."""
    if report.silent_ranks or not report.messages:
        return ""
    return explain_stderr(
        "\n".join([report.format_messages()[0], *(read_stderr_tail(folder, rank) for rank in report.failed)])
    )
