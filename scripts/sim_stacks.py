"""Count the NPU operators that other stacks call, look each up in the simulator, and write the table of the docs.

python scripts/sim_stacks.py                        # rewrite the table from the calls that sim_stacks.yaml holds
python scripts/sim_stacks.py --checkouts FOLDER     # first count the calls in the git checkouts FOLDER/NAME anew
python scripts/sim_stacks.py --check                # fail when the table is out of date
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import sim_coverage

ROOT = Path(__file__).resolve().parent.parent
CALLS = Path(__file__).with_name("sim_stacks.yaml")
BEGIN, END = "<!-- stacks: scripts/sim_stacks.py -->", "<!-- end of stacks -->"
STACKS = ("ms-swift", "LLaMA-Factory", "verl", "diffusers", "MindSpeed", "MindSpeed-LLM", "vllm-ascend")
PATTERN = r"\b(torch_npu|torch\.ops\.(npu|atb))\._?npu_[A-Za-z0-9_]+"
BLOCK_FORMAT = re.compile(r"_mx_|block_(mx_)?quant")
"""Operators that quantise to FP8 or MX formats (values of 8 bits with a scale for each block)."""
HEAD = """# Which operators of the NPU other stacks call, in every *.py of a checkout: written by
# `python scripts/sim_stacks.py --checkouts FOLDER`.
"""
INSIDE = """
import json, sys, torch
torch.zeros(1, device="npu")
import torch_npu
print(json.dumps([name for name in sys.argv[1].split() if hasattr(torch_npu, name)]))
"""


@dataclass(frozen=True)
class Stack:
    """What one repository calls."""

    name: str
    commit: str
    date: str
    operators: dict[str, int]
    """Name without its namespace: number of lines that name it."""


def count_calls(folder: Path, name: str) -> Stack:
    """Return the operators that the Python files of a checkout's HEAD name."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", folder / name, *words], capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):  # 1: grep found nothing
            raise SystemExit(
                f"error: {folder / name} is no checkout of {name}: {done.stderr.strip()}\n"
                f"hint: clone {', '.join(STACKS)} into one folder, and name that folder: --checkouts FOLDER"
            )
        return done.stdout

    commit, date = git("log", "-1", "--format=%h %cs").split()
    found = git("grep", "-hoE", PATTERN, "HEAD", "--", "*.py").split()
    counts = collections.Counter(line.rpartition(".")[2] for line in found)
    return Stack(name, commit, date, dict(sorted(counts.items())))


def read_calls() -> list[Stack]:
    """Return the calls of every stack as counted last."""
    rows: dict[str, dict[str, Any]] = yaml.safe_load(CALLS.read_text(encoding="utf-8"))
    return [Stack(name, str(row["commit"]), str(row["date"]), row["operators"]) for name, row in rows.items()]


def write_calls(stacks: list[Stack]) -> None:
    """Keep the counted calls, so that the table can be made again without the checkouts."""
    rows = {stack.name: {"commit": stack.commit, "date": stack.date, "operators": stack.operators} for stack in stacks}
    CALLS.write_text(HEAD + yaml.safe_dump(rows, sort_keys=False, width=110), encoding="utf-8")


def list_attributes(names: set[str]) -> set[str]:
    """Return which names torch_npu itself has, in a simulation."""
    line = [sys.executable, "-m", "anabatic", "sim", "--", "python", "-c", INSIDE, " ".join(sorted(names))]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.strip().splitlines()[-1]))


def find_status(name: str, kinds: dict[str, str], attributes: set[str]) -> str:
    """Return simulated, refused, block format (FP8 or MX, refused by design), or absent (not in this torch_npu)."""
    overloads = {
        kind for full, kind in kinds.items() if full.partition("::")[2].partition(".")[0] in (name, f"{name}.out")
    }
    if not overloads:
        return "simulated" if name in attributes else "absent"
    if overloads == {"refused"}:
        return "block format" if BLOCK_FORMAT.search(name) else "refused"
    return "simulated"


COLUMNS = (
    ("stack", "commit", "operators", "lines that call them", "simulated", "FP8 and MX formats", "refused"),
    ("软件栈", "提交", "算子数", "调用行数", "已模拟", "FP8 与 MX 格式", "未模拟"),
)


def format_table(version: str, kinds: dict[str, str], attributes: set[str], language: int) -> str:
    """Return the generated part of a page: a row for each stack, and what is missing by name."""
    columns = [*COLUMNS[language], (f"not in {version}", f"{version} 中不存在")[language]]
    lines = ["| " + " | ".join(columns) + " |", "|---|---|" + "---:|" * (len(columns) - 2)]
    missing: dict[str, set[str]] = {"block format": set(), "refused": set(), "absent": set()}
    for stack in read_calls():
        status = {name: find_status(name, kinds, attributes) for name in stack.operators}
        for name, its in status.items():
            if its in missing:
                missing[its].add(name)
        counts = collections.Counter(status.values())
        cells = [stack.name, f"{stack.commit} ({stack.date})", len(status), sum(stack.operators.values())]
        cells += [counts[its] for its in ("simulated", *missing)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    titles = (
        ("FP8 and MX formats, refused by name", "Refused by name", f"Not in {version}"),
        ("FP8 与 MX 格式（报错并给出算子名）", "未模拟（报错并给出算子名）", f"{version} 中不存在"),
    )[language]
    for title, names in zip(titles, missing.values(), strict=True):
        if names:
            colon = (": ", "：")[language]
            lines += ["", f"{title} ({len(names)}){colon}" + ", ".join(f"`{name}`" for name in sorted(names))]
    return "\n".join(lines)


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    either = parser.add_mutually_exclusive_group()  # --check writes nothing
    either.add_argument("--checkouts", type=Path, help=f"a folder with {', '.join(STACKS)}")
    either.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.checkouts:
        write_calls([count_calls(options.checkouts, name) for name in STACKS])
    version, kinds = sim_coverage.operators()
    attributes = list_attributes({name for stack in read_calls() for name in stack.operators})
    return sim_coverage.write_pages(
        BEGIN, END, [format_table(version, kinds, attributes, language) for language in (0, 1)], check=options.check
    )


if __name__ == "__main__":
    sys.exit(main())
