"""The simulated machine that a command runs on, and how its processes learn of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import format_size
from anabatic_sim import chips, fault_injection
from anabatic_sim.chips import SimChip
from anabatic_sim.fault_injection import InjectedFault

MAX_NPUS = 64
"""Rows of the segment (csrc/segment.h)."""
SEGMENT_VARIABLE = "ANABATIC_SIM_SEGMENT"
"""Environment variable: name of the shared memory; its presence means `inside a simulation`."""
REPORT_VARIABLE = "ANABATIC_SIM_REPORT"
"""Environment variable: folder in which each process leaves its counters."""
TRACE_VARIABLE = "ANABATIC_SIM_TRACE"
"""Environment variable: present when each process shall also leave its trace there."""
PACKAGE_VARIABLE = "ANABATIC_SIM_PACKAGE"
"""Environment variable: the folder that this package lies in, for the programs of the simulated machine."""
INTERPRETER_VARIABLE = "ANABATIC_SIM_PYTHON"
"""Environment variable: the Python that runs the programs of the simulated machine."""
CANN_VARIABLE = "ANABATIC_SIM_CANN"
"""Environment variable: the CANN release that the runtime claims to be."""

_SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

OTHER_FILE_HINT = "choose another file with --report or --trace"
"""Hint if the output of a simulation cannot be written."""
OTHER_CACHE_HINT = "choose another cache with ANABATIC_CACHE"
"""Hint if the simulator's own folder cannot be written."""


@dataclass(frozen=True)
class SimMachine:
    """N devices of one chip."""

    npus: int = 1
    chip: SimChip = field(default_factory=lambda: chips.find_sim_chip("910B3"))
    hbm_bytes: int = 64 * 2**30
    """Bytes of memory of each device."""
    faults: tuple[InjectedFault, ...] = ()
    report_path: Path | None = None
    trace_path: Path | None = None


def build_machine(
    npus: int = 1,
    chip: str = "910B3",
    hbm: str | None = None,
    fault: tuple[str, ...] = (),
    report: Path | None = None,
    trace: Path | None = None,
) -> SimMachine:
    """Return the machine that the flags describe.

    Raises:
        ConfigError: a flag is out of range.
    """
    if report and trace and report.resolve() == trace.resolve():
        raise ConfigError(f"--report and --trace both name {report}", "choose a second file for the trace")
    if not 1 <= npus <= MAX_NPUS:
        raise ConfigError(f"--npus is {npus}, expected 1 to {MAX_NPUS}", "simulate one server at a time")
    row = chips.find_sim_chip(chip)
    memory = parse_size(hbm) if hbm is not None else round(row.device_spec.memory_gib * 2**30)
    return SimMachine(npus, row, memory, fault_injection.parse_faults(fault, npus), report, trace)


def parse_size(text: str) -> int:
    """Return the bytes of `64GiB`, `512M` or `1073741824`.

    Raises:
        ConfigError: it is no size, or smaller than torch_npu's smallest block.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not found:
        raise ConfigError(f'--hbm is "{text}", expected a size', "for example --hbm 64GiB or --hbm 512MiB")
    value = int(float(found[1]) * _SIZE_UNITS[found[2].upper()])
    if value < 2**21:
        raise ConfigError(
            f"--hbm is {format_size(value)}, less than torch_npu's smallest allocation (2 MiB)",
            "for example --hbm 512MiB",
        )
    return value
