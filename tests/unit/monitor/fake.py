"""A fake `npu-smi` for PATH, and readings to print."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from anabatic_sim import npu_smi_layout
from anabatic_sim.npu_smi_layout import SmiProcess, SmiReading


def dies(count: int, per_card: int = 2, pid: int = 4_000_000) -> list[SmiReading]:
    """Return readings of `count` dies, each with a process."""
    return [
        SmiReading(
            npu=index // per_card,
            chip=index % per_card,
            logic_id=index,
            name="Ascend910",
            health="OK",
            watt=None if index % per_card else 160.5,
            celsius=40 + index % 8,
            bus=f"0000:{index:02X}:00.0",
            aicore=(7 * index) % 101,
            used_mib=3000 + index,
            total_mib=65536,
            processes=(SmiProcess(pid + index, "python3.11", 2000 + index),),
        )
        for index in range(count)
    ]


def table(count: int = 16) -> str:
    """Return `npu-smi info` of two-die cards."""
    return npu_smi_layout.format_info(dies(count), "26.0.rc1", "A3")


def install(folder: Path, script: str) -> Path:
    """Write an executable `npu-smi` and return its folder."""
    folder.mkdir(exist_ok=True)
    path = folder / "npu-smi"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def printing(folder: Path, text: str, mapping: str = "") -> Path:
    """Write an `npu-smi` that prints `text` for `info` and `mapping` for `info -m`."""
    folder.mkdir(exist_ok=True)
    (folder / "info.txt").write_text(text, encoding="utf-8")
    (folder / "map.txt").write_text(mapping, encoding="utf-8")
    return install(folder, f'case "$*" in info) cat {folder}/info.txt;; *) cat {folder}/map.txt;; esac')


def on_path(folder: Path) -> str:
    """Return a PATH on which the fake comes first."""
    return os.pathsep.join([str(folder), "/usr/bin", "/bin"])
