"""What a step of each layout of ranks costs: on simulated NPUs operators, host waits, collectives and memory; on a CPU
tokens a second beside the same job in one process.

    python benchmarks/layouts.py [--only zero3,expert] [--cpu] [--rounds 3] [--json FILE] [--docs] [--read FILE]

Layouts and models are the rows of `plan.py` with several ranks. Counts are those of one step that neither logs nor
follows one that does, of the rank with most operators; memory is that of the fullest rank. The bytes of a collective
are its tensor's, as the simulator counts them, before and after what each rank sends (`npu_budget.py`).

`--cpu` trains layouts of two and four ranks over gloo, each process with one thread, and the same tokens in one process,
in turns. What counts is CPU time: of all processes together, per token. Ideal is 1: ranks divide the work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plan
import plan_tables
import sim_ranks
from option_types import parts_of, positive_int

MIB = 2**20
LAYOUTS = {row.name: row for row in plan.ROWS if row.npus > 1}
MAX_CPU_RANKS = 4
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "broadcast")

Cost = dict[str, Any]


def describe(ranks: Sequence[sim_ranks.Rank], run_folder: Path) -> Cost:
    """Return what the counted step has cost."""
    counted = [_count(rank) for rank in ranks]
    most = max(counted, key=lambda one: (one["operators"], one["waits"]))
    return {**most, "peak_bytes": max(rank.peak_bytes for rank in ranks), "tokens": _tokens_per_step(run_folder)}


def _count(rank: sim_ranks.Rank) -> Cost:
    before, after = rank.counters.steps[-2:]
    return {
        "operators": int(after["operators"] - before["operators"]),
        "waits": int(after["syncs"] - before["syncs"]),
        "collectives": {
            kind: {"calls": int(row["last_step_calls"]), "bytes": int(row["last_step_bytes"])}
            for kind, row in sorted(rank.counters.tables["collectives"].items())
            if row["last_step_calls"]
        },
    }


def _tokens_per_step(run_folder: Path) -> int:
    """Tokens of a step of all ranks, as the run has logged them."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "train"][-1]
    return round(last["tokens"] / last["step"])


def measure(row: plan.Row) -> Cost:
    """Train a layout on simulated NPUs."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan.prepare(folder, row.shape)
        (ranks := folder / "ranks").mkdir()
        found = sim_ranks.train(plan.command(row, folder, "npu"), row.npus, ranks)
        return {"name": row.name, **describe(found, folder / "run")}
