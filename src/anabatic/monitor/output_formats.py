"""Figures for programs: JSON and CSV lines, a log that can be played again, and the text that Prometheus reads."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, DataError
from anabatic.monitor.sampler import Frame
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot, parse_snapshot_row

CSV_COLUMNS = (
    *("taken_at", "source", "kind", "npu_id", "chip_id", "logic_id", "name", "health", "power_w", "temp_c"),
    *("util_pct", "util_kind", "used_mb", "total_mb", "overall_pct", "vector_pct", "cube_pct", "bandwidth_pct"),
    *("bus_id", "pids"),
)


def frame_to_row(frame: Frame, snapshot: Snapshot) -> dict[str, Any]:
    """Return a frame as one JSON-able object: the snapshot's fields, `age_s` and, after a failed reading, `error`."""
    return {**snapshot.to_row(), "age_s": round(frame.get_age(), 3), "error": frame.problem or None, "hint": frame.hint}


def frame_to_log_row(frame: Frame) -> dict[str, Any]:
    """Return the row of `--log`, without what is not known: a failed reading has an error and no devices."""
    if not frame.problem:
        row = frame.snapshot.to_row()
        for name in ("devices", "processes"):
            row[name] = [{key: value for key, value in each.items() if value is not None} for each in row[name]]
        return row
    taken = frame.snapshot.taken_at + frame.get_age()
    return Snapshot(frame.snapshot.source, error=frame.problem, hint=frame.hint, taken_at=taken).to_row()


def format_csv(snapshot: Snapshot, heading: bool) -> str:
    """Return a line per device; what is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if heading:
        writer.writerow(CSV_COLUMNS)
    for device in snapshot.devices:
        pids = [
            str(each.pid)
            for each in snapshot.processes
            if (each.npu_id, each.chip_id) == (device.npu_id, device.chip_id)
        ]
        extra_columns = {"taken_at": round(snapshot.taken_at, 3), "source": snapshot.source, "pids": " ".join(pids)}
        writer.writerow(
            [extra_columns[name] if name in extra_columns else getattr(device, name) for name in CSV_COLUMNS]
        )
    return text.getvalue()


def read_recording(path: Path) -> Iterator[Frame]:
    """Yield the frames of a log; lines that are no reading are skipped.

    Raises:
        ConfigError: there is no such file.
        DataError: no line of it is a reading.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is no file", "give a file that `anabatic monitor --log FILE` wrote")
    last: Snapshot | None = None
    number = 0
    for each in json_reader.read_json_lines(path):
        found = parse_snapshot_row(each)
        if found is None:
            continue
        number += 1
        good = found.error is None
        last = found if good or last is None else last
        yield Frame(number, last, "" if good else found.error or "", "", now=found.taken_at)
    if not number:
        raise DataError(f"{path} holds no reading", "give a file that `anabatic monitor --log FILE` wrote")


_NPU_METRICS: tuple[tuple[str, str, Callable[[DeviceReading], float | None]], ...] = (
    ("utilization", "the utilization of the AI cores, percent", lambda each: each.util_pct),
    ("overall_utilization", "the overall utilization, percent", lambda each: each.overall_pct),
    ("vector_utilization", "the utilization of the vector cores, percent", lambda each: each.vector_pct),
    ("cube_utilization", "the utilization of the cube cores, percent", lambda each: each.cube_pct),
    ("temperature", "the temperature, degrees Celsius", lambda each: each.temp_c),
    ("power", "the power, watts", lambda each: each.power_w),
    ("voltage", "the voltage, volts", lambda each: each.voltage_v),
    ("aicore_current_freq", "the clock of the AI cores, MHz", lambda each: each.freq_mhz),
    ("health_status", "1 healthy, 0 not", lambda each: None if each.health is None else float(each.health == "OK")),
    ("total_memory", "the DDR memory, MB", lambda each: each.mem_total_mb or None),
    ("used_memory", "the DDR memory in use, MB", lambda each: each.mem_used_mb if each.mem_total_mb else None),
    ("hbm_total_memory", "the HBM, MB", lambda each: each.hbm_total_mb),
    ("hbm_used_memory", "the HBM in use, MB", lambda each: each.hbm_used_mb),
    (
        "hbm_utilization",
        "the share of the HBM in use, percent",
        lambda each: (
            None if not each.hbm_total_mb or each.hbm_used_mb is None else 100 * each.hbm_used_mb / each.hbm_total_mb
        ),
    ),
    ("hbm_bandwidth_utilization", "the used bandwidth of the HBM, percent", lambda each: each.bandwidth_pct),
    ("hbm_temperature", "the temperature of the HBM, degrees Celsius", lambda each: each.hbm_temp_c),
)
"""Names of Ascend's npu-exporter behind `npu_chip_info_` (Ascend/mind-cluster, component/npu-exporter)."""
_GPU_METRICS: tuple[tuple[str, str, Callable[[DeviceReading], float | None]], ...] = (
    ("GPU_UTIL", "GPU utilization, percent", lambda each: each.util_pct),
    ("MEM_COPY_UTIL", "memory utilization, percent", lambda each: each.bandwidth_pct),
    ("FB_USED", "memory in use, MiB", lambda each: each.mem_used_mb),
    (
        "FB_FREE",
        "free memory, MiB",
        lambda each: (
            None if each.mem_total_mb is None or each.mem_used_mb is None else each.mem_total_mb - each.mem_used_mb
        ),
    ),
    ("POWER_USAGE", "power, watts", lambda each: each.power_w),
    ("GPU_TEMP", "temperature, degrees Celsius", lambda each: each.temp_c),
    ("SM_CLOCK", "SM clock, MHz", lambda each: each.freq_mhz),
)
"""Names of NVIDIA's dcgm-exporter behind `DCGM_FI_DEV_` (NVIDIA/dcgm-exporter, etc/default-counters.csv)."""


