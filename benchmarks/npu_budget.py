"""What a step costs on simulated NPUs, job by job: operators, host waits, memory, collectives beside their least.

    python benchmarks/npu_budget.py [--only lora,zero] [--write] [--docs] [--read] [--operators]

`--write` renews the budget (npu_budget.json), which `tests/npu_sim/test_budget.py` holds; `--docs` writes the tables of
docs/*/guides/sim.md; `--read` takes the budget's figures and measures nothing. The counts are those of one step that
neither logs nor follows one that does; memory is the peak of torch_npu's allocator over the whole job. All fine-tune a
Qwen2 of 4 layers and width 256, bf16, 512 tokens a step on each rank; the peers are transformers' Trainer with PEFT, on
the same rows, padded. Rows with pictures are those of `vision.py`, with its Qwen3-VL: 1,024 tokens a step, and four
rows of the peers, which have about as many, padded or one at a time.

Collectives beside theory, for a model of P parameters in B blocks, N ranks, weights in bf16 and gradients in fp32. Sent
by a device: an all-reduce of S bytes 2 (N - 1) / N S, a gather or reduce-scatter of S bytes in all (N - 1) / N S
(Patarasuk and Yuan, 2009, doi:10.1016/j.jpdc.2008.09.002).

    ddp     gradients once: all-reduce of 4 P              (ZeRO, arXiv 1910.02054, section 7)
    zero2   weights once: gather of 2 P; gradients once: reduce-scatter of 4 P
    zero3   weights twice, but those outside the blocks; gradients once
    tensor  two all-reduces in a block in either direction, of tokens x width x 2 (Megatron-LM, arXiv 1909.08053,
            section 3), the first block's input included: its gradient goes on to the embedding

Every strategy adds one all-reduce of a few numbers: loss, targets and the gradient's norm of all ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import npu_jobs
import plan_tables
from anabatic_sim.simulation_report import ProcessCounters, read_processes
from npu_jobs import JOBS
from option_types import parts_of

MIB = 2**20
BUDGET = Path(__file__).with_name("npu_budget.json")
COMMAND = "python benchmarks/npu_budget.py --write"
MEMORY_SLACK, MEMORY_SLACK_OF_RANKS = 1.02, 1.15
"""Of peaks. Blocks that a collective still reads are free when it has ended: 110 or 124 MiB with DDP, run to run."""
PEERS = {"full": "Trainer, full", "lora": "Trainer + PEFT, lora", "lora, pictures": "Trainer + PEFT, pictures"}

Counts = dict[str, Any]


def versions() -> dict[str, str]:
    """What the counts depend on beside our own code."""
    import torch
    import transformers

    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def simulated(folder: Path, names: Iterable[str]) -> list[str]:
    """The command that runs jobs in `folder`."""
    jobs = [sys.executable, str(Path(__file__).with_name("npu_jobs.py")), str(folder), *names]
    return [sys.executable, "-m", "anabatic", "sim", "--npus", "2", "--", *jobs]


def counts(folder: Path, name: str) -> Counts:
    """What the last step of a job has cost: the rank that had most."""
    ranks = [_counts(process) for process in read_processes(folder / name / "counters")]
    if len(ranks) != JOBS[name].ranks:
        raise SystemExit(f"{name}: {len(ranks)} processes have counted, not {JOBS[name].ranks}")
    most = max(ranks, key=lambda rank: (rank["operators"], rank["waits"]))
    peaks = [int(file.read_text()) for file in (folder / name).glob("*.peak")]
    return {**most, "peak_bytes": max(peaks)}


def _counts(process: ProcessCounters) -> Counts:
    steps = [
        {column: after[column] - before[column] for column in ("operators", "syncs")}
        for before, after in zip(process.steps, process.steps[1:], strict=False)
    ]
    tables = {
        kind: {key: row for key, row in sorted(process.tables[kind].items()) if row["last_step_calls"]}
        for kind in ("operators", "collectives", "syncs")
    }
    return {
        "operators": int(steps[-1]["operators"]),
        "waits": int(steps[-1]["syncs"]),
        "waits_with_log": int(max(step["syncs"] for step in steps)),
        "collectives": {
            key: {"calls": int(row["last_step_calls"]), "bytes": int(row["last_step_bytes"])}
            for key, row in tables["collectives"].items()
        },
        "by_operator": {key: int(row["last_step_calls"]) for key, row in tables["operators"].items()},
        "lines": [re.sub(r"^.*/(?:site-packages|src)/", "", key).replace("\t", ": ") for key in tables["syncs"]],
    }


def measure(names: Iterable[str]) -> dict[str, Counts]:
    """Run jobs in one simulation."""
    names = list(names)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        done = subprocess.run(simulated(folder, names), capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return {name: counts(folder, name) for name in names}


def sent_bytes(collectives: Mapping[str, Mapping[str, int]], ranks: int) -> float:
    """Bytes that one device sends; the simulator counts the whole tensor of a collective."""
    share = {"all_reduce": 2 * (ranks - 1) / ranks}
    share["all_gather"] = share["reduce_scatter"] = (ranks - 1) / ranks
    return sum(share[kind] * row["bytes"] for kind, row in collectives.items())


def parameters() -> tuple[int, int, int]:
    """Return those of the whole model, of a block, and of the adapters."""
    width, inner, head = npu_jobs.WIDTH, npu_jobs.INNER, npu_jobs.WIDTH // npu_jobs.HEADS
    narrow = npu_jobs.KV_HEADS * head
    shapes = (
        [(width, width), (width, narrow), (width, narrow), (width, width)] + 2 * [(width, inner)] + [(inner, width)]
    )
    block = sum(a * b for a, b in shapes) + width + 2 * narrow + 2 * width  # biases of q, k, v; two norms
    adapters = npu_jobs.LAYERS * sum(npu_jobs.RANK * (a + b) for a, b in shapes)
    return npu_jobs.VOCABULARY * width + npu_jobs.LAYERS * block + width, block, adapters


def least(name: str) -> tuple[int, float] | None:
    """Calls and sent bytes of a step, at least; None for one rank.

    Calls: with zero2 and zero3 one for every block and one for what lies outside of them, as gathering at once would
    keep the whole model in memory; with ddp one.
    """
    ranks = JOBS[name].ranks
    if ranks == 1:
        return None
    whole, block, adapters = parameters()
    blocks, share = npu_jobs.LAYERS, (ranks - 1) / ranks
    tokens = npu_jobs.TOKENS * npu_jobs.WIDTH * 2
    calls, data = {
        "full, ddp": (1, 2 * share * 4 * whole),
        "lora, ddp": (1, 2 * share * 4 * adapters),
        "full, zero2": (2 * (blocks + 1), share * (2 + 4) * whole),
        "full, zero3": (3 * blocks + 2, share * ((2 + 4) * whole + 2 * blocks * block)),
        "full, tensor": (4 * blocks, 4 * blocks * 2 * share * tokens),
    }[name]
    return calls + 1, data


def compare(found: Mapping[str, Counts], budget: Mapping[str, Any]) -> list[str]:
    """Return what exceeds the budget, or lies so far below it that the budget holds nothing any more."""
    problems = []
    same = budget["versions"] == versions()
    for name, now in found.items():
        then = budget["jobs"][name]
        slack = 1.0 if same else 1.1  # other releases launch other operators
        if now["operators"] > slack * then["operators"] or (same and now["operators"] < 0.97 * then["operators"]):
            problems.append(f"{name}: {now['operators']} operators a step, budget {then['operators']}")
            problems += [f"  {line}" for line in _difference(now["by_operator"], then["by_operator"])]
        if now["waits"] > then["waits"] or now["waits_with_log"] > then["waits_with_log"]:
            problems.append(
                f"{name}: the host waits {now['waits']} times a step, {now['waits_with_log']} in one that logs; budget"
                f" {then['waits']} and {then['waits_with_log']}"
            )
            problems += [f"  {line}" for line in now["lines"]]
        room = MEMORY_SLACK if JOBS[name].ranks == 1 else MEMORY_SLACK_OF_RANKS
        if now["peak_bytes"] > room * slack * then["peak_bytes"]:
            problems.append(
                f"{name}: peak {now['peak_bytes'] / MIB:.1f} MiB, budget {then['peak_bytes'] / MIB:.1f} MiB"
            )
        if now["collectives"] != then["collectives"]:
            problems.append(f"{name}: collectives {now['collectives']}, budget {then['collectives']}")
    return [*problems, f"if all of this is wanted: {COMMAND}"] if problems else []


def _difference(now: Mapping[str, int], then: Mapping[str, int]) -> list[str]:
    changed = {key: now.get(key, 0) - then.get(key, 0) for key in sorted({*now, *then})}
    return [f"{key} {then.get(key, 0)} -> {now.get(key, 0)} ({more:+})" for key, more in changed.items() if more]


def _print(found: Mapping[str, Counts], show_operators: bool) -> None:
    head = f"  {'':22} {'operators':>9} {'waits':>6} {'log':>4} {'peak MiB':>9}"
    print(f"{head} {'calls':>6} {'least':>6} {'MiB':>7} {'least':>7}")
    for name, one in found.items():
        line = f"  {name:22} {one['operators']:9} {one['waits']:6} {one['waits_with_log']:4}"
        line += f" {one['peak_bytes'] / MIB:9.1f}"
        if (floor := least(name)) is not None:
            sent = sent_bytes(one["collectives"], JOBS[name].ranks) / MIB
            calls = sum(row["calls"] for row in one["collectives"].values())
            line += f" {calls:6} {floor[0]:6} {sent:7.2f} {floor[1] / MIB:7.2f}"
        print(line)
        if one["collectives"]:
            print(f"      {one['collectives']}")
        if show_operators:
            for key, calls in sorted(one["by_operator"].items(), key=lambda row: -row[1]):
                print(f"      {calls:5} {key}")
            for key in one["lines"]:
                print(f"      wait: {key}")
    for ours, peer in PEERS.items():
        if ours in found and peer in found:
            a, b = found[ours], found[peer]
            print(
                f"  {ours} / {peer}: operators {a['operators'] / b['operators']:.2f}x,"
                f" peak {a['peak_bytes'] / b['peak_bytes']:.2f}x"
            )


def _write_docs(found: Mapping[str, Counts]) -> None:
    rows = []
    for name, one in found.items():
        row = [
            name if JOBS[name].ranks == 1 else f"{name}, {JOBS[name].ranks} NPUs",
            f"{one['operators']:,}",
            str(one["waits"]),
            f"{one['peak_bytes'] / MIB:.1f}",
        ]
        if (floor := least(name)) is None:
            rows.append([*row, *(4 * ["-"])])
            continue
        calls = sum(kind["calls"] for kind in one["collectives"].values())
        sent = sent_bytes(one["collectives"], JOBS[name].ranks) / MIB
        rows.append([*row, str(calls), str(floor[0]), f"{sent:.2f}", f"{floor[1] / MIB:.2f}"])
    head = ["job", "operators", "host waits", "peak MiB", "collectives", "at least", "sent MiB", "at least"]
    plan_tables.write("npu_budget", head, rows, guide="sim")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=parts_of(JOBS), help=f"parts of names, with commas between them: {'; '.join(JOBS)}"
    )
    parser.add_argument("--write", action="store_true", help="renew the budget")
    parser.add_argument("--docs", action="store_true", help="write the tables into the guides")
    parser.add_argument("--read", action="store_true", help="take the figures of the budget")
    parser.add_argument("--operators", action="store_true", help="list the operators of a step")
    options = parser.parse_args()
    names = options.only or list(JOBS)
    if options.read:
        read = json.loads(BUDGET.read_text(encoding="utf-8"))["jobs"]
        found = {name: read[name] for name in names}
    else:
        found = measure(names)
    _print(found, options.operators)
    if options.docs:
        _write_docs(found)
    if options.write:
        old = json.loads(BUDGET.read_text(encoding="utf-8"))["jobs"] if BUDGET.exists() and options.only else {}
        jobs = {name: (old | found)[name] for name in JOBS if name in old | found}
        BUDGET.write_text(json.dumps({"versions": versions(), "jobs": jobs}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
