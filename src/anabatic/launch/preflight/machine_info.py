"""What one machine says of itself before a job: versions, devices, places, ports, what it sees of the job's files."""

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
"""Variables that all machines should have alike: HCCL refuses some that differ (EI0005)."""
_LOCAL_SUFFIXES = ("_IFNAME", "_IF_IP", "_HCA", "_WHITELIST_FILE")
"""Ends of those that name something of one machine."""

_DATA_SETTINGS = ("data.train", "data.valid")
"""Settings that name files, or sources that are built in; others may be names of a hub."""
_URI_SCHEME = re.compile(r"[a-z][a-z0-9_]+:")


def collect_machine_facts(recipe: Mapping[str, Any], nproc: int, out: str | None, device: str) -> dict[str, Any]:
    """Return what is compared, as JSON values.

    Args:
        recipe: the resolved settings, flat; empty without a job.
        nproc: processes that are to run here.
        out: the run folder.
        device: type of device that the job asks for.
    """
    from anabatic.doctor import machine_facts as doctor
    from anabatic.doctor.checks import hardware, host, network

    machine = doctor.open_local_machine_quickly()
    own = rendezvous.collect_job_facts(recipe)
    own["versions"] |= {"CANN": _detect_cann_version(machine), "driver": hardware.read_driver_version(machine) or None}
    steer = {name: value for name, value in os.environ.items() if name.startswith(_COMPARED_PREFIXES)}
    checks = (host.check_ports, network.check_host_network, network.check_device_addresses)
    lines = [line for check in checks for line in check(machine) if line.status in ("WARN", "FAIL")]
    return {
        **own,
        "name": platform.node(),
        "nproc": nproc,
        "devices": _describe_devices(device),
        "variables": {name: value for name, value in steer.items() if not name.endswith(_LOCAL_SUFFIXES)},
        "free": {place: shutil.disk_usage(place).free for place in nearest_existing_folders(out)},
        "files": dict(_measure_job_files(recipe)),
        "doctor": [" - ".join(filter(None, (line.describe_result("en"), line.describe_fix("en")))) for line in lines],
    }


def _detect_cann_version(machine: Any) -> str | None:
    from anabatic.doctor.checks import cann

    found = cann.find_active_cann(machine)
    return found.version if found else None


def _describe_devices(asked: str) -> dict[str, Any]:
    """Kind, name and number; what keeps them from working is a `problem`."""
    import torch

    from anabatic.config.sections.common import DeviceSettings
    from anabatic.core.errors import DeviceError
    from anabatic.device import device

    try:
        found = device.select_device(DeviceSettings(type=asked))  # type: ignore[arg-type]
    except DeviceError as error:
        return {"kind": asked, "name": "", "count": 0, "problem": str(error)}
    count = torch.accelerator.device_count() if found.type in ("npu", "cuda") else 1
    return {"kind": found.type, "name": found.name, "count": count, "problem": ""}


def nearest_existing_folders(out: str | None) -> dict[str, str]:
    """The nearest folder that exists above what is written to -> itself, each once."""
    places = [Path(out or ".").expanduser().absolute(), Path(os.environ.get("TMPDIR") or "/tmp")]
    found = {}
    for path in places:
        while not path.exists() and path != path.parent:
            path = path.parent
        found[str(path)] = str(path)
    return found


def _measure_job_files(recipe: Mapping[str, Any]) -> Iterator[tuple[str, list[int] | None]]:
    """Yield `key: path` and [files, bytes] of every setting that names something that is there, None of lost data."""
    for key, value in recipe.items():
        if key in ("out", "name"):
            continue
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str) or not text:
                continue
            if (found := _measure_path(text)) or (key in _DATA_SETTINGS and not _URI_SCHEME.match(text)):
                yield f"{key}: {text}", found


def _measure_path(text: str) -> list[int] | None:
    """Return how many files and bytes a path, a glob or a source of data holds; None: it is none that is there."""
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
