"""Preflight: the facts about one machine, and errors, warnings and tables as pure functions of all machines' facts."""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core.formatting import align_columns, format_size
from anabatic.launch import rendezvous

MUST_MATCH_VERSIONS = ("anabatic", "torch", "torch_npu", "CANN")
"""Versions that must be equal for machines to work together (HCCL: EI0008 for CANN)."""
MAX_CLOCK_SKEW_SECONDS = 1.0
"""Difference between clocks above which logs and file times mislead."""
LOW_DISK_BYTES = 10 << 30
"""Free bytes below which a folder gets a warning."""
_SLOW_LINK_FRACTION = 0.5
"""A link below this fraction of the median rate gets a warning."""


@dataclass(frozen=True)
class PreflightResult:
    """The result of `link_probe.py`.

    Attributes:
        machines: machine -> facts of `collect_machine_facts`, with `address` and `interface`.
        clocks: machine -> seconds ahead of machine 0, and the uncertainty.
        links: machine, machine, backend, bytes per second.
        sees_run_folder: for each machine, whether it sees a file that machine 0 writes next to the run folder.
    """

    machines: Mapping[int, Mapping[str, Any]]
    clocks: Mapping[int, tuple[float, float]]
    links: list[tuple[int, int, str, float]]
    sees_run_folder: list[bool]

    def describe_differences(self, part: str) -> list[str]:
        """Return one line per difference between machine 0 and another in one part of the facts."""
        first = min(self.machines)
        others = {f"machine {number}": facts for number, facts in self.machines.items() if number != first}
        return rendezvous.describe_differences(self.machines[first], others, part)

    def machine_name(self, node_rank: int) -> str:
        """Return the name of a machine in messages."""
        return f"machine {node_rank} ({self.machines[node_rank]['name']})"


def parse_result(result: Mapping[str, Any]) -> PreflightResult:
    """Convert the JSON result, whose keys are strings."""
    machines = {
        int(node_rank): facts for node_rank, facts in sorted(result["found"].items(), key=lambda pair: int(pair[0]))
    }
    clocks = {
        int(node_rank): (float(offset), float(uncertainty))
        for node_rank, (offset, uncertainty) in result["clocks"].items()
    }
    return PreflightResult(machines, clocks, [tuple(link) for link in result["links"]], result["shared"])


def find_errors(result: PreflightResult) -> list[str]:
    """Return the problems that keep the job from running."""
    errors = result.describe_differences("recipe")
    errors += [line for line in result.describe_differences("versions") if line.split(" is ")[0] in MUST_MATCH_VERSIONS]
    errors += _find_file_differences(result)
    for node_rank, facts in result.machines.items():
        devices = facts["devices"]
        accelerated = devices["kind"] in ("npu", "cuda")
        if devices["problem"]:
            errors.append(f"{result.machine_name(node_rank)}: {devices['problem']}")
        elif accelerated and facts["nproc"] > devices["count"]:
            errors.append(
                f"{result.machine_name(node_rank)} is to run {facts['nproc']} processes on {devices['count']} devices"
            )
        if devices["kind"] != result.machines[0]["devices"]["kind"]:
            errors.append(
                f"devices are {result.machines[0]['devices']['kind']} on machine 0 and"
                f" {devices['kind']} on {result.machine_name(node_rank)}"
            )
    if result.sees_run_folder and not result.sees_run_folder[0]:
        errors.append(f"{result.machine_name(0)} cannot write beside the run folder")
    elif other_folders := [node_rank for node_rank, is_seen in enumerate(result.sees_run_folder) if not is_seen]:
        errors.append(
            f"the run folder on {', '.join(map(result.machine_name, other_folders))} is not that of machine 0"
        )
    return errors


def _find_file_differences(result: PreflightResult) -> Iterator[str]:
    names = dict.fromkeys(name for facts in result.machines.values() for name in facts["files"])
    for name in names:
        amounts = {node_rank: facts["files"].get(name) for node_rank, facts in result.machines.items()}
        if missing_machines := [node_rank for node_rank, amount in amounts.items() if amount is None]:
            yield f"{name} is not there on {', '.join(map(result.machine_name, missing_machines))}"
            continue
        for node_rank, amount in amounts.items():
            if amount != amounts[0]:
                yield (
                    f"{name} has {_format_amount(amounts[0])} on machine 0 and {_format_amount(amount)} on "
                    f"{result.machine_name(node_rank)}"
                )


def _format_amount(amount: list[int] | None) -> str:
    files, total = amount or (0, 0)
    return f"{total:,} bytes" + (f" in {files} files" if files != 1 else "")


