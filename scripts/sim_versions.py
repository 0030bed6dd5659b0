"""Run a smoke program on simulated NPUs with each torch that has a torch_npu; print a table. Needs an index and g++.

usage: python scripts/sim_versions.py [--torch 2.7.1 ...] [--work FOLDER] [--use 2.13.0=PYTHON ...] [--docs]

The programs are tests/npu_sim/programs/version_smoke.py (training step, DDP, collectives over two ranks) and fused.py
(the fused operators against their formulas). The exit code is 1 where a part of one failed. Environments are made as
by build_sim_wheels.py. `--docs` writes the rows of these versions into the guide test-your-project, in both languages.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import build_sim_wheels
from build_sim_wheels import ROOT

PROGRAMS = ROOT / "tests" / "npu_sim" / "programs"
LAUNCHED = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
PAGE = "docs/{language}/guides/test-your-project.md"
BEGIN, END = "<!-- versions: python scripts/sim_versions.py --docs -->", "<!-- end of versions -->"
HEADS = {
    "en": ("torch", "torch_npu", "CANN", "Python", "compiles", "training, DDP, collectives", "fused operators"),
    "zh": ("torch", "torch_npu", "CANN", "Python", "能否编译", "训练、DDP、集合通信", "融合算子"),
}
WORDS = {"en": ("yes", "no", "{} of {}"), "zh": ("能", "不能", "{} / {}")}
_PART = re.compile(r"^(\S.*) (True|False)\b.*$", re.M)
_PREPARE = """
import platform, sys
sys.path.insert(0, sys.argv[1])
from anabatic_sim.libraries import native_build
build = native_build.prepare_build()
print(build.wheel.version, build.wheel.cann_release, platform.python_version())
"""


@dataclass(frozen=True)
class Row:
    """What one torch did."""

    torch: str
    facts: tuple[str, ...]
    """torch_npu, CANN, Python; empty: it does not compile."""
    parts: tuple[tuple[int, int], ...]
    """How many parts of each program were right, and how many there were."""

    def render(self, language: str) -> str:
        """Return the row in Markdown."""
        yes, no, count = WORDS[language]
        if not self.facts:
            cells = [self.torch, "-", "-", "-", no, "-", "-"]
        else:
            cells = [self.torch, *self.facts, yes, *(count.format(*pair) for pair in self.parts)]
        return f"| {' | '.join(cells)} |"


def run_program(python: Path, npus: int, words: list[str], work: Path) -> tuple[int, int, str]:
    """Run a program in a simulation; return how many parts were right, how many there were, and what went wrong."""
    inner = {**os.environ, "ANABATIC_CACHE": str(work / "cache"), "PYTHONPATH": str(ROOT / "src")}
    line = [str(python), "-m", "anabatic_sim", "--npus", str(npus), "--", str(python), *words]
    done = subprocess.run(line, env=inner, cwd=work, capture_output=True, text=True, check=False)
    parts = _PART.findall(done.stdout)
    wrong = [name for name, good in parts if good == "False"]
    if done.returncode:
        wrong.append(f"exit code {done.returncode}: {done.stderr[-4000:]}")
    elif not parts:
        wrong.append("it printed no part")
    return sum(good == "True" for _, good in parts), len(parts), "; ".join(wrong)


def check_version(version: str, python: Path, work: Path) -> tuple[Row, bool]:
    """Compile for a torch and run both programs; return its row, and whether all was right."""
    inner = {**os.environ, "ANABATIC_CACHE": str(work / "cache")}
    words = [str(python), "-c", _PREPARE, str(ROOT / "src")]
    done = subprocess.run(words, env=inner, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"torch {version}: {done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return Row(version, (), ()), False
    results = [
        run_program(python, 2, [*LAUNCHED, str(PROGRAMS / "version_smoke.py")], work),
        run_program(python, 1, [str(PROGRAMS / "fused.py")], work),
    ]
    for _, _, wrong in results:
        if wrong:
            print(f"torch {version}: {wrong}", file=sys.stderr, flush=True)
    row = Row(version, tuple(done.stdout.split()[-3:]), tuple((right, parts) for right, parts, _ in results))
    return row, not any(wrong for _, _, wrong in results)


def render_head(language: str) -> list[str]:
    """Return the first two lines of the table."""
    return [f"| {' | '.join(HEADS[language])} |", "|---" * len(HEADS[language]) + "|"]


def merge_rows(text: str, rows: list[Row], language: str) -> str:
    """Return a page whose table has these rows, and those of other versions as they were."""
    before, found, rest = text.partition(BEGIN)
    old, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    lines = {match[1]: match[0] for match in re.finditer(r"^\| (\d[\d.]*) \|.*$", old, re.M)}
    lines |= {row.torch: row.render(language) for row in rows}
    ordered = [lines[version] for version in sorted(lines, key=lambda version: [*map(int, version.split("."))])]
    return "\n".join([before + BEGIN, "", *render_head(language), *ordered, "", END + after])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=build_sim_wheels.list_versions(), metavar="VERSION")
    parser.add_argument("--work", type=Path, default=Path("build/sim-versions"))
    parser.add_argument("--use", nargs="+", default=[], metavar="VERSION=PYTHON")
    parser.add_argument("--docs", action="store_true", help="write the rows into the guide")
    given = parser.parse_args()
    build_sim_wheels.check_versions(given.torch)
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    pythons = dict(build_sim_wheels.parse_use(word) for word in given.use)
    print("\n".join(render_head("en")), flush=True)
    good = True
    for version in given.torch:
        named = pythons.get(version)
        python = Path(named) if named else build_sim_wheels.make_environment(version, work / f"torch-{version}")
        row, right = check_version(version, python, work)
        good &= right
        print(row.render("en"), flush=True)
        for language in HEADS if given.docs else ():
            page = ROOT / PAGE.format(language=language)
            page.write_text(merge_rows(page.read_text(encoding="utf-8"), [row], language), encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
