"""From an empty environment to the first line on npu:0: `pip install anabatic-sim`, then a script, without a compiler.

    python benchmarks/sim_install.py [--wheel dist/anabatic_sim-...whl] [--rounds 3] [--installer pip,uv]

Without `--wheel`, the wheel is built for the torch of this interpreter (scripts/build_sim_wheels.py: needs g++,
hatchling and auditwheel). Everything that comes from the index is fetched before the clock starts, because the network
is not ours; then each round makes a new environment and a new cache. Goals for the three steps together: 60 s of wall
time, 10 s of CPU time.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from option_types import names_among, positive_int

ROOT = Path(__file__).resolve().parent.parent
INSTALLERS = ("pip", "uv")
WALL_GOAL, CPU_GOAL = 60.0, 10.0
FIRST_LINE = "import torch; print(torch.ones(2, device='npu').sum().item())"


def run(words: Sequence[str | Path], environment: dict[str, str]) -> tuple[float, float, str]:
    """Return wall and CPU seconds of a command and of all that it started, and its output."""
    before, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(map(str, words))} ended with {done.returncode}\n{done.stderr[-3000:]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - wall, used, done.stdout


def build_wheel(folder: Path) -> Path:
    """Build the wheel with compiled libraries for this torch."""
    version = importlib.metadata.version("torch").partition("+")[0]
    script, use = ROOT / "scripts" / "build_sim_wheels.py", f"{version}={sys.executable}"
    words: list[str | Path] = [
        sys.executable,
        script,
        "--torch",
        version,
        "--use",
        use,
        "--work",
        folder / "work",
        "--out",
        folder,
    ]
    run(words, dict(os.environ))
    return next(folder.glob("*.whl"))


def fetch(wheel: Path, folder: Path) -> None:
    """Fetch everything that the wheel needs, and the torch_npu that the first run asks for."""
    torch = importlib.metadata.version("torch")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
    run([*pip, wheel, f"torch=={torch}"], dict(os.environ))
    run([*pip, "--no-deps", f"torch_npu=={torch.partition('+')[0]}.*"], dict(os.environ))


def measure(wheel: Path, downloads: Path, folder: Path, installer: str) -> list[tuple[str, float, float]]:
    """Return wall and CPU seconds of each step."""
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"ANABATIC_CACHE": str(folder / "cache"), "CXX": "/nonexistent"}
    environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(downloads), "PIP_NO_CACHE_DIR": "1"}
    environment |= {"UV_CACHE_DIR": str(folder / "uv"), "UV_OFFLINE": "1"}
    python, uv = folder / "venv" / "bin" / "python", shutil.which("uv") or "uv"
    make: list[str | Path] = [sys.executable, "-m", "venv", folder / "venv"]  # the first run fetches by pip
    if installer == "uv":
        install: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-index", "--find-links", downloads]
        install += ["--python", python, wheel]
    else:
        install = [python, "-m", "pip", "install", "--quiet", wheel]
    steps: dict[str, Sequence[str | Path]] = {
        "environment": make,
        "install": install,
        "first line on npu:0": [folder / "venv" / "bin" / "anabatic-sim", "--", python, "-c", FIRST_LINE],
    }
    rows, output = [], ""
    for name, words in steps.items():
        wall, cpu, output = run(words, environment)
        rows.append((name, wall, cpu))
    if output.split()[-1] != "2.0":
        raise SystemExit(f"error: the first line printed {output!r} instead of 2.0")
    return rows


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--installer", type=names_among(INSTALLERS), default=["pip"])
    asked = parser.parse_args()
    if asked.wheel and not (asked.wheel.is_file() and asked.wheel.suffix == ".whl"):
        parser.error(f"--wheel {asked.wheel}: no wheel; scripts/build_sim_wheels.py builds one, or leave it out")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        wheel = asked.wheel.resolve() if asked.wheel else build_wheel(folder / "dist")
        fetch(wheel, folder / "downloads")
        print(f"wheel: {wheel.stat().st_size / 1e6:.1f} MB; goals: {WALL_GOAL:g} s of wall, {CPU_GOAL:g} s of CPU time")
        for installer in asked.installer:
            turns = []
            for number in range(asked.rounds):
                place = folder / f"{installer}-{number}"
                place.mkdir()
                turns.append(measure(wheel, folder / "downloads", place, installer))
                shutil.rmtree(place)
            for rows in zip(*turns, strict=True):
                wall = statistics.median(wall for _, wall, _ in rows)
                cpu = statistics.median(cpu for _, _, cpu in rows)
                print(f"{installer}: {rows[0][0]}: {wall:.1f} s, {cpu:.1f} s of CPU time", flush=True)
            wall = statistics.median(sum(wall for _, wall, _ in turn) for turn in turns)
            cpu = statistics.median(sum(cpu for _, _, cpu in turn) for turn in turns)
            print(f"{installer}: together {wall:.1f} s, {cpu:.1f} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