def find_warnings(result: PreflightResult) -> list[str]:
    """Return the problems that do not keep the job from running."""
    warnings = [
        line for line in result.describe_differences("versions") if line.split(" is ")[0] not in MUST_MATCH_VERSIONS
    ]
    warnings += result.describe_differences("variables")
    for node_rank, facts in result.machines.items():
        warnings += [f"{result.machine_name(node_rank)}: {line}" for line in facts["doctor"]]
        warnings += [
            f"{result.machine_name(node_rank)}: {format_size(free)} free in {folder}"
            for folder, free in facts["free"].items()
            if free < LOW_DISK_BYTES
        ]
        first_devices, devices = (machine["devices"] for machine in (result.machines[0], facts))
        if (first_devices["name"], first_devices["count"]) != (devices["name"], devices["count"]) and first_devices[
            "kind"
        ] == devices["kind"]:
            warnings.append(
                f"devices are {_format_devices(first_devices)} on machine 0 and {_format_devices(devices)} on "
                f"{result.machine_name(node_rank)}"
            )
    for node_rank, (offset, _) in result.clocks.items():
        if abs(offset) >= MAX_CLOCK_SKEW_SECONDS:
            warnings.append(
                f"the clock of {result.machine_name(node_rank)} is {abs(offset):.1f} s"
                f" {'ahead' if offset > 0 else 'behind'}"
            )
    return [*warnings, *_find_slow_links(result)]


def _find_slow_links(result: PreflightResult) -> Iterator[str]:
    for backend in dict.fromkeys(link[2] for link in result.links):
        links = [link for link in result.links if link[2] == backend]
        median = statistics.median(rate for *_, rate in links)
        for first, second, _, rate in links:
            if rate < _SLOW_LINK_FRACTION * median:
                yield (
                    f"{backend} between machines {first} and {second}: {_format_rate(rate)} MB/s, the median is "
                    f"{_format_rate(median)}"
                )


def _format_devices(devices: Mapping[str, Any]) -> str:
    count = f"{devices['count']} x " if devices["kind"] in ("npu", "cuda") else ""
    return f"{count}{devices['name'] or devices['kind']}"


def _format_rate(rate: float) -> str:
    return f"{rate / 1e6:,.0f}"


def format_tables(result: PreflightResult) -> list[str]:
    """Return the lines of the tables: machines, versions, links."""
    rows = [("", "machine", "address", "interface", "devices", "processes", "free", "clock")]
    for node_rank, facts in result.machines.items():
        offset, uncertainty = result.clocks.get(node_rank, (0.0, 0.0))
        clock = f"{offset * 1e3:+.1f} ms (± {uncertainty * 1e3:.1f})" if node_rank in result.clocks else ""
        free = format_size(min(facts["free"].values()))
        rows.append(
            (
                str(node_rank),
                facts["name"],
                facts["address"],
                facts["interface"],
                _format_devices(facts["devices"]),
                str(facts["nproc"]),
                free,
                clock,
            )
        )
    versions = result.machines[0]["versions"]
    different = {line.split(" is ")[0] for line in result.describe_differences("versions")}
    same = ", ".join(f"{name} {version}" for name, version in versions.items() if version and name not in different)
    lines = [*_align_filled_columns(rows), f"same {'on all' if len(result.machines) > 1 else 'here'}: {same}"]
    if result.links:
        backends = list(dict.fromkeys(link[2] for link in result.links))
        rates = {(first, second, backend): rate for first, second, backend, rate in result.links}
        pairs = list(dict.fromkeys((first, second) for first, second, *_ in sorted(result.links)))
        header = ("link", *(f"{backend} MB/s" for backend in backends))
        link_rows = [
            (f"{first} - {second}", *(_format_rate(rates[first, second, backend]) for backend in backends))
            for first, second in pairs
        ]
        lines += _align_filled_columns([header, *link_rows])
    return lines


def _align_filled_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    columns = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    return align_columns([[row[column] for column in columns] for row in rows])


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
    from anabatic.data.readers import sources

    try:
        path = os.path.expanduser(sources.parse_source(text).path)
    except ConfigError:
        return None
    names = [path] if os.path.lexists(path) else glob.glob(path, recursive=True)
    if len(names) == 1 and os.path.isdir(names[0]):
        names = [entry.path for entry in os.scandir(names[0])]
    sizes = [os.path.getsize(name) for name in names if os.path.isfile(name)]
    return [len(sizes), sum(sizes)] if names else None
