"""What the commands cost that are typed most and do least, beside pip's own `--help` in the same environment.

    python benchmarks/command_start.py [--rounds N]

Every command is started once for nothing, then all take turns; what is compared is the CPU time of the program and its
children, turn by turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from option_types import positive_int

BASELINE = "pip --help"
COMMANDS = (
    BASELINE,
    "anabatic --help",
    "anabatic sft --help",
    "anabatic sft --help --all",
    "anabatic --version",
    "anabatic recipes list",
    "anabatic completion bash",
    "anabatic sftt",
    "anabatic sft --lrr 3",
    "anabatic sft --learning_rate 3",
    "anabatic config check no-such-file.yaml",
    "anabatic doctor",
)


def measure(command: str) -> float:
    """Return the CPU seconds of a command and of the processes it started."""
    program, *words = command.split()
    before = os.times()
    subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=9)
    rounds = parser.parse_args().rounds
    turns = [{command: measure(command) for command in COMMANDS} for _ in range(rounds + 1)][1:]
    for command in COMMANDS:
        seconds = statistics.median(turn[command] for turn in turns)
        ratios = sorted(turn[command] / turn[BASELINE] for turn in turns)
        print(f"{command:42} {seconds:5.2f} s  {statistics.median(ratios):4.2f}x ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
