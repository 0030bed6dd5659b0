"""Where a measurement was made: what another one must share to be compared with it."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil

from anabatic import __version__
from anabatic.core import cpu_info
from anabatic.doctor.target_machine import SIMULATION_VARIABLE
from anabatic.launch import rendezvous

SIMULATED_NOTE = "the devices are simulated: the figures are those of this machine's processor"


def collect_environment(load: float, device: str = "", count: int = 1) -> dict[str, Any]:
    """Return the machine as JSON values.

    Args:
        load: of the machine before the measurement.
        device: name of the devices that were measured; empty: the processor.
        count: of them.
    """
    processor = cpu_info.get_cpu_name(cpu_info.read_cpuinfo(), platform.machine())
    return {
        "device": device or processor,
        "devices": count,
        "simulated": SIMULATION_VARIABLE in os.environ,
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": round(load, 2),
        "system": f"{platform.system()} {platform.release()}",
        "anabatic": __version__,
        **{name: version for name, version in rendezvous.collect_job_facts({})["versions"].items() if version},
    }


def caveat_notes(machine: dict[str, Any]) -> list[str]:
    """Return what speaks against taking the figures for the machine's."""
    notes = [SIMULATED_NOTE] if machine["simulated"] else []
    if machine["load_before"] > 0.5 * machine["cores"]:
        notes.append(f"the machine was busy before: a load of {machine['load_before']:g} on {machine['cores']} cores")
    return notes