def _quote_label(value: object) -> str:
    text = "" if value is None else str(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _format_labels(**values: object) -> str:
    return "{" + ",".join(f"{name}={_quote_label(value)}" for name, value in values.items()) + "}"


def _get_exporter_id(device: DeviceReading) -> int:
    """Return the number npu-exporter gives a chip: the physical one, where it is known."""
    return next(each for each in (device.phy_id, device.logic_id, device.npu_id) if each is not None)


def _make_npu_labels(device: DeviceReading) -> dict[str, object]:
    return {
        "id": _get_exporter_id(device),
        "model_name": (device.name or "").removeprefix("Ascend"),
        "vdie_id": device.uuid,
        "pcie_bus_info": device.bus_id,
        "namespace": "",
        "pod_name": "",
        "container_name": "",
    }


def format_prometheus(
    frame: Frame, run: dict[str, float], ranks: Sequence[tuple[str, dict[str, object], float]] = ()
) -> str:
    """Return the text format 0.0.4. A value that is not known is absent; readings carry their own time.

    Args:
        frame: what is known.
        run: figures of a training run by name; empty without one.
        ranks: (name, labels, value) of its single ranks.
    """
    snapshot = frame.snapshot
    stamp = f" {int(snapshot.taken_at * 1000)}"
    npus = [each for each in snapshot.devices if each.kind == "npu"]
    gpus = [each for each in snapshot.devices if each.kind == "gpu"]
    lines: list[str] = []

    def add_series(name: str, help_text: str, samples: list[tuple[str, float]], when: str = stamp) -> None:
        if samples:
            lines.extend([f"# HELP {name} {help_text}", f"# TYPE {name} gauge"])
            lines.extend(f"{name}{labels} {value:.10g}{when}" for labels, value in samples)

    if npus:
        add_series("machine_npu_nums", "the number of NPUs of the machine", [("", len(npus))])
    for name, text, value in _NPU_METRICS:
        found = [
            (_format_labels(**_make_npu_labels(each)), known) for each in npus if (known := value(each)) is not None
        ]
        add_series(f"npu_chip_info_{name}", text, found)
    name_series = [(_format_labels(**_make_npu_labels(each), name=each.name), 1.0) for each in npus if each.name]
    add_series("npu_chip_info_name", "the name", name_series)
    coded = [
        (_format_labels(**_make_npu_labels(each)), float((each.error_codes or [0])[0]))
        for each in npus
        if each.error_codes is not None
    ]
    add_series("npu_chip_info_error_code", "the first error code, 0 without one", coded)
    _add_process_series(npus, snapshot.processes, add_series)
    host = os.uname().nodename
    for name, text, value in _GPU_METRICS:
        found = [
            (
                _format_labels(
                    gpu=each.npu_id,
                    UUID=each.uuid,
                    pci_bus_id=each.bus_id,
                    device=f"nvidia{each.npu_id}",
                    modelName=each.name,
                    Hostname=host,
                ),
                known,
            )
            for each in gpus
            if (known := value(each)) is not None
        ]
        add_series(f"DCGM_FI_DEV_{name}", text, found)
    add_series("anabatic_monitor_age_seconds", "seconds since the last good reading", [("", frame.get_age())], "")
    for name, figure in run.items():
        add_series(f"anabatic_run_{name}", f"{name} of the run's last row", [("", figure)], "")
    for name in dict.fromkeys(name for name, _, _ in ranks):
        found = [(_format_labels(**labels), value) for one, labels, value in ranks if one == name]
        add_series(f"anabatic_run_{name}", f"{name} of the run's last row", found, "")
    return "\n".join(lines) + "\n"


def _add_process_series(npus: list[DeviceReading], processes: list[DeviceProcess], series: Callable[..., None]) -> None:
    memory_series, counts = [], []
    for device in npus:
        device_processes = [
            each for each in processes if (each.npu_id, each.chip_id) == (device.npu_id, device.chip_id)
        ]
        labels = _make_npu_labels(device)
        counts.append((_format_labels(**labels), float(len(device_processes))))
        memory_series += [
            (_format_labels(**labels, process_id=each.pid), float(each.mem_mb))
            for each in device_processes
            if each.mem_mb is not None
        ]
    series("npu_chip_info_process_info_num", "the number of processes", counts)
    series("npu_chip_info_process_info", "the memory of a process, MB", memory_series)
