"""Faults on demand: `--fault KIND[@DEVICE][#N][=VALUE]`. csrc/runtime/faults.cpp makes them strike.

| kind | N counts | VALUE | what the program sees |
|---|---|---|---|
| oom | memory that the allocator asks the device for | - | `NPU out of memory`, torch.OutOfMemoryError |
| aicore | operators | - | 507015 at the next synchronisation |
| ecc | operators | - | 507054 at the next synchronisation; npu-smi: Alarm |
| hccl-timeout | collectives | - | 507048 / EI0002 |
| link-down | collectives | - | every collective from then on fails |
| lost | operators | - | every call from then on answers 507899; npu-smi no longer lists the device |
| slow | - | factor, 3 | operators take that many times as long |
| health | - | warning, alarm, critical | npu-smi shows it |
| slow-link | - | milliseconds, 20 | collectives of the device take so much longer |
| flip | operators that read a trained weight | - | nothing: one bit of the weight is another |
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean

MAX_FAULTS = 32
"""Rows of the segment."""
FAULT_KINDS = {
    "oom": 1, "aicore": 2, "ecc": 3, "hccl-timeout": 4, "link-down": 5, "lost": 6, "slow": 7, "health": 8,
    "slow-link": 9, "flip": 10,
}  # fmt: skip
"""Kind -> `enum SimFaultKind` (csrc/segment.h)."""
HEALTH_STATES = ("ok", "warning", "alarm", "critical")
"""In the order of `enum SimHealth`."""
FAULT_SYNTAX = "KIND[@DEVICE][#N][=VALUE]"
_FAULT_PATTERN = re.compile(r"([a-z-]+)(?:@(\d+))?(?:#(\d+))?(?:=([a-z0-9.]+))?")
_UNCOUNTED_KINDS = ("slow", "health", "slow-link")
_SLOW_RANGES = {"slow": (1, 1000, 3, "factor"), "slow-link": (0.1, 10_000, 20, "number of milliseconds")}
"""Kind -> least, most and default value, and what it is."""


@dataclass(frozen=True)
class InjectedFault:
    """One fault, checked."""

    kind: str
    device: int = -1
    """Physical number; -1: whichever device counts to N first."""
    strike_at: int = 1
    """It strikes at the N-th event."""
    value: str = ""

    @property
    def slowdown(self) -> float:
        """Slowdown factor of a device, or milliseconds added by a slow link."""
        return float(self.value or _SLOW_RANGES[self.kind][2]) if self.kind in _SLOW_RANGES else 0.0

    def to_struct_values(self) -> tuple[int, int, int, int, float]:
        """Return kind, device, after, value and factor as the segment holds them."""
        value = HEALTH_STATES.index(self.value) if self.kind == "health" else 0
        return FAULT_KINDS[self.kind], self.device, self.strike_at, value, self.slowdown

    def __str__(self) -> str:
        device = f"@{self.device}" if self.device >= 0 else ""
        after = "" if self.kind in _UNCOUNTED_KINDS else f"#{self.strike_at}"
        return self.kind + device + after + (f"={self.value}" if self.value else "")


def parse_fault(text: str, npus: int) -> InjectedFault:
    """Return the fault that `text` describes.

    Raises:
        ConfigError: it is no fault, or not one of this machine.
    """
    found = _FAULT_PATTERN.fullmatch(text.strip())
    if not found:
        raise ConfigError(f'--fault is "{text}", expected {FAULT_SYNTAX}', "for example --fault aicore@1#100")
    kind, device, after, value = found.groups()
    if kind not in FAULT_KINDS:
        raise ConfigError(
            f'--fault names "{kind}".{did_you_mean(kind, list(FAULT_KINDS))}', f"kinds: {', '.join(FAULT_KINDS)}"
        )
    if device is not None and int(device) >= npus:
        raise ConfigError(f"--fault {text} names device {device}, there are {npus}", "devices count from 0")
    if after is not None and (kind in _UNCOUNTED_KINDS or not 1 <= int(after) < 2**62):
        raise ConfigError(
            f"--fault {text}: #{after} means nothing here",
            "counted kinds count from 1, slow, slow-link and health have no #N",
        )
    return InjectedFault(
        kind, -1 if device is None else int(device), int(after or 1), _check_fault_value(text, kind, value)
    )


def _check_fault_value(text: str, kind: str, value: str | None) -> str:
    if kind == "health":
        if value not in HEALTH_STATES:
            raise ConfigError(
                f"--fault {text} names no health", f"for example health@0=warning; values: {', '.join(HEALTH_STATES)}"
            )
        return value
    if kind in _SLOW_RANGES:
        least, most, default, what = _SLOW_RANGES[kind]
        if value is not None and (not re.fullmatch(r"\d+(\.\d+)?", value) or not least <= float(value) <= most):
            raise ConfigError(
                f"--fault {text}: the {what} is {value}, expected {least:g} to {most:g}",
                f"for example {kind}@2={default}",
            )
        return value or ""
    if value is not None:
        raise ConfigError(f"--fault {text}: {kind} takes no value", f"for example {kind}#5")
    return ""


def parse_faults(texts: tuple[str, ...], npus: int) -> tuple[InjectedFault, ...]:
    """Return all faults of a machine.

    Raises:
        ConfigError: one is wrong, or there are too many.
    """
    if len(texts) > MAX_FAULTS:
        raise ConfigError(f"{len(texts)} faults, at most {MAX_FAULTS}", "leave some out")
    return tuple(parse_fault(text, npus) for text in texts)
