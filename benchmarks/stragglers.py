"""Slow devices, slow links and flipped bits on simulated NPUs: how many of them a training names, and nothing else.

    python benchmarks/stragglers.py [CASES [QUIET_RUNS]]

Each case trains a small model in four processes with one random fault on one of the four devices. The training must
name that rank and that kind of fault, and no other. Then the same training runs without a fault and must name nothing.
All trainings are forked inside one simulation.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

RANKS, STEPS, LOG_EVERY, CHECK_EVERY = 4, 12, 2, 4
TOKENS = 64
MAX_FLIP = 144
"""Reads of weights in the steps of a training, twelve in each."""
KINDS = ("slow", "slow-link", "flip")
NAMES = {"slow": "device", "slow-link": "link", "flip": "corrupt_copy"}
_INSIDE = "--inside"


def draw_fault(draw: random.Random, number: int) -> tuple[str, int, str]:
    """Return a random (kind, device, fault): the kinds in turn."""
    kind, device = KINDS[number % len(KINDS)], draw.randrange(RANKS)
    if kind == "slow":  # on the chip's predicted clock, where small operators wait for the host: less is not felt
        return kind, device, f"slow@{device}={draw.uniform(8, 16):.1f}"
    if kind == "slow-link":
        return kind, device, f"slow-link@{device}={draw.uniform(30, 80):.0f}"
    return kind, device, f"flip@{device}#{draw.randrange(1, MAX_FLIP)}"


def read_findings(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return (what, ranks) of all that a training has named."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "straggler":
            found.append((event["reason"], (event["rank"],)))
        elif event["event"] == "corrupt_copy":
            found.append(("corrupt_copy", tuple(event["ranks"])))
    return found


def _prepare(folder: Path) -> None:
    from anabatic_testing.tiny_models import save_tiny_chat_model

    save_tiny_chat_model(folder)
    rows = [{"query": f"the wind {number}", "response": "moves upward"} for number in range(400)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _run_training(folder: Path) -> None:
    from anabatic.cli.app import main as run_command

    options: dict[str, object] = {
        "model": folder / "model",
        "data.train": folder / "rows.jsonl",
        "data.valid-fraction": 0,
        "out": "run",
        "device.threads": 1,
        "batch.seq-len": TOKENS,
        "batch.micro-batch-tokens": TOKENS,
        "batch.global-batch-tokens": RANKS * TOKENS,
        "schedule.max-steps": STEPS,
        "log.every": LOG_EVERY,
        "log.samples": 0,
        "log.device-every": 0,
        "eval.every": 0,
        "parallel.check-replicas": CHECK_EVERY,
    }
    run_command(["sft", *(f"--{name}={value}" for name, value in options.items())])


def _train(folder: Path, out: Path) -> list[tuple[str, tuple[int, ...]]]:
    import npu_jobs

    try:
        npu_jobs.run_forked(_run_training, folder, out, RANKS)
    except SystemExit as error:
        if "silent data corruption" not in str(error):
            raise
    return read_findings(out / "run")


def _set_fault(text: str) -> None:
    """Replace the fault of the simulated machine; empty: none."""
    from anabatic_sim import fault_injection, shared_memory
    from anabatic_sim.machine_spec import SEGMENT_VARIABLE

    with shared_memory.attach_segment(os.environ[SEGMENT_VARIABLE]) as machine:
        machine.fault[0] = shared_memory.SimFault(
            *(fault_injection.parse_fault(text, RANKS).to_struct_values() if text else ())
        )


def _count_strikes() -> int:
    from anabatic_sim import shared_memory
    from anabatic_sim.machine_spec import SEGMENT_VARIABLE

    with shared_memory.attach_segment(os.environ[SEGMENT_VARIABLE]) as machine:
        return int(machine.fault[0].struck)


def run_inside(folder: Path, cases: int, quiet: int) -> int:
    """Run all trainings; return 0 when each fault was named and nothing else."""
    import npu_jobs

    warnings.filterwarnings("ignore")
    npu_jobs._preload()
    npu_jobs.run_forked(_prepare, folder, folder / "prepare", 1)
    draw, named, wrong = random.Random(0), 0, 0
    for number in range(cases + quiet):
        kind, device, fault = draw_fault(draw, number) if number < cases else ("", -1, "")
        _set_fault(fault)
        started = time.perf_counter()
        found = set(_train(folder, folder / str(number)))
        if kind == "flip" and not _count_strikes():
            raise SystemExit(f"{fault} did not strike: the training has fewer operators")
        expected = {(NAMES[kind], (device,))} if kind else set()
        named += bool(kind) and expected <= found
        wrong += len(found - expected)
        told = ", ".join(f"{what} of rank {', '.join(map(str, ranks))}" for what, ranks in sorted(found)) or "nothing"
        print(f"{fault or 'no fault':18} {told}  ({time.perf_counter() - started:.0f} s)", flush=True)
    print(
        f"{named} of {cases} faults named; {wrong} false findings in {cases + quiet} trainings, {quiet} without a fault"
    )
    return int(named < cases or wrong > 0)


def main() -> int:
    """Start the simulation, or run in it."""
    words = [word for word in sys.argv[1:] if word != _INSIDE]
    if _INSIDE in sys.argv:
        return run_inside(Path(words[0]), int(words[1]), int(words[2]))
    cases, quiet = int(words[0]) if words else 20, int(words[1]) if len(words) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        inside = ["python", __file__, _INSIDE, folder, str(cases), str(quiet)]
        command = [sys.executable, "-m", "anabatic", "sim", "--npus", str(RANKS), "--", *inside]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
