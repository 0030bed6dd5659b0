"""How often a scheduler may start a job again that has come no further: a limit shorter than its start has no end.

`restarts.json` in the run folder holds, for one job of Slurm, the newest checkpoint at each start. Every machine of a
job reads there what the starts before have found, and so decides as the others do. SLURM_JOB_ID and SLURM_RESTART_COUNT
are those of sbatch(1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from anabatic.core.errors import Failure
from anabatic.core.paths import write_atomic

RESTARTS_FILE = "restarts.json"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def require_progress(out: Path, most: int, first: bool, environ: Mapping[str, str]) -> None:
    """Refuse to begin once more where the starts before have left no newer checkpoint; note this start.

    Args:
        out: run folder.
        most: starts in a row without progress; 0: any number.
        first: this machine writes the note.
        environ: tells which job this is, and how often it was put back into the queue.

    Raises:
        Failure: it was started so often in vain.
    """
    job, count = environ.get("SLURM_JOB_ID", ""), int(environ.get("SLURM_RESTART_COUNT") or 0)
    if not job or not most:
        return
    here = _find_newest_checkpoint_step(out)
    steps = _read_restarts(out / RESTARTS_FILE, job) if count else {}
    vain = 0
    while steps.get(count - vain - 1) == here:
        vain += 1
    if vain >= most:
        where = f"after step {here}" if here else "with a first checkpoint"
        raise Failure(
            f"Slurm has started job {job} {vain} times in a row, and none has come to save anything new {where}",
            "give it more time than its start and one step take (--option=--time=..., the partition's GraceTime);"
            " --max-requeues 0 tries for ever",
        )
    if first:
        out.mkdir(parents=True, exist_ok=True)
        told = {str(number): step for number, step in {**steps, count: here}.items()}
        write_atomic(out / RESTARTS_FILE, json.dumps({"job": job, "steps": told}))


def _find_newest_checkpoint_step(out: Path) -> int:
    """Step of the newest checkpoint; 0 without one."""
    names = [path.name for path in out.glob("checkpoint-*")]
    return max((int(found[1]) for name in names if (found := _CHECKPOINT_NAME.fullmatch(name))), default=0)


def _read_restarts(path: Path, job: str) -> dict[int, int]:
    """Number of the start -> step of the newest checkpoint then; nothing of another job, or without a file."""
    if not path.is_file():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    return {int(number): step for number, step in told["steps"].items()} if told["job"] == job else {}
