"""Facts about one machine before a job: versions, devices, folders, ports, visible files of the job."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from anabatic.launch import rendezvous

_COMPARED_PREFIXES = ("HCCL_", "NCCL_", "GLOO_")
"""Variables that should be equal on all machines: HCCL refuses some that differ (EI0005)."""
_LOCAL_SUFFIXES = ("_IFNAME", "_IF_IP", "_HCA", "_WHITELIST_FILE")
"""Suffixes of variables that are specific to one machine."""

_DATA_SETTINGS = ("data.train", "data.valid")
"""Settings that name files or built-in sources; other settings may hold names on a hub."""
_URI_SCHEME = re.compile(r"[a-z][a-z0-9_]+:")


def collect_machine_facts(recipe: Mapping[str, Any], nproc: int, out: str | None, device: str) -> dict[str, Any]:
    """Return the facts to compare, as JSON values.

    Args:
        recipe: the resolved settings, flat; empty without a job.
        nproc: number of processes on this machine.
        out: the run folder.
        device: device type of the job.
    """
    from anabatic.doctor import machine_facts as doctor
    from anabatic.doctor.checks import hardware, host, network

    machine = doctor.open_local_machine_quickly()
    facts = rendezvous.collect_job_facts(recipe)
    facts["versions"] |= {
        "CANN": _detect_cann_version(machine),
        "driver": hardware.read_driver_version(machine) or None,
    }
    variables = {name: value for name, value in os.environ.items() if name.startswith(_COMPARED_PREFIXES)}
    checks = (host.check_ports, network.check_host_network, network.check_device_addresses)
    findings = [finding for check in checks for finding in check(machine) if finding.status in ("WARN", "FAIL")]
    return {
        **facts,
        "name": platform.node(),
        "nproc": nproc,
        "devices": _describe_devices(device),
        "variables": {name: value for name, value in variables.items() if not name.endswith(_LOCAL_SUFFIXES)},
        "free": {folder: shutil.disk_usage(folder).free for folder in nearest_existing_folders(out)},
        "files": dict(_measure_job_files(recipe)),
        "doctor": [
            " - ".join(filter(None, (finding.describe_result("en"), finding.describe_fix("en"))))
            for finding in findings
        ],
    }


def _detect_cann_version(machine: Any) -> str | None:
    from anabatic.doctor.checks import cann

    installation = cann.find_active_cann(machine)
    return installation.version if installation else None


def _describe_devices(device_type: str) -> dict[str, Any]:
    """Return kind, name and count of the devices, and a `problem` if they do not work."""
    import torch

    from anabatic.config.sections.common import DeviceSettings
    from anabatic.core.errors import DeviceError
    from anabatic.device import device

    try:
        selected = device.select_device(DeviceSettings(type=device_type))  # type: ignore[arg-type]
    except DeviceError as error:
        return {"kind": device_type, "name": "", "count": 0, "problem": str(error)}
    count = torch.accelerator.device_count() if selected.type in ("npu", "cuda") else 1
    return {"kind": selected.type, "name": selected.name, "count": count, "problem": ""}


def nearest_existing_folders(out: str | None) -> dict[str, str]:
    """Return the nearest existing folders above the folders to write to, each once, as keys and values."""
    paths = [Path(out or ".").expanduser().absolute(), Path(os.environ.get("TMPDIR") or "/tmp")]
    folders = {}
    for path in paths:
        while not path.exists() and path != path.parent:
            path = path.parent
        folders[str(path)] = str(path)
    return folders


def _measure_job_files(recipe: Mapping[str, Any]) -> Iterator[tuple[str, list[int] | None]]:
    """Yield `key: path` and [files, bytes] of every setting with an existing path, and None for missing data."""
    for key, value in recipe.items():
        if key in ("out", "name"):
            continue
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            if (measured := _measure_path(text)) or (key in _DATA_SETTINGS and not _URI_SCHEME.match(text)):
                yield f"{key}: {text}", measured


def _measure_path(text: str) -> list[int] | None:
    """Return the number of files and bytes of a path, a glob or a data source; None if it does not exist."""
    from anabatic.core.errors import ConfigError
    from anabatic.data.readers import source_spec

    try:
        path = os.path.expanduser(source_spec.parse_source(text).path)
    except ConfigError:
        return None
    names = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
    if len(names) == 1 and os.path.isdir(names[0]):
        names = [entry.path for entry in os.scandir(names[0])]
    sizes = [os.path.getsize(name) for name in names if os.path.isfile(name)]
    return [len(sizes), sum(sizes)] if names else None
