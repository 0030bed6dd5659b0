"""The machine and the software behind a run, for the head of a report. Loads neither torch nor a driver."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

from anabatic import __version__
from anabatic.core.formatting import format_size

# Names of (implementer, part) that Linux prints as numbers on Arm, as in util-linux's lscpu.
_ARM_CPU_NAMES = {
    ("0x48", "0xd01"): "HiSilicon Kunpeng-920 (TaiShan v110)",
    ("0x48", "0xd02"): "HiSilicon TaiShan v120",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
}


def parse_cpu_name(cpuinfo: str) -> str:
    """Return the processor's name from the text of `/proc/cpuinfo`, else what Python knows of it."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    if name := fields.get("model name"):
        return " ".join(name.replace("(R)", "").replace("(TM)", "").split())
    part = (fields.get("CPU implementer", ""), fields.get("CPU part", ""))
    return _ARM_CPU_NAMES.get(part) or platform.processor() or platform.machine() or "unknown"


def describe_cpu() -> str:
    """Return the processor and its cores."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    threads = psutil.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or threads
    words = f"{cores} core{'s' if cores > 1 else ''}"
    return f"{parse_cpu_name(text)}, {words}" + (f" ({threads} threads)" if threads != cores else "")


def describe_memory() -> str:
    """Return the machine's memory."""
    return format_size(psutil.virtual_memory().total)


def list_versions() -> list[tuple[str, str]]:
    """Return (name, version) of Python, torch, transformers, where installed, and anabatic."""
    found = [("Python", platform.python_version())]
    for package in ("torch", "transformers"):
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return [*found, ("anabatic", __version__)]


def find_commit(folder: Path) -> str:
    """Return the short commit of the git checkout that tracks `folder`, with `+` when files changed; else ``.

    A folder that merely lies inside a checkout, as a virtual environment does, has no commit.
    """
    if not _run_git(folder, "ls-files", "--", "."):
        return ""
    short = _run_git(folder, "rev-parse", "--short=10", "HEAD")
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return f"{short}{' + changes' if short and changed else ''}"


def _run_git(folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a folder on a dead mount
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
