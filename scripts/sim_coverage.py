"""Walk torch_npu's operators inside a simulation and write the counts into docs/{en,zh}/concepts/sim-fidelity.md.

python scripts/sim_coverage.py            # rewrite the tables
python scripts/sim_coverage.py --check    # fail when they are out of date
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- counts: scripts/sim_coverage.py -->", "<!-- end of counts -->"
KINDS = {
    "kept": ("torch_npu's own code on the simulated runtime", "torch_npu 自身的代码，运行在模拟的运行时上"),
    "cpu": ("PyTorch's CPU kernel on the device's memory", "PyTorch 的 CPU 算子，直接作用于设备内存"),
    "composed": ("PyTorch's CPU composition of other operators", "PyTorch 在 CPU 上的组合实现"),
    "own": ("written for the simulation", "为模拟器编写"),
    "formula": ("written for the simulation from op-plugin's documentation", "按 op-plugin 文档为模拟器编写"),
    "refused": ("missing: raises, naming itself", "缺失：抛出带算子名的错误"),
}
FAMILIES = {"aten": "aten::", "npu": "npu::"}
INSIDE = """
import ctypes, torch
torch.zeros(1, device="npu")
kinds = ctypes.CDLL("libanabatic_sim_ops.so").sim_operator_kinds
kinds.restype = ctypes.c_char_p
print("torch_npu " + __import__("torch_npu").__version__)
print(kinds().decode(), end="")
"""


def operators() -> tuple[str, dict[str, str]]:
    """Return the version of torch_npu and each operator's kind."""
    line = [sys.executable, "-m", "anabatic", "sim", "--", "python", "-c", INSIDE]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    first, *rest = done.stdout.strip().splitlines()
    return first, dict(row.rsplit(" ", 1) for row in rest)


def _family(name: str) -> str:
    return next((family for family, start in FAMILIES.items() if name.startswith(start)), "other")


def table(version: str, found: dict[str, str], language: int) -> str:
    """Return the generated part of a page."""
    head = (
        f"Counted in {version}: {len(found)} operators and overloads registered for the NPU.",
        f"以 {version} 统计：为 NPU 注册的算子及重载共 {len(found)} 个。",
    )[language]
    columns = ("| how | aten | npu | other |", "| 方式 | aten | npu | 其他 |")[language]
    lines = [head, "", columns, "|---|---:|---:|---:|"]
    for kind, names in KINDS.items():
        counts = [
            sum(1 for name, its in found.items() if its == kind and _family(name) == family)
            for family in ("aten", "npu", "other")
        ]
        lines.append(f"| {names[language]} | {counts[0]} | {counts[1]} | {counts[2]} |")
    ours = sorted(name for name, kind in found.items() if kind == "formula")
    missing = sorted(name for name, kind in found.items() if kind == "refused" and _family(name) == "aten")
    titles = (
        ("Written from op-plugin's documentation", "`aten` operators that are missing"),
        ("按 op-plugin 文档编写的算子", "缺失的 `aten` 算子"),
    )[language]
    for title, names in zip(titles, (ours, missing), strict=True):
        lines += ["", f"{title} ({len(names)}): " + ", ".join(f"`{name}`" for name in names)]
    return "\n".join(lines)


def main() -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    version, found = operators()
    return write_pages(BEGIN, END, [table(version, found, language) for language in (0, 1)], check=check)


def write_pages(begin: str, end: str, parts: list[str], *, check: bool) -> int:
    """Put the parts (en, zh) between the marks of the fidelity pages, or check them; return the exit code."""
    stale = []
    for folder, part in zip(("en", "zh"), parts, strict=True):
        page = ROOT / "docs" / folder / "concepts" / "sim-fidelity.md"
        text = page.read_text(encoding="utf-8")
        before, rest = text.split(begin)
        fresh = before + begin + "\n\n" + part + "\n\n" + end + rest.split(end)[1]
        if fresh != text:
            stale.append(page)
            if not check:
                page.write_text(fresh, encoding="utf-8")
    for page in stale:
        sys.stderr.write(f"{'out of date' if check else 'wrote'}: {page.relative_to(ROOT)}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
