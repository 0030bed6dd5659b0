"""What a step of each layout of ranks costs: on simulated NPUs operators, host waits, collectives and memory; on a CPU
tokens per CPU second beside the same job in one process.

    python benchmarks/layouts.py [--only zero3,expert] [--device npu|cpu] [--rounds 3] [--json FILE] [--docs]
        [--read FILE,FILE]

Layouts and models are the rows of `plan.py` with several ranks. Counts are those of one step that neither logs nor
follows one that does, of the rank with most operators; memory is that of the fullest rank. The bytes of a collective
are its tensor's, as the simulator counts them; what a rank sends of them is in `npu_budget.py`.

`--device cpu` trains the layouts of two and four ranks over gloo in fp32, each process with one thread, and the same
global batch in one process, in turns. The ratio is tokens per CPU second of all processes together, beside one: 1 where
dividing costs nothing. `--docs` writes what is measured or read into the guides' table, in which other rows and cells
stay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plan
import plan_tables
import sim_ranks
from option_types import parts_of, positive_int

MIB = 2**20
LAYOUTS = {row.name: row for row in plan.ROWS if row.npus > 1}
MAX_CPU_RANKS = 4
CPU_TOKENS = 512
"""Of a micro-batch on a CPU."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

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


def run_rank(folder: Path) -> None:
    """Train in this process, a step for every line on standard input; a line of JSON tells what it took."""
    from anabatic.cli.app import main as anabatic
    from anabatic.train.step import TrainStep

    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run_step = TrainStep.run_step

    def take_turn(*given: Any, **named: Any) -> Any:
        if not sys.stdin.readline():
            os._exit(0)  # the comparison is over; nothing is saved
        cpu = time.process_time()
        batch = run_step(*given, **named)
        print(json.dumps(time.process_time() - cpu), file=lines, flush=True)
        return batch

    TrainStep.run_step = take_turn  # type: ignore[method-assign]
    anabatic([*json.loads((folder / "words.json").read_text()), "--device.threads", "1"])


class Side:
    """The processes of one side of a comparison."""

    def __init__(self, words: Sequence[str], ranks: int, rounds: int, folder: Path) -> None:
        from anabatic_testing.multiprocess import find_free_port

        folder.mkdir()
        given = {"--out": str(folder / "run"), "--schedule.max-steps": str(rounds + 2)}
        (folder / "words.json").write_text(json.dumps(_set(words, given)))
        common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
        self.log = (folder / "log").open("w+")
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(ranks)
        ]

    def take_turn(self) -> float:
        """CPU seconds of a step, of all processes together."""
        for process in self.processes:
            print(file=process.stdin, flush=True)
        told = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(told):
            self.log.seek(0)
            raise SystemExit(self.log.read()[-3000:])
        return sum(map(float, told))

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()  # type: ignore[union-attr]
        for process in self.processes:
            process.wait()
        self.log.close()


def _set(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The same words with other values of these options."""
    return [values.get(before, word) for before, word in zip(["", *words], words, strict=False)]


def _in_one_process(words: Sequence[str], layout: Sequence[str]) -> list[str]:
    """The same command without the options that divide it among ranks."""
    kept = list(words[: len(words) - len(layout)])
    others = iter(layout)
    for word in others:
        if word.startswith("--parallel."):
            next(others)
        else:
            kept.append(word)
    return kept


def compare(row: plan.Row, rounds: int) -> Cost:
    """Train a layout and one process in turns on the CPU, the first step of each aside."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        plan.prepare(folder, row.shape)
        divided = plan.command(row._replace(tokens=CPU_TOKENS), folder, "cpu")
        sides = [
            Side(_in_one_process(divided, row.options) if ranks == 1 else divided, ranks, rounds, folder / str(ranks))
            for ranks in (1, row.npus)
        ]
        try:
            turns = [[side.take_turn() for side in sides] for _ in range(rounds + 1)][1:]
        finally:
            for side in sides:
                side.close()
    ratios = sorted(one / several for one, several in turns)
    return {"name": row.name, "cpu_ratio": statistics.median(ratios), "cpu_range": [ratios[0], ratios[-1]]}


def _collective_cells(one: Cost) -> list[str]:
    """MiB of each kind of collective in a step, and of all others."""
    kinds = {kind: row["bytes"] / MIB for kind, row in one["collectives"].items()}
    others = sum(size for kind, size in kinds.items() if kind not in KINDS)
    return [f"{size:.1f}" if size >= 0.05 else "-" for size in (*(kinds.get(kind, 0.0) for kind in KINDS), others)]


def _cells(one: Cost) -> list[str]:
    """The row of a table; what was not measured is empty."""
    row = LAYOUTS[one["name"]]
    cells = [one["name"], str(row.npus)]
    if "operators" in one:
        calls = sum(kind["calls"] for kind in one["collectives"].values())
        cells += [f"{one['tokens']:,}", f"{one['operators']:,}", str(one["waits"]), str(calls)]
        cells += [*_collective_cells(one), f"{one['peak_bytes'] / MIB:.0f}"]
    else:
        cells += [""] * 10
    return [*cells, f"{one['cpu_ratio']:.2f}" if "cpu_ratio" in one else ""]


HEAD = ["layout", "NPUs", "tokens", "operators", "host waits", "collectives", *KINDS, "others", "peak MiB", "CPU"]


def _read(text: str) -> list[Cost]:
    """Costs of earlier --json files, those of one layout together."""
    found: dict[str, Cost] = {}
    for file in text.split(","):
        try:
            costs = json.loads(Path(file).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{file} cannot be read: {error}") from None
        for one in costs:
            if one["name"] not in LAYOUTS:
                raise argparse.ArgumentTypeError(f"{file}: there is no layout {one['name']!r}")
            found[one["name"]] = {**found.get(one["name"], {}), **one}
    return [found[name] for name in LAYOUTS if name in found]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=parts_of(LAYOUTS), default=list(LAYOUTS), help="parts of names, with commas")
    parser.add_argument("--device", choices=("npu", "cpu"), default="npu")
    parser.add_argument("--rounds", type=positive_int, default=3, help="steps of each side on a CPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--read", type=_read, help="take the figures of earlier --json files, with commas between them")
    parser.add_argument("--docs", action="store_true", help="write the table into the guides")
    options = parser.parse_args()
    found: list[Cost] = options.read or []
    if options.read is None:
        rows = [LAYOUTS[name] for name in options.only]
        if options.device == "cpu":
            rows = [row for row in rows if row.npus <= MAX_CPU_RANKS]
        for row in rows:
            found.append(measure(row) if options.device == "npu" else compare(row, options.rounds))
            print("  " + " | ".join(_cells(found[-1])), flush=True)
    else:
        print(plan_tables.table(HEAD, [_cells(one) for one in found]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.docs:
        lines = plan_tables.merge("layouts", list(LAYOUTS), [_cells(one) for one in found], guide="parallel")
        plan_tables.write("layouts", HEAD, lines, guide="parallel")


if __name__ == "__main__":
    main()
