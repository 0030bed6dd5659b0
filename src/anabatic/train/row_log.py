"""Which rows of the data each step has read: `rows-rank-N.jsonl`, to prove that none comes twice and none is lost.

A line is `{"step", "rows": [[source, row, pass, start, tokens], ...]}`: number of the source as in data.train, of the
document or conversation in it, of the pass over the source, first token and tokens. `"dropped": true` marks rows that
were skipped by `optim.on_bad_step: rewind` before that step. Ranks that share their data with a neighbour
(parallel.context, parallel.tensor) write none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from anabatic.core.json_reader import JsonlWriter, read_json_lines
from anabatic.core.paths import RunFolder, write_atomic
from anabatic.data.batching.packing import SegmentOrigin
from anabatic.parallel.world import World


def row_log_path(folder: RunFolder, rank: int) -> Path:
    """Return the file of a rank."""
    return folder.root / f"rows-rank-{rank}.jsonl"


class RowLog:
    """Appends this rank's rows. What the run will read again, because it continues from `step`, is cut off first.

    Raises:
        Failure: the file cannot be written.
    """

    def __init__(self, folder: RunFolder, world: World, step: int) -> None:
        self._path = row_log_path(folder, world.rank)
        paths = [self._path]
        if world.is_main_process:  # ranks that an earlier, larger run had
            names = folder.root.glob("rows-rank-*.jsonl")
            paths += [name for name in names if int(name.stem.rpartition("-")[2]) >= world.size]
        for file in paths:
            _truncate_rows(file, step)
        self._writer = JsonlWriter(self._path) if world.counts_batch else None

    def write(self, step: int, rows: Iterable[SegmentOrigin], dropped: bool = False) -> None:
        """Record what a step has read, or what was skipped before it."""
        if self._writer is not None:
            mark = {"dropped": True} if dropped else {}
            self._writer.write({"step": step, "rows": [list(row) for row in rows], **mark})

    def rewind_to(self, step: int) -> None:
        """Cut off what comes after `step`."""
        if self._writer is not None:
            self._writer.close()
            _truncate_rows(self._path, step)
            self._writer = JsonlWriter(self._path)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


def _truncate_rows(file: Path, step: int) -> None:
    if file.exists():
        kept = [json.dumps(row) + "\n" for row in read_json_lines(file) if row.get("step", step + 1) <= step]
        write_atomic(file, "".join(kept))
