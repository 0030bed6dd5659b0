"""The processor of this machine, from `/proc/cpuinfo`, and the cores that this process may use."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
_ARM_CPU_NAMES = {
    ("0x48", "0xd01"): "HiSilicon Kunpeng-920 (TaiShan v110)",
    ("0x48", "0xd02"): "HiSilicon TaiShan v120",
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
}
"""Names of (implementer, part), which Linux prints as numbers on Arm (util-linux, lscpu)."""
CORES_VARIABLE = "ANABATIC_CORES"
"""Environment variable: the cores of each local rank, `0-3;4-7`."""
_original_cores: set[int] = set()
"""The cores of this process before `bind_to_cores`."""
_FOLDER = "anabatic.cpu_speed"


def read_cpuinfo(path: Path = CPUINFO) -> dict[str, str]:
    """Return the fields of the first processor in `/proc/cpuinfo`; empty if the file cannot be read."""
    try:
        return parse_cpuinfo(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def parse_cpuinfo(text: str) -> dict[str, str]:
    """Return the fields of the first processor in the text of `/proc/cpuinfo`."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            facts.setdefault(key.strip(), value.strip())
    return facts


def get_cpu_name(facts: Mapping[str, str], default: str) -> str:
    """Return the model name of the processor; Arm processors report numbers, of which some are known."""
    part = (facts.get("CPU implementer", ""), facts.get("CPU part", ""))
    return facts.get("model name") or _ARM_CPU_NAMES.get(part) or default


def has_bf16_products(facts: Mapping[str, str]) -> bool:
    """Return whether the processor has instructions for products of bf16: avx512_bf16, amx_bf16, or Arm's bf16."""
    known = {*facts.get("flags", "").split(), *facts.get("Features", "").split()}
    return not known.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def parse_core_list(text: str) -> list[int]:
    """Return the core numbers of a list such as `0-3,8`, in the format of Linux (cpuset(7)).

    Raises:
        ValueError: the text is not a list of cores.
    """
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores


def bind_to_cores() -> None:
    """Bind this process and its future threads to the cores of its local rank, if a launcher assigned any.

    Call it before libraries start threads: each thread inherits the cores that its parent has at that moment.
    """
    core_lists = os.environ.get(CORES_VARIABLE, "").split(";")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank < len(core_lists) and core_lists[rank]:
        _original_cores.update(os.sched_getaffinity(0))
        os.sched_setaffinity(0, parse_core_list(core_lists[rank]))


@contextlib.contextmanager
def use_all_cores() -> Iterator[None]:
    """Let threads started inside this context run on all cores of the job: for work that one process does for all."""
    if not _original_cores:
        yield
        return
    rank_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _original_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, rank_cores)


@functools.cache
def find_speedup(module: str, name: str) -> Any:
    """Return an attribute of a module of `anabatic.cpu_speed`; None where the folder is not there."""
    try:
        importlib.import_module(_FOLDER)
    except ModuleNotFoundError:
        return None
    return getattr(importlib.import_module(f"{_FOLDER}.{module}"), name)


def install_quick_imports() -> None:
    """Make the first import of transformers' models a quick one, where the folder is there."""
    install = find_speedup("quick_imports", "install_quick_imports")
    if install is not None:
        install()


def import_checkpoints() -> Any:
    """Import and return `torch.distributed.checkpoint`."""
    load = find_speedup("quick_imports", "import_checkpoints")
    return importlib.import_module("torch.distributed.checkpoint") if load is None else load()
