"""The machine that a report is written on: processor, memory, versions of software, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from anabatic import __version__
from anabatic.core import cpu_info
from anabatic.core.formatting import format_size
from anabatic.core.language import LocalizedText
from anabatic.train.report.localized_page import TEMPLATE_FOLDER
from anabatic.train.report.words import MISSING, as_text, get_text


def describe_machine(events: Iterable[Mapping[str, Any]]) -> list[tuple[LocalizedText, str | LocalizedText]]:
    """Return (what, value) of this machine and its software.

    Args:
        events: of the runs: those named `device` say what they trained on.
    """
    devices = [event for event in events if event.get("event") == "device"]
    names = dict.fromkeys(str(event.get("name", "")) for event in devices if event.get("type") != "cpu")
    formats = dict.fromkeys(str(event["dtype"]) for event in devices if event.get("dtype"))
    rows: list[tuple[str, str | LocalizedText]] = [("processor", describe_cpu()), ("memory", describe_memory())]
    if devices:
        rows.append(("accelerator", ", ".join(names) or get_text("no_accelerator")))
        rows.append(("number_format", ", ".join(formats) or MISSING))
    rows.append(("software", " · ".join(f"{name} {version}" for name, version in list_versions())))
    if commit := find_commit(TEMPLATE_FOLDER):
        rows.append(("commit", commit))
    return [(get_text(key), value) for key, value in rows]


def describe_cpu() -> LocalizedText:
    """Return the processor and its cores."""
    threads = psutil.cpu_count() or 1
    cores = psutil.cpu_count(logical=False) or threads
    key = f"{'cores' if cores > 1 else 'core'}{'_threads' if threads != cores else ''}"
    return get_text(key, name=describe_cpu_name(cpu_info.read_cpuinfo()), cores=cores, threads=threads)


def describe_cpu_name(facts: Mapping[str, str]) -> str:
    """Return the name of the processor with these fields of `/proc/cpuinfo`, else what Python knows of it."""
    name = cpu_info.get_cpu_name(facts, platform.processor() or platform.machine() or "unknown")
    return " ".join(name.replace("(R)", "").replace("(TM)", "").split())


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


def find_commit(folder: Path) -> LocalizedText | None:
    """Return the short commit of the git checkout that tracks `folder`, and whether files changed; else None.

    A folder that merely lies inside a checkout, as a virtual environment does, has no commit.
    """
    if not _run_git(folder, "ls-files", "--", "."):
        return None
    short = _run_git(folder, "rev-parse", "--short=10", "HEAD")
    changed = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    if not short:
        return None
    return get_text("changed", commit=short) if changed else as_text(short)


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
