"""Build the wheel of anabatic-sim with compiled libraries for several torch versions. Needs an index, g++ and binutils.

usage: python scripts/build_sim_wheels.py [--torch 2.13.0 ...] [--out dist] [--work FOLDER] [--use 2.13.0=PYTHON ...]

For each torch: an environment with it (`--use` names one that exists), the libraries compiled there, and one program
run on them. Then the wheel, whose manylinux tag is the oldest that allows all symbol versions that the libraries need,
by the tables of auditwheel (pip install auditwheel). In quay.io/pypa/manylinux_2_28 the wheel fits most systems.
TORCH_INDEX=URL names an index of CPU wheels; where it has no such torch, the build of pip's own index is taken.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "packaging" / "anabatic-sim"
sys.path.insert(0, str(ROOT / "src"))

from anabatic_sim.libraries import prebuilt_libraries  # noqa: E402 - needs the path above
from anabatic_sim.libraries.prebuilt_libraries import PrebuiltLibraries  # noqa: E402
from anabatic_sim.libraries.torch_npu_wheel import CANN_RELEASES  # noqa: E402

OLDEST = (2, 7, 1)
"""The lower bound of the wheel."""
_VERSIONED = re.compile(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\b")
_COMPILE = """
import json, sys
from anabatic.core import log
from anabatic_sim import session
from anabatic_sim.libraries import native_build
log.setup_logging()
build = native_build.prepare_build()
print(json.dumps({"root": str(build.root), "torch": build.torch.base_version, "torch_npu": build.wheel.version,
                  "wheel": str(build.wheel.folder), "uses_old_abi": build.torch.uses_old_abi}))
"""
_RUN = """
import sys, torch
assert torch.ones(2, device="npu").add(1).sum().item() == 4
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print("\\n".join(sorted(file for file in files if "/torch_npu/" in file and file.endswith(".py"))))
"""
"""Prints the files of torch_npu that a first program reads."""


def run(*words: str | Path, **options: Any) -> str:
    """Run a program; return its output, or end with its last lines."""
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, words))[:300]} ended with {done.returncode}\n{done.stdout[-2000:]}")
    return str(done.stdout)


def list_versions() -> list[str]:
    """Return the torch versions that the wheel is for."""
    return [version for version in CANN_RELEASES if tuple(map(int, version.split("."))) >= OLDEST]


def check_versions(versions: list[str]) -> None:
    """Refuse a torch without a torch_npu before anything is made.

    Raises:
        SystemExit: with the versions that can be named.
    """
    if unknown := [version for version in versions if version not in list_versions()]:
        raise SystemExit(
            f"error: there is no torch_npu for torch {', '.join(unknown)} in torch_npu_wheel.py\n"
            f"hint: --torch takes {' '.join(list_versions())}"
        )


def make_environment(version: str, folder: Path) -> Path:
    """Return the Python of an environment with this torch."""
    python = folder / "bin" / "python"
    if not python.is_file():
        run(sys.executable, "-m", "venv", folder)
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "numpy", "pyyaml"]
    index = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu")
    tried = subprocess.run([*map(str, pip), "--extra-index-url", index, f"torch=={version}+cpu"], check=False)
    if tried.returncode:
        print(f"no CPU build of torch {version} in {index}: taking the one of pip's index", flush=True)
        run(*pip, f"torch=={version}")
    return python


def compile_libraries(python: Path, version: str, work: Path, target: Path) -> None:
    """Compile the simulator for the torch of this Python into `target`, and run a program on it."""
    inner = {**os.environ, "ANABATIC_CACHE": str(work / "cache"), "PYTHONPATH": str(ROOT / "src")}
    built = json.loads(run(python, "-c", _COMPILE, env=inner, cwd=work).splitlines()[-1])
    if built["torch"] != version:
        sys.exit(f"error: {python} has torch {built['torch']}, not {version}")
    program = work / "first_program.py"
    program.write_text(_RUN, encoding="utf-8")
    words = [python, "-m", "anabatic_sim", "--", python, program]
    read = run(*words, env=inner, cwd=work).split()
    modules = [Path(file).relative_to(built["wheel"]).as_posix() for file in read]
    manifest = PrebuiltLibraries(
        torch=version,
        torch_npu=built["torch_npu"],
        machine=platform.machine(),
        uses_old_abi=built["uses_old_abi"],
        sources=prebuilt_libraries.digest_sources(),
        modules=tuple(modules),
    )
    folder = target / manifest.folder_name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(built["root"], "lib"), folder / "lib")
    for library in (folder / "lib").glob("*.so"):
        run("strip", "--strip-unneeded", library)
    manifest.write(folder)
    size = sum(file.stat().st_size for file in folder.rglob("*.so"))
    print(f"torch {version}: {size / 1e6:.1f} MB of libraries, {len(modules)} modules of torch_npu", flush=True)


def list_symbol_versions(libraries: Iterable[Path]) -> set[tuple[str, str]]:
    """Return the (`GLIBC`, `2.34`) that libraries need of the system."""
    found: set[tuple[str, str]] = set()
    for library in libraries:
        found |= {(match[1], match[2]) for match in _VERSIONED.finditer(run("objdump", "-T", library))}
    return found


def find_platform_tag(needed: set[tuple[str, str]], policies: list[dict[str, Any]], machine: str) -> str:
    """Return the oldest manylinux tag that allows all of these symbol versions."""
    for policy in policies:
        allowed = policy["symbol_versions"].get(machine)
        if allowed and all(version in allowed.get(name, ()) for name, version in needed):
            return f"{policy['name']}_{machine}"
    raise ValueError(f"no manylinux policy allows {sorted(needed)}")


def read_policies() -> list[dict[str, Any]]:
    """Return auditwheel's table of manylinux policies, the oldest first."""
    text = importlib.resources.files("auditwheel").joinpath("policy", "manylinux-policy.json").read_text("utf-8")
    rows = [row for row in json.loads(text) if row["name"].startswith("manylinux_")]
    return sorted(rows, key=lambda row: tuple(map(int, row["name"].split("_")[1:])))


