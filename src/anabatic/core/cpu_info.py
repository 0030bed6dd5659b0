"""The processor of this machine, as Linux tells of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def read_cpuinfo(path: Path = CPUINFO) -> dict[str, str]:
    """Return the facts of `/proc/cpuinfo`, of its first processor; none where it cannot be read."""
    try:
        return parse_cpuinfo(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def parse_cpuinfo(text: str) -> dict[str, str]:
    """Return the facts of the first processor of such a text."""
    facts: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator:
            facts.setdefault(key.strip(), value.strip())
    return facts


def get_cpu_name(facts: Mapping[str, str], default: str) -> str:
    """Return the name of the processor's model; Arm processors often tell none."""
    return facts.get("model name") or default
