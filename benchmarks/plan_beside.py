"""What a run needs beside its devices, on paper and measured: checkpoint, saved model, tokenised data, memory of the
host, time of a step.

    python benchmarks/plan_beside.py [--device cpu|npu] [--only full,lora] [--docs]

Every row trains a small Qwen2 with `anabatic sft` for six steps, and asks `anabatic plan` for the same command. On a
CPU (fp32) the host's memory is the process's own peak (VmHWM of /proc/self/status) beside programs and what would lie
on a device: a step's peak, or the copy of a checkpoint with what is there between steps. The time is CPU time, of the
last four steps, over the cores: other programs on the machine do not count. On a simulated NPU (bf16) files compare,
and the step is the one that the simulator has counted on paper, operator by operator (`anabatic sim --report`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import plan_tables
from paired import peak_memory
from plan import LORA, MIB, WIDE, _of, prepare, run

KNOWN = 1 << 20
"""Tokens that the plan is told of; its share of a token is what counts."""


class Row(NamedTuple):
    """One run."""

    name: str
    options: list[str]
    background: str = "off"
    vocab: int = 16384


ROWS = (
    Row("full", []),
    Row("full, saved in the background", [], "on"),
    Row("full, 320 words", [], vocab=320),
    Row("full, Muon", ["--optim.name", "muon"]),
    Row("full, bf16 with Kahan", ["--optim.weights", "bf16_kahan"]),
    Row("freeze, two blocks", ["--tuner", "freeze", "--freeze.last-layers", "2"]),
    Row("lora r 64", [*LORA, "--lora.r", "64"]),
)


def command(row: Row, folder: Path, device: str) -> list[str]:
    """The training, as typed."""
    given = {
        "model": folder / "model",
        "data.train": folder / "rows.jsonl",
        "data.valid-fraction": 0,
        "data.cache": folder / "cache",
        "out": folder / "run",
        "device.dtype": {"npu": "bf16", "cpu": "fp32"}[device],
        "batch.seq-len": 256,
        "batch.micro-batch-tokens": 2048,
        "batch.global-batch-tokens": 2048,
        "schedule.max-steps": 6,
        "log.every": 1,
        "log.samples": 0,
        "save.resume": "never",
        "save.background": row.background,
    }
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    words += ["--device.type", "cpu"] if device == "cpu" else []
    return ["sft", *words, "--train-on-inputs", *row.options]


def weight(folder: Path, pattern: str = "**/*") -> int:
    """Bytes of the files below a folder."""
    return sum(file.stat().st_size for file in folder.glob(pattern) if file.is_file())


def compare(row: Row, device: str) -> dict[str, tuple[float, float]]:
    """Return (measured, planned) by what is measured: bytes and seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder, _of(WIDE, 8, row.vocab))
        words = command(row, folder, device)
        chip = ["--chip", "here"] if device == "cpu" else []
        told = json.loads(run(["plan", "--json", "--tokens", str(KNOWN), *chip, "--", *words], {}))
        if device == "cpu":
            words = [sys.executable, __file__, "--measure", str(folder / "peak"), *words]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
        else:
            sim = ["sim", "--npus", "1", "--report", str(folder / "sim.json"), "--"]
            run([*sim, sys.executable, "-m", "anabatic", *words], {})
        return _found(folder, told, device)


def _found(folder: Path, told: dict[str, Any], device: str) -> dict[str, tuple[float, float]]:
    """What the run has left."""
    ran = folder / "run"
    checkpoint = next(ran.glob("checkpoint-*"))
    found = {
        "checkpoint": (weight(checkpoint), told["checkpoint_bytes"]),
        "saved model": (weight(ran / "final_model", "*.safetensors"), told["model_bytes"]),
    }
    if device == "cpu":
        seen = json.loads((folder / "peak").read_text())
        held = sum(told["parts"].get(name, 0) for name in ("trained weights", "frozen weights", "optimizer"))
        copy = told["host_bytes"].get("a copy of the checkpoint", 0)
        host = told["host_bytes"]["programs"] + max(told["needs_bytes"], held + copy)
        found |= {"host memory": (seen["memory"], host), "step": (seen["step"], told["step_seconds"])}
    else:
        paper = json.loads((folder / "sim.json").read_text())["paper"]
        found["step"] = (paper["step_ms"] / 1e3, told["step_seconds"])
    return found


def measure(file: Path, words: list[str]) -> None:
    """Run a command here; write the peak of this process's resident set and the CPU time of a step over the cores."""
    from anabatic.cli.app import main as anabatic

    ended: list[float] = []
    threading.Thread(target=_watch, args=(file.parent / "run/metrics.jsonl", ended), daemon=True).start()
    try:
        anabatic(words)
    except SystemExit as end:
        if end.code:
            raise
    step = (ended[5] - ended[1]) / 4 / len(os.sched_getaffinity(0))
    file.write_text(json.dumps({"memory": peak_memory(), "step": step}))


def _watch(metrics: Path, ended: list[float]) -> None:
    """Note the process's CPU time whenever a step has been logged."""
    while len(ended) < 6:
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        ended += [time.process_time()] * (sum('"train"' in line for line in lines) - len(ended))
        time.sleep(0.005)


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = plan_tables.parser(__doc__, "cpu", [row.name for row in ROWS])
    options = parser.parse_args()
    cells = []
    print(f"  {'':32}{'':14} {'measured':>10} {'planned':>10}")
    for row in ROWS:
        if row.name not in options.only:
            continue
        if options.device == "cpu" and "bf16" in row.name:  # weights that a CPU does not train
            continue
        for what, (measured, planned) in compare(row, options.device).items():
            factor, unit = (1e3, "ms") if what == "step" else (1 / MIB, "MiB")
            told = [f"{factor * measured:.1f}", f"{factor * planned:.1f}", f"{planned / measured - 1:+.1%}"]
            print(f"  {row.name:32}{what:14} {told[0]:>10} {told[1]:>10} {unit:4}{told[2]:>8}", flush=True)
            cells.append([row.name, f"{what}, {unit}", *told])
    if options.docs:
        plan_tables.write(f"beside {options.device}", ["setting", "what", "measured", "planned", ""], cells)


if __name__ == "__main__":
    main()
