"""Train on simulated NPUs, every rank forked from one process that has imported torch, and return what each rank cost.

    anabatic sim --npus 4 -- python benchmarks/sim_ranks.py FOLDER RANKS

`plan.py` and `layouts.py` call `train`, which starts this program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import npu_jobs
from anabatic_sim.simulation_report import ProcessCounters, read_processes

HCCL_POLL_SECONDS = 2.0
"""Pause after the first step. HCCL's watchdog keeps tensors of finished collectives until it looks after them again;
steps of a large model last longer than that, and DDP's first buckets are free when the second step makes new ones."""


class Rank(NamedTuple):
    """What one rank cost.

    Attributes:
        peak_bytes: of torch_npu's allocator, up to the end of the last step: not a checkpoint's copies after it.
    """

    peak_bytes: int
    counters: ProcessCounters


def train(words: Sequence[str], ranks: int, folder: Path) -> list[Rank]:
    """Run an `anabatic` command on as many simulated NPUs; `folder` is empty."""
    (folder / "words.json").write_text(json.dumps(list(words)))
    program = [sys.executable, __file__, str(folder), str(ranks)]
    sim = [sys.executable, "-m", "anabatic", "sim", "--npus", str(ranks), "--", *program]
    done = subprocess.run(sim, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    counters = read_processes(folder / "ranks" / "counters")
    peaks = [int(file.read_text()) for file in sorted(folder.glob("*.peak"))]
    if not len(counters) == len(peaks) == ranks:
        raise SystemExit(f"{ranks} ranks: {len(counters)} have left counters, {len(peaks)} a peak")
    return [Rank(peak, process) for peak, process in zip(peaks, counters, strict=True)]


def _run_rank(folder: Path) -> None:
    """Run the command in this rank; write the peak of its steps."""
    import torch

    from anabatic.cli.app import main as anabatic
    from anabatic.train.step import TrainStep

    run_step, peaks = TrainStep.run_step, [0]

    def record_peak(*given: Any, **named: Any) -> Any:
        batch = run_step(*given, **named)
        if not peaks[0]:
            time.sleep(HCCL_POLL_SECONDS)
        peaks[0] = torch.npu.max_memory_allocated()
        return batch

    TrainStep.run_step = record_peak  # type: ignore[method-assign]
    try:
        anabatic(json.loads((folder / "words.json").read_text()))  # ends in an exit, whatever its code
    finally:
        (folder / f"{os.environ.get('RANK', '0')}.peak").write_text(str(peaks[0]))


def main() -> None:
    warnings.filterwarnings("ignore")
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    npu_jobs.preload()
    npu_jobs.run_forked(_run_rank, folder, folder / "ranks", ranks)


if __name__ == "__main__":
    main()
