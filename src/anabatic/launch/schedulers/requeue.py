"""Limit requeues without progress: a job whose time limit is shorter than its start would be requeued for ever.

`restarts.json` in the run folder holds, for one Slurm job, the newest checkpoint at each start. All machines of a job
read the same file, so all decide alike. SLURM_JOB_ID and SLURM_RESTART_COUNT are described in sbatch(1).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from anabatic.core import json_reader, log
from anabatic.core.errors import Failure
from anabatic.core.formatting import parse_whole
from anabatic.core.paths import write_atomic

RESTARTS_FILE = "restarts.json"
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def require_progress(out: Path, max_starts: int, is_writer: bool, environ: Mapping[str, str]) -> None:
    """Refuse another start if the last starts left no newer checkpoint; record this start.

    Args:
        out: run folder.
        max_starts: most starts in a row without progress; 0: any number.
        is_writer: this machine writes the record.
        environ: environment with the Slurm job and its number of requeues.

    Raises:
        Failure: too many starts made no progress.
    """
    job, count = environ.get("SLURM_JOB_ID", ""), parse_whole(environ.get("SLURM_RESTART_COUNT")) or 0
    if not job or not max_starts:
        return
    newest_step = _find_newest_checkpoint_step(out)
    steps = _read_restarts(out / RESTARTS_FILE, job) if count else {}
    fruitless_starts = 0
    while steps.get(count - fruitless_starts - 1) == newest_step:
        fruitless_starts += 1
    if fruitless_starts >= max_starts:
        goal = f"after step {newest_step}" if newest_step else "with a first checkpoint"
        raise Failure(
            f"Slurm has started job {job} {fruitless_starts} times in a row, and none has come to save anything new"
            f" {goal}",
            "give it more time than its start and one step take (--option=--time=..., the partition's GraceTime);"
            " --max-requeues 0 tries for ever",
        )
    if is_writer:
        out.mkdir(parents=True, exist_ok=True)
        recorded_steps = {str(start): step for start, step in {**steps, count: newest_step}.items()}
        write_atomic(out / RESTARTS_FILE, json.dumps({"job": job, "steps": recorded_steps}))


def _find_newest_checkpoint_step(out: Path) -> int:
    """Return the step of the newest checkpoint; 0 without one."""
    names = [path.name for path in out.glob("checkpoint-*")]
    return max((int(match[1]) for name in names if (match := _CHECKPOINT_NAME.fullmatch(name))), default=0)


def _read_restarts(path: Path, job: str) -> dict[int, int]:
    """Return start -> step of the newest checkpoint then; empty for another job, and without a file that is whole."""
    if not path.is_file():
        return {}
    try:
        restarts = json_reader.read_json_file(path)
        if restarts["job"] != job:
            return {}
        numbers = {parse_whole(start): step for start, step in restarts["steps"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warn(f"{path} cannot be read ({error}): starts without progress are counted anew")
        return {}
    return {start: step for start, step in numbers.items() if start is not None and type(step) is int}
