"""Environment variables of the processes of this machine: their devices, cores, threads and ports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anabatic.core import cpu_info, log
from anabatic.device.table import DEVICES
from anabatic.launch.local.core_binding import DeviceLocality, assign_cores, get_allowed_cores, read_device_numa_node
from anabatic.launch.local.device_selection import DeviceSelection, select_devices
from anabatic.monitor.npu_smi.unframed_tables import Topology
from anabatic.monitor.sources import npu_smi_command

_TORCH_NPU_BINDING = "CPU_AFFINITY_CONF"
"""torch_npu's variable for binding threads; it does not change a process that is already bound (Ascend/pytorch
docs)."""
_HCCL_PORTS = ("HCCL_IF_BASE_PORT", 60000, 32)
"""Variable, its default and the number of ports HCCL uses from there (HCCL documentation, HCCL_IF_BASE_PORT)."""


def place_workers(
    device: Mapping[str, Any], nproc: int, environ: Mapping[str, str], multi_node: bool
) -> dict[str, str]:
    """Return the environment variables of the workers, without those that the user has set, and log the choice.

    Args:
        device: the settings of the section `device`.
        multi_node: the job spans several machines.

    Raises:
        DeviceError: there are too few devices, or too few free ones.
    """
    choice = select_devices(device["type"], nproc, environ)
    variables: dict[str, str] = {}
    if choice is not None:
        if choice.summary:
            log.info(choice.summary)
        variables.update(choice.variables)
        variables.update(_collective_variables(choice, multi_node))
    is_bound = environ.get(cpu_info.CORES_VARIABLE) or not environ.get(_TORCH_NPU_BINDING, "0").startswith("0")
    bind = nproc > 1 and device["bind"] == "auto" and not is_bound
    assignment = assign_cores(nproc, _locate_devices(choice), get_allowed_cores()) if bind else None
    if assignment is not None:
        variables[cpu_info.CORES_VARIABLE] = assignment.format_variable()
        log.info(assignment.format_line())
    threads = assignment.threads_per_process if assignment is not None else max(1, len(get_allowed_cores()) // nproc)
    variables["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in variables.items() if not environ.get(name)}


def _collective_variables(choice: DeviceSelection, multi_node: bool) -> dict[str, str]:
    """Return the variables of the collectives; jobs on one machine must not share ports (EI0019)."""
    variables = dict(DEVICES[choice.kind].start_env)
    if choice.variables and choice.kind == "npu" and not multi_node:
        name, base_port, count = _HCCL_PORTS
        variables[name] = str(base_port + count * min(choice.indices))
    return variables


def _locate_devices(choice: DeviceSelection | None) -> list[DeviceLocality]:
    """Return the location of the devices, from `npu-smi info -t topo` if sysfs does not report it."""
    if choice is None:
        return []
    localities = [DeviceLocality(device.bus_id or "") for device in choice.devices]
    path = npu_smi_command.find_npu_smi() if choice.kind == "npu" else None
    if path is None or all(read_device_numa_node(locality) for locality in localities):
        return localities
    try:
        from anabatic.monitor.npu_smi import output_parser

        table = output_parser.parse_output(npu_smi_command.run_command([path, "info", "-t", "topo"])[0])
    except (OSError, TimeoutError):
        return localities  # cores are then divided without it
    affinity_by_name = table.cpu_affinity if isinstance(table, Topology) else {}
    cores_by_index = {
        int(match[0]): text for name, text in affinity_by_name.items() if (match := re.search(r"\d+$", name))
    }
    return [
        DeviceLocality(locality.pci_address, cores_by_index.get(index) or "")
        for locality, index in zip(localities, choice.indices, strict=True)
    ]
