"""Detect the chip that a job gets on this machine, from the driver's tools and Linux. No torch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import psutil

from anabatic.core.errors import ConfigError, DeviceError
from anabatic.device import table
from anabatic.device.table import Chip
from anabatic.monitor.snapshot import DeviceReading
from anabatic.monitor.sources import selection
from anabatic.monitor.sources.selection import DeviceSource

AcceleratorLookup = tuple[DeviceSource | None, list[str]]

_FLOPS_PER_CLOCK = (("avx512f", 64), ("avx2", 32), ("asimd", 16))
"""(flag of /proc/cpuinfo, fp32 operations per clock and core): two fused multiply-add units on one register (Intel
"Intrinsics Guide" and Arm Neoverse guides: 16, 8 and 4 numbers)."""
_DEFAULT_MHZ = 2500.0
"""Assumed clock if Linux does not report one."""
_PROCESSOR_GBS = 40.0
"""Assumed memory bandwidth of one process on a server; two channels of DDR4-3200 have 51 GB/s."""
_FASTEST_A3 = "Ascend910_9391"
"""`npu-smi` reports all dies of A3 cards as Ascend910; this is the fastest of them."""


def has_torch_backend(kind: str) -> bool:
    """Return whether the installed torch supports devices of this type, without importing it."""
    if kind == "npu":
        return importlib.util.find_spec("torch_npu") is not None
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def detect_job_chip(
    device_type: str, npus: int, find_source: Callable[[], AcceleratorLookup] = selection.find_accelerator_source
) -> tuple[Chip, str]:
    """Return the chip of a job's devices and its source.

    Args:
        device_type: the setting device.type.
        npus: processes on this machine.
        find_source: finds the source of device readings.

    Raises:
        ConfigError: the devices are of a kind that is not known here.
        DeviceError: there are too few of them.
    """
    kinds = {"auto": ("npu", "cuda"), "npu": ("npu",), "cuda": ("cuda",)}.get(device_type, ())
    usable = [kind for kind in kinds if has_torch_backend(kind)]
    source = find_source()[0] if usable else None
    devices = source.read().devices if source is not None else []
    kind = "npu" if devices and devices[0].kind == "npu" else "cuda"
    if not devices or kind not in usable:
        if device_type in ("npu", "cuda"):
            raise DeviceError(
                f"device.type is {device_type}, and no such device is found here",
                "for another machine: `anabatic plan --chip 910B3 --npus 8 -- COMMAND`",
            )
        return describe_processor(npus), "of this machine: torch would find no accelerator"
    if npus > len(devices):
        raise DeviceError(
            f"{npus} processes need as many devices, and there are {len(devices)}",
            f"lower --nproc to at most {len(devices)}, or plan for another machine with `anabatic plan --npus {npus}`",
        )
    return _match_chip(min(devices, key=lambda device: device.used_mb or 0)), "of this machine"


def _match_chip(device: DeviceReading) -> Chip:
    """Return the chip of a device, with its total and its used memory."""
    name = device.name or ""
    chip_name = name if device.kind != "npu" or name.startswith("Ascend") else f"Ascend{name}"
    chip = table.find_chip(_FASTEST_A3 if chip_name == "Ascend910" else chip_name)
    if chip is None:
        raise ConfigError(
            f"the devices of this machine are {name!r}, whose speed is not known",
            "`anabatic plan --chip` lists the chips",
        )
    if device.total_mb:
        chip = replace(chip, memory_gib=device.total_mb / 1024)
    return chip if device.used_mb is None else replace(chip, taken_gib=device.used_mb / 1024)


def describe_processor(processes: int, cpuinfo: Path = Path("/proc/cpuinfo")) -> Chip:
    """Return the processor of this machine as a chip, shared by `processes` processes."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = f"{facts.get('flags', '')} {facts.get('Features', '')}".split()
    flops_per_clock = next((count for flag, count in _FLOPS_PER_CLOCK if flag in flags), 8)
    try:
        mhz = float(facts.get("cpu MHz", _DEFAULT_MHZ))
    except ValueError:
        mhz = _DEFAULT_MHZ
    cores = max(1.0, len(os.sched_getaffinity(0)) / processes)
    free_bytes = psutil.virtual_memory().available / processes
    return Chip(
        table.PROCESSOR_NAME,
        cores * mhz * 1e6 * flops_per_clock / 1e12,
        free_bytes / 2**30,
        _PROCESSOR_GBS,
        taken_gib=0.0,
    )
