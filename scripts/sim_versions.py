"""Run a smoke program on simulated NPUs with each torch that has a torch_npu; print a table. Needs an index and g++.

usage: python scripts/sim_versions.py [--torch 2.7.1 ...] [--work FOLDER] [--use 2.13.0=PYTHON ...]

The programs are tests/npu_sim/programs/version_smoke.py (training step, DDP, collectives over two ranks) and fused.py
(the fused operators against their formulas). The exit code is 1 where a part of one failed. Environments are made as
by build_sim_wheels.py.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import build_sim_wheels
from build_sim_wheels import ROOT

PROGRAMS = ROOT / "tests" / "npu_sim" / "programs"
LAUNCHED = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
_PART = re.compile(r"^(\S.*) (True|False)\b.*$", re.M)


def run_program(python: Path, npus: int, words: list[str], work: Path) -> tuple[int, int, str]:
    """Run a program in a simulation; return how many parts were right, how many there were, and what went wrong."""
    inner = {**os.environ, "ANABATIC_CACHE": str(work / "cache"), "PYTHONPATH": str(ROOT / "src")}
    line = [str(python), "-m", "anabatic.sim.standalone_command", "--npus", str(npus), "--", *words]
    done = subprocess.run(line, env=inner, cwd=work, capture_output=True, text=True, check=False)
    parts = _PART.findall(done.stdout)
    wrong = [name for name, good in parts if good == "False"]
    if done.returncode:
        wrong.append(f"exit code {done.returncode}: {done.stderr[-2000:]}")
    return sum(good == "True" for _, good in parts), len(parts), "; ".join(wrong)


def check_version(version: str, python: Path, work: Path) -> bool:
    """Print the row of a torch; return whether all was right."""
    smoke = [*map(str, [python, *LAUNCHED[1:], PROGRAMS / "version_smoke.py"])]
    results = [
        run_program(python, 2, smoke, work),
        run_program(python, 1, [str(python), str(PROGRAMS / "fused.py")], work),
    ]
    code = "import sys; sys.path.insert(0, sys.argv[1]); from anabatic.sim import native_build; "
    code += "build = native_build.prepare_build(); print(build.wheel.version, build.wheel.cann_release)"
    inner = {**os.environ, "ANABATIC_CACHE": str(work / "cache")}
    wheel, cann = build_sim_wheels.run(python, "-c", code, ROOT / "src", env=inner).split()[-2:]
    cells = [f"{right} of {parts}" for right, parts, _ in results]
    print(f"| {version} | {wheel} | {cann} | {' | '.join(cells)} |", flush=True)
    for _, _, wrong in results:
        if wrong:
            print(f"torch {version}: {wrong}", file=sys.stderr, flush=True)
    return not any(wrong or not parts for _, parts, wrong in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=build_sim_wheels.list_versions(), metavar="VERSION")
    parser.add_argument("--work", type=Path, default=Path("build/sim-versions"))
    parser.add_argument("--use", nargs="+", default=[], metavar="VERSION=PYTHON")
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pythons = dict(word.split("=", 1) for word in given.use)
    print("| torch | torch_npu | CANN | training, DDP, collectives | fused operators |\n|---|---|---|---|---|")
    good = True
    for version in given.torch:
        named = pythons.get(version)
        python = Path(named) if named else build_sim_wheels.make_environment(version, work / f"torch-{version}")
        good &= check_version(version, python, work)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
