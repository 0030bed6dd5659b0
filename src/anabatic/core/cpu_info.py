"""The processor of this machine, read from `/proc/cpuinfo`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


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
    """Return the model name of the processor; Arm processors often report none."""
    return facts.get("model name") or default
