"""How long from the command to the end of the first optimizer step, beside transformers' Trainer with PEFT?

    python benchmarks/start.py [--rounds N] [--threads N] [--only lora,full,lora-151k]

Both sides are programs that a user starts: `anabatic sft`, and a script that loads the model, tokenises the rows and
trains with the Trainer. Model and rows are those of `benchmarks/sft.py`; both make their first step from about as many
tokens. They start in turn, after one start each that counts for nothing; what is read is the CPU time of
the program, and the wall clock, at the line that it prints for its first step. `--warm` keeps our cache of tokenised
rows from one start to the next, as a second run on the same data finds it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from option_types import names_among, positive_int
from paired import in_own_process
from sft import BATCH_TOKENS, CASES, CUTOFF, Task, prepare, trainer

FIRST = "first step"


class _Only:
    """Stands where `paired.Turns` stands, for the first step alone."""

    def begin(self, **facts: object) -> None: ...

    def step(self, tokens: int) -> None:
        print(FIRST, flush=True)
        time.sleep(60)  # ended from outside


def started(command: list[str], environment: dict[str, str], line: str) -> tuple[float, float]:
    """Start a program; return its CPU and wall time in seconds when a line of it begins like `line`, and end it."""
    begin = time.perf_counter()
    program = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
    )
    said = []
    assert program.stdout is not None
    for row in program.stdout:
        said.append(row)
        if re.match(line, row):
            wall = time.perf_counter() - begin
            fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
            program.kill()
            program.wait()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), wall
    raise SystemExit(f"{' '.join(command)} ended without a first step:\n{''.join(said)}")


def sides(task: Task, folder: Path) -> dict[str, tuple[list[str], str]]:
    """Name -> command and a pattern of the line that its first step prints."""
    ours = [
        sys.executable,
        "-m",
        "anabatic",
        "sft",
        "--model",
        str(task.model),
        "--data.train",
        str(task.rows),
        "--data.cache",
        str(folder / "cache"),
        "--out",
        str(folder / "run"),
        "--tuner",
        "lora" if task.lora else "full",
        "--batch.seq-len",
        str(CUTOFF),
        "--device.type",
        "cpu",
        "--batch.micro-batch-tokens",
        str(BATCH_TOKENS),
        "--batch.global-batch-tokens",
        str(BATCH_TOKENS),
        "--device.threads",
        str(task.threads),
        "--log.every",
        "1",
    ]
    theirs = [sys.executable, __file__, "--peer", str(task.model), str(task.rows), str(int(task.lora))]
    return {"anabatic sft": (ours, r"step +1/"), "Trainer + PEFT": (theirs, FIRST)}


def measure(case: str, folder: Path, rounds: int, threads: int, warm: bool) -> None:
    size, lora = CASES[case]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # containers set it, and both sides would compile what they import
    both = sides(Task(folder / f"model-{size}", folder / "rows.json", lora, threads), folder)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in both}
    for number in range(rounds + 1):
        for name, (command, line) in both.items():
            shutil.rmtree(folder / "run", ignore_errors=True)
            if not warm:
                shutil.rmtree(folder / "cache", ignore_errors=True)
            one = started(command, environment, line)
            if number:
                times[name].append(one)
    for clock, title in enumerate(("CPU", "wall")):
        mine, other = ([one[clock] for one in times[name]] for name in both)
        ratios = sorted(a / b for a, b in zip(mine, other, strict=True))
        print(
            f"{case:10} {title:5} {statistics.median(mine):6.2f} s, Trainer {statistics.median(other):6.2f} s: "
            f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--only", type=names_among(CASES), default=["lora", "full"], help=f"of {','.join(CASES)}")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        model, rows, lora = options.peer
        trainer(_Only(), Task(Path(model), Path(rows), bool(int(lora)), options.threads), False)  # type: ignore[arg-type]
        return
    with tempfile.TemporaryDirectory() as temporary:
        in_own_process(prepare, Path(temporary), options.only)
        for case in options.only:
            measure(case, Path(temporary), options.rounds, options.threads, options.warm)


if __name__ == "__main__":
    main()