def build_wheel(prebuilt: Path, tag: str, out: Path) -> Path:
    """Build the wheel with hatchling, in this interpreter."""
    out.mkdir(parents=True, exist_ok=True)
    inner = {**os.environ, "ANABATIC_SIM_PREBUILT": str(prebuilt.resolve()), "ANABATIC_SIM_TAG": tag}
    code = "import sys, hatchling.build as build; print(build.build_wheel(sys.argv[1]))"
    return out / run(sys.executable, "-c", code, out.resolve(), cwd=PROJECT, env=inner).split()[-1]


def parse_use(word: str) -> tuple[str, str]:
    """Return version and interpreter of `VERSION=PYTHON`, or end with an error."""
    version, sign, python = word.partition("=")
    if not sign or not Path(python).is_file():
        raise SystemExit(f"error: --use {word}: not VERSION=PYTHON with an interpreter that is there")
    return version, python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=list_versions(), metavar="VERSION")
    parser.add_argument("--out", type=Path, default=Path("dist"))
    parser.add_argument("--work", type=Path, default=Path("build/sim-wheels"))
    parser.add_argument("--use", nargs="+", default=[], metavar="VERSION=PYTHON")
    given = parser.parse_args()
    check_versions(given.torch)
    work = given.work.resolve()
    prebuilt = work / "prebuilt"
    shutil.rmtree(prebuilt, ignore_errors=True)
    prebuilt.mkdir(parents=True)
    pythons = dict(parse_use(word) for word in given.use)
    for version in given.torch:
        python = Path(pythons[version]) if version in pythons else make_environment(version, work / f"torch-{version}")
        compile_libraries(python, version, work, prebuilt)
    needed = list_symbol_versions(prebuilt.rglob("*.so"))
    tag = find_platform_tag(needed, read_policies(), platform.machine())
    wheel = build_wheel(prebuilt, tag, given.out)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
