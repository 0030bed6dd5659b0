"""Where the processes of this machine sit: on which devices, on which cores, with which variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anabatic.core import affinity, log
from anabatic.core.errors import DeviceError
from anabatic.device.table import DEVICES
from anabatic.launch.local import core_binding, device_selection
from anabatic.monitor.npu_smi import output_parser
from anabatic.monitor.npu_smi.unframed_tables import Topology
from anabatic.monitor.sources import npu_smi_command

_TORCH_NPU_BINDING = "CPU_AFFINITY_CONF"
"""torch_npu's own way to bind threads; it leaves a process alone that is bound already (Ascend/pytorch docs)."""
_HCCL_PORTS = ("HCCL_IF_BASE_PORT", 60000, 32)
"""Variable, its default and how many ports HCCL takes from there (HCCL documentation, HCCL_IF_BASE_PORT)."""


def place_workers(device: Mapping[str, Any], nproc: int, environ: Mapping[str, str], several: bool) -> dict[str, str]:
    """Return what the workers' environment gets beside what the user has set, and say what was chosen.

    Args:
        device: the settings of the section `device`.
        several: the job spans machines.

    Raises:
        DeviceError: too few devices are here or free.
    """
    choice = device_selection.select_devices(device["type"], nproc, environ)
    given: dict[str, str] = {}
    if choice is not None:
        if choice.summary:
            log.info(choice.summary)
        given.update(choice.variables)
        given.update(_collective_variables(choice, several))
    told = environ.get(affinity.CORES_VARIABLE) or not environ.get(_TORCH_NPU_BINDING, "0").startswith("0")
    bind = nproc > 1 and device["bind"] == "auto" and not told
    shares = (
        core_binding.assign_cores(nproc, _locate_devices(choice), core_binding.get_allowed_cores()) if bind else None
    )
    if shares is not None:
        given[affinity.CORES_VARIABLE] = shares.format_variable()
        log.info(shares.format_line())
    threads = (
        shares.threads_per_process if shares is not None else max(1, len(core_binding.get_allowed_cores()) // nproc)
    )
    given["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in given.items() if not environ.get(name)}


def place_single_process(device: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a training in one process: it takes a free device, or shares the first with a warning."""
    try:
        choice = device_selection.select_devices(device["type"], 1, environ)
    except DeviceError as error:
        log.warn(f"{error}: the first one is shared")
        return {}
    if choice is None or not choice.summary:
        return {}
    log.info(choice.summary)
    return dict(choice.variables)


def _collective_variables(choice: device_selection.DeviceSelection, several: bool) -> dict[str, str]:
    """Variables of the devices' collectives; jobs that share a machine must not share its ports (EI0019)."""
    given = dict(DEVICES[choice.kind].start_env)
    if choice.variables and choice.kind == "npu" and not several:
        name, first, count = _HCCL_PORTS
        given[name] = str(first + count * min(choice.indices))
    return given


def _locate_devices(choice: device_selection.DeviceSelection | None) -> list[core_binding.DeviceLocality]:
    """Return where the devices are; `npu-smi info -t topo` is asked where the bus does not tell."""
    if choice is None:
        return []
    near = [core_binding.DeviceLocality(device.bus_id or "") for device in choice.devices]
    path = npu_smi_command.find_npu_smi() if choice.kind == "npu" else None
    if path is None or all(core_binding.read_device_numa_node(one) for one in near):
        return near
    try:
        table = output_parser.parse_output(npu_smi_command.run_command([path, "info", "-t", "topo"])[0])
    except (OSError, TimeoutError):
        return near  # the cores are then cut without it
    told = table.cpu_affinity if isinstance(table, Topology) else {}
    named = {int(found[0]): text for name, text in told.items() if (found := re.search(r"\d+$", name))}
    return [
        core_binding.DeviceLocality(one.pci_address, named.get(index) or "")
        for one, index in zip(near, choice.indices, strict=True)
    ]
