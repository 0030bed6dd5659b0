"""What the pre-flight found, judged and laid out: pure functions of what the machines say of themselves."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabatic.core.formatting import format_size
from anabatic.launch import rendezvous

MUST_MATCH_VERSIONS = ("anabatic", "torch", "torch_npu", "CANN")
"""Versions without whose equality machines do not work together (HCCL: EI0008 for CANN)."""
MAX_CLOCK_SKEW_SECONDS = 1.0
"""Seconds between two clocks from which logs and the age of files mislead."""
LOW_DISK_BYTES = 10 << 30
"""Free bytes below which a place is worth a word."""
_SLOW_LINK_FRACTION = 0.5
"""A link below this share of the median is worth a word."""


@dataclass(frozen=True)
class PreflightResult:
    """The result of `links.py`.

    Attributes:
        machines: number -> facts of `machine_info.py`, with `address` and `interface`.
        clocks: number -> seconds ahead of machine 0, and the uncertainty.
        links: machine, machine, backend, bytes a second.
        sees_run_folder: machine by machine, whether it sees what machine 0 writes beside the run folder.
    """

    machines: Mapping[int, Mapping[str, Any]]
    clocks: Mapping[int, tuple[float, float]]
    links: list[tuple[int, int, str, float]]
    sees_run_folder: list[bool]

    def machine_name(self, number: int) -> str:
        """What a machine is called."""
        return f"machine {number} ({self.machines[number]['name']})"


def parse_result(result: Mapping[str, Any]) -> PreflightResult:
    """Return what was written as JSON, where keys are texts."""
    machines = {int(number): facts for number, facts in sorted(result["found"].items(), key=lambda pair: int(pair[0]))}
    clocks = {int(number): (float(ahead), float(about)) for number, (ahead, about) in result["clocks"].items()}
    return PreflightResult(machines, clocks, [tuple(link) for link in result["links"]], result["shared"])


def find_errors(found: PreflightResult) -> list[str]:
    """Return what keeps the job from running, by name."""
    told = rendezvous.describe_differences(found.machines, "recipe")
    told += [
        line
        for line in rendezvous.describe_differences(found.machines, "versions")
        if line.split(" is ")[0] in MUST_MATCH_VERSIONS
    ]
    told += _find_file_differences(found)
    for number, facts in found.machines.items():
        devices = facts["devices"]
        accelerated = devices["kind"] in ("npu", "cuda")
        if devices["problem"]:
            told.append(f"{found.machine_name(number)}: {devices['problem']}")
        elif accelerated and facts["nproc"] > devices["count"]:
            told.append(
                f"{found.machine_name(number)} is to run {facts['nproc']} processes on {devices['count']} devices"
            )
        if devices["kind"] != found.machines[0]["devices"]["kind"]:
            told.append(
                f"devices are {found.machines[0]['devices']['kind']} on machine 0 and"
                f" {devices['kind']} on {found.machine_name(number)}"
            )
    if found.sees_run_folder and not found.sees_run_folder[0]:
        told.append(f"{found.machine_name(0)} cannot write beside the run folder")
    elif apart := [number for number, seen in enumerate(found.sees_run_folder) if not seen]:
        told.append(f"the run folder on {', '.join(map(found.machine_name, apart))} is not that of machine 0")
    return told


def _find_file_differences(found: PreflightResult) -> Iterator[str]:
    everything = dict.fromkeys(name for facts in found.machines.values() for name in facts["files"])
    for name in everything:
        seen = {number: facts["files"].get(name) for number, facts in found.machines.items()}
        if absent := [number for number, what in seen.items() if what is None]:
            yield f"{name} is not there on {', '.join(map(found.machine_name, absent))}"
            continue
        for number, what in seen.items():
            if what != seen[0]:
                yield (
                    f"{name} has {_format_amount(seen[0])} on machine 0 and {_format_amount(what)} on "
                    f"{found.machine_name(number)}"
                )


def _format_amount(what: list[int] | None) -> str:
    files, total = what or (0, 0)
    return f"{total:,} bytes" + (f" in {files} files" if files != 1 else "")


def find_warnings(found: PreflightResult) -> list[str]:
    """Return what deserves a look, by name."""
    told = [
        line
        for line in rendezvous.describe_differences(found.machines, "versions")
        if line.split(" is ")[0] not in MUST_MATCH_VERSIONS
    ]
    told += rendezvous.describe_differences(found.machines, "variables")
    for number, facts in found.machines.items():
        told += [f"{found.machine_name(number)}: {line}" for line in facts["doctor"]]
        told += [
            f"{found.machine_name(number)}: {format_size(free)} free in {place}"
            for place, free in facts["free"].items()
            if free < LOW_DISK_BYTES
        ]
        mine, theirs = (each["devices"] for each in (found.machines[0], facts))
        if (mine["name"], mine["count"]) != (theirs["name"], theirs["count"]) and mine["kind"] == theirs["kind"]:
            told.append(
                f"devices are {_format_devices(mine)} on machine 0 and {_format_devices(theirs)} on "
                f"{found.machine_name(number)}"
            )
    for number, (ahead, _) in found.clocks.items():
        if abs(ahead) >= MAX_CLOCK_SKEW_SECONDS:
            told.append(
                f"the clock of {found.machine_name(number)} is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}"
            )
    return [*told, *_find_slow_links(found)]


def _find_slow_links(found: PreflightResult) -> Iterator[str]:
    for backend in dict.fromkeys(link[2] for link in found.links):
        rates = [link for link in found.links if link[2] == backend]
        middle = statistics.median(rate for *_, rate in rates)
        for one, other, _, rate in rates:
            if rate < _SLOW_LINK_FRACTION * middle:
                yield (
                    f"{backend} between machines {one} and {other}: {_format_rate(rate)} MB/s, the median is "
                    f"{_format_rate(middle)}"
                )


def _format_devices(devices: Mapping[str, Any]) -> str:
    count = f"{devices['count']} x " if devices["kind"] in ("npu", "cuda") else ""
    return f"{count}{devices['name'] or devices['kind']}"


def _format_rate(rate: float) -> str:
    return f"{rate / 1e6:,.0f}"


def format_tables(found: PreflightResult) -> list[str]:
    """Return the tables: machines, versions, links."""
    rows = [("", "machine", "address", "interface", "devices", "processes", "free", "clock")]
    for number, facts in found.machines.items():
        ahead, about = found.clocks.get(number, (0.0, 0.0))
        clock = f"{ahead * 1e3:+.1f} ms (± {about * 1e3:.1f})" if number in found.clocks else ""
        free = format_size(min(facts["free"].values()))
        rows.append(
            (
                str(number),
                facts["name"],
                facts["address"],
                facts["interface"],
                _format_devices(facts["devices"]),
                str(facts["nproc"]),
                free,
                clock,
            )
        )
    first = found.machines[0]["versions"]
    different = {line.split(" is ")[0] for line in rendezvous.describe_differences(found.machines, "versions")}
    same = ", ".join(f"{name} {version}" for name, version in first.items() if version and name not in different)
    told = [*_align_columns(rows), f"same {'on all' if len(found.machines) > 1 else 'here'}: {same}"]
    if found.links:
        ways = list(dict.fromkeys(link[2] for link in found.links))
        rates = {(one, other, way): rate for one, other, way, rate in found.links}
        pairs = list(dict.fromkeys((one, other) for one, other, *_ in sorted(found.links)))
        heads = ("link", *(f"{way} MB/s" for way in ways))
        figures = [
            (f"{one} - {other}", *(_format_rate(rates[one, other, way]) for way in ways)) for one, other in pairs
        ]
        told += _align_columns([heads, *figures])
    return told


def _align_columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    used = [place for place in range(len(rows[0])) if any(row[place] for row in rows[1:])]
    widths = {place: max(len(row[place]) for row in rows) for place in used}
    return ["  ".join(f"{row[place]:<{widths[place]}}" for place in used).rstrip() for row in rows]
