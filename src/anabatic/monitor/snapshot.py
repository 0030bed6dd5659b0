"""One look at the devices of a machine. Every value may be missing; a missing value is None and never 0."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from anabatic.core.json_reader import to_finite_number

DeviceKind = Literal["npu", "gpu", "cpu"]


@dataclass
class DeviceReading:
    """One chip, or one die of a two-die card. Units stand in the names; memory in MiB, as npu-smi counts it."""

    npu_id: int
    """Card, or index of a GPU; cards need not count from 0."""
    chip_id: int | None = None
    phy_id: int | None = None
    logic_id: int | None = None
    """Index in a process that sees all devices."""
    kind: DeviceKind = "npu"
    name: str | None = None
    health: str | None = None
    """OK, Warning, Alarm, Critical or UNKNOWN, as the tool says it."""
    bus_id: str | None = None
    uuid: str | None = None
    """VDie id of an NPU, UUID of a GPU."""
    power_w: float | None = None
    """Of the whole card; a second die has none."""
    temp_c: float | None = None
    util_pct: float | None = None
    util_kind: str | None = None
    """aicore, npu (950), gpu, cpu, or own (mean of cube and vector, as torch reports it)."""
    overall_pct: float | None = None
    vector_pct: float | None = None
    cube_pct: float | None = None
    bandwidth_pct: float | None = None
    mem_used_mb: int | None = None
    mem_total_mb: int | None = None
    hbm_used_mb: int | None = None
    hbm_total_mb: int | None = None
    hbm_temp_c: float | None = None
    hugepages_used: int | None = None
    hugepages_total: int | None = None
    freq_mhz: int | None = None
    voltage_v: float | None = None
    error_codes: list[int] | None = None

    @property
    def used_mb(self) -> int | None:
        """Of the memory that models live in: HBM, else DDR."""
        return self.hbm_used_mb if self.hbm_total_mb else self.mem_used_mb if self.mem_total_mb else None

    @property
    def total_mb(self) -> int | None:
        """Of the memory that models live in; None where it is unknown or none."""
        return self.hbm_total_mb or self.mem_total_mb or None

    @property
    def memory_kind(self) -> str:
        """The name of that memory."""
        return "RAM" if self.kind == "cpu" else "HBM" if self.hbm_total_mb else "memory"


@dataclass
class DeviceProcess:
    """A process and what it holds on one device."""

    npu_id: int
    chip_id: int | None
    pid: int
    """On the host; another one inside a container."""
    name: str | None = None
    mem_mb: int | None = None
    container_pid: int | None = None
    user: str | None = None
    """None: not a process that this machine (or container) shows."""
    command: str | None = None


@dataclass
class Snapshot:
    """All devices at one moment.

    Attributes:
        taken_at: Unix time.
        source: dcmi, npu-smi, nvml, psutil, or torch (a training process looking at its own device).
        notes: what the reader should know about the figures, and why the sources tried before this one did not do.
        error: why there are no figures; None when there are.
        hint: what to do about the error.
    """

    source: str
    devices: list[DeviceReading] = field(default_factory=list)
    processes: list[DeviceProcess] = field(default_factory=list)
    driver_version: str | None = None
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    hint: str = ""
    taken_at: float = field(default_factory=time.time)

    def to_row(self) -> dict[str, Any]:
        """Return JSON-able values: all fields by their names."""
        return asdict(self)


def format_device_label(npu_id: int, chip_id: int | None, cards: Mapping[int, int]) -> str:
    """Return how a device is called on the screen and in filters: `3`, or `3.1` for a die of a card with several.

    Args:
        cards: devices of each card.
    """
    return f"{npu_id}.{chip_id}" if cards.get(npu_id, 1) > 1 and chip_id is not None else str(npu_id)


def count_devices_per_card(snapshot: Snapshot) -> dict[int, int]:
    """Return the number of devices of each card."""
    counts: dict[int, int] = {}
    for device in snapshot.devices:
        counts[device.npu_id] = counts.get(device.npu_id, 0) + 1
    return counts


_TEXT_FIELDS = {"kind", "name", "health", "bus_id", "uuid", "util_kind", "user", "command"}


def parse_snapshot_row(row: Mapping[str, Any]) -> Snapshot | None:
    """Return the snapshot of a row of a log, None where the row is none; values of another type are left out."""
    source, taken = row.get("source"), row.get("taken_at")
    if not isinstance(source, str) or not _is_number(taken) or not isinstance(row.get("devices"), list):
        return None
    snapshot = Snapshot(source, taken_at=float(taken))  # type: ignore[arg-type]
    for each in row["devices"]:
        values = _keep_valid_fields(each, DeviceReading)
        if "npu_id" in values:
            snapshot.devices.append(DeviceReading(**values))
    for each in row["processes"] if isinstance(row.get("processes"), list) else []:
        values = _keep_valid_fields(each, DeviceProcess)
        if {"npu_id", "pid"} <= values.keys():
            snapshot.processes.append(DeviceProcess(**{"chip_id": None, **values}))
    snapshot.notes = [note for note in row.get("notes") or () if isinstance(note, str)]
    for name in ("driver_version", "error"):
        if isinstance(row.get(name), str):
            setattr(snapshot, name, row[name])
    return snapshot


def _is_number(value: object) -> bool:
    return to_finite_number(value) is not None


def _keep_valid_fields(row: object, kind: type[DeviceReading] | type[DeviceProcess]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if not isinstance(row, dict):
        return values
    for one in fields(kind):
        value = row.get(one.name)
        if isinstance(value, str) if one.name in _TEXT_FIELDS else _is_number(value):
            values[one.name] = value
    return values
