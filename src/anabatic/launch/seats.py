"""Where the processes of this machine sit: on which devices, on which cores, with which variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from anabatic.core import affinity, log
from anabatic.core.errors import DeviceError
from anabatic.device.table import DEVICES
from anabatic.launch import cores, free
from anabatic.monitor import npu_smi, source_smi
from anabatic.monitor.smi_text import Topology

_OWN_BINDING = "CPU_AFFINITY_CONF"
"""torch_npu's own way to bind threads; it leaves a process alone that is bound already (Ascend/pytorch docs)."""
_PORTS = ("HCCL_IF_BASE_PORT", 60000, 32)
"""Variable, its default and how many ports HCCL takes from there (HCCL documentation, HCCL_IF_BASE_PORT)."""


def variables(device: Mapping[str, Any], nproc: int, environ: Mapping[str, str], several: bool) -> dict[str, str]:
    """Return what the workers' environment gets beside what the user has set, and say what was chosen.

    Args:
        device: the settings of the section `device`.
        several: the job spans machines.

    Raises:
        DeviceError: too few devices are here or free.
    """
    choice = free.choose(device["type"], nproc, environ)
    given: dict[str, str] = {}
    if choice is not None:
        if choice.line:
            log.info(choice.line)
        given.update(choice.variables)
        given.update(_collectives(choice, several))
    told = environ.get(affinity.CORES) or not environ.get(_OWN_BINDING, "0").startswith("0")
    bind = nproc > 1 and device["bind"] == "auto" and not told
    shares = cores.shares(nproc, _near(choice), cores.allowed()) if bind else None
    if shares is not None:
        given[affinity.CORES] = shares.variable()
        log.info(shares.line())
    threads = shares.threads if shares is not None else max(1, len(cores.allowed()) // nproc)
    given["OMP_NUM_THREADS"] = str(threads)
    return {name: value for name, value in given.items() if not environ.get(name)}


def alone(device: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a training in one process: it takes a free device, or shares the first with a warning."""
    try:
        choice = free.choose(device["type"], 1, environ)
    except DeviceError as error:
        log.warn(f"{error}: the first one is shared")
        return {}
    if choice is None or not choice.line:
        return {}
    log.info(choice.line)
    return dict(choice.variables)


def _collectives(choice: free.Choice, several: bool) -> dict[str, str]:
    """Variables of the devices' collectives; jobs that share a machine must not share its ports (EI0019)."""
    given = dict(DEVICES[choice.kind].start_env)
    if choice.variables and choice.kind == "npu" and not several:
        name, first, count = _PORTS
        given[name] = str(first + count * min(choice.indices))
    return given


def _near(choice: free.Choice | None) -> list[cores.Near]:
    """Return where the devices are; `npu-smi info -t topo` is asked where the bus does not tell."""
    if choice is None:
        return []
    near = [cores.Near(device.bus_id or "") for device in choice.devices]
    path = source_smi.find() if choice.kind == "npu" else None
    if path is None or all(cores.on_bus(one) for one in near):
        return near
    try:
        table = npu_smi.parse(source_smi.call([path, "info", "-t", "topo"])[0])
    except (OSError, TimeoutError):
        return near  # the cores are then cut without it
    told = table.cpu_affinity if isinstance(table, Topology) else {}
    named = {int(found[0]): text for name, text in told.items() if (found := re.search(r"\d+$", name))}
    return [cores.Near(one.bus, named.get(index) or "") for one, index in zip(near, choice.indices, strict=True)]
