"""The report of a simulation: join the files that each process left (csrc/runtime/report.cpp), and print them as a
table.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, log
from anabatic.core.formatting import format_size
from anabatic.core.paths import write_atomic
from anabatic_sim.machine_spec import OTHER_FILE_HINT, SimMachine
from anabatic_sim.program_name import PROGRAM

_COUNTER_COLUMNS = [
    "operators",
    "syncs",
    "h2d_calls",
    "h2d_bytes",
    "d2h_calls",
    "d2h_bytes",
    "d2d_calls",
    "d2d_bytes",
    "collectives",
    "collective_bytes",
]
"""Counters that a step and a device share."""
_STEP_COLUMNS = [
    *_COUNTER_COLUMNS,
    "device_ns",
    "collective_ns",
    "waited_ns",
    "flops",
    "paper_ns",
    "alone_ns",
    "host_ns",
]
"""Columns of a step, cumulative (`write_step`)."""
_TABLE_COLUMNS = [
    "calls",
    "bytes",
    "paper_ns",
    "host_ns",
    "waited_ns",
    "flops",
    "first",
    "last",
    "last_step_calls",
    "last_step_bytes",
]
"""Columns of a table's row (`write_table`); `first` and `last` are calls up to the end of those steps, the last two are
those of the last step alone."""
_MAX_STEPS = 1000
_LAUNCH_COLUMNS = ("operators", "collectives")

CounterRow = dict[str, float]


@dataclass(frozen=True)
class ProcessCounters:
    """One process's file."""

    pid: int
    latest: CounterRow
    steps: list[CounterRow]
    tables: dict[str, dict[str, CounterRow]]
    dropped_events: int
    started_ns: int = 0
    """On the host's clock, which processes share; `now["host_ns"]` counts from here."""
    device_mask: int = 0
    """Bit N: physical device N has computed for it."""

    @property
    def num_averaged_steps(self) -> int:
        """Steps that per-step figures are a mean of: the first, with its set-up, only counts when it is alone."""
        return max(len(self.steps) - 1, 1 if self.steps else 0)

    def mean_per_step(self, column: str) -> float:
        """Return the mean of a column over the steps."""
        if not self.steps:
            return 0.0
        first = self.steps[0][column] if len(self.steps) > 1 else 0.0
        return (self.steps[-1][column] - first) / self.num_averaged_steps

    def calls_per_step(self, row: CounterRow) -> float:
        """Return a table row's calls in a step."""
        if not self.steps:
            return 0.0
        return (row["last"] - (row["first"] if len(self.steps) > 1 else 0)) / self.num_averaged_steps


def read_processes(folder: Path) -> list[ProcessCounters]:
    """Return what the processes left in `folder`."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            found.append(_read_process(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warn(f"{path.name}: the counters of this process cannot be read ({error!r}) and are left out")
    return [process for process in found if process.latest["operators"] or process.latest["collectives"]]


def _read_process(path: Path) -> ProcessCounters:
    data = json_reader.read_json_file(path)
    tables = {
        name: {key: dict(zip(_TABLE_COLUMNS, row, strict=True)) for key, row in data[name].items()}
        for name in ("operators", "collectives", "syncs", "unfused")
    }
    steps = [dict(zip(_STEP_COLUMNS, step, strict=True)) for step in data["steps"]]
    return ProcessCounters(
        data["pid"],
        dict(zip(_STEP_COLUMNS, data["now"], strict=True)),
        steps,
        tables,
        data["dropped_events"],
        data["started_ns"],
        data["devices"],
    )


def group_by_launch(processes: Sequence[ProcessCounters]) -> list[list[ProcessCounters]]:
    """Return the processes that stepped, those that lived at the same time together: ranks of one launch.

    A pipeline launches once per stage, a launcher again after a failure.
    """
    found: list[list[ProcessCounters]] = []
    ended = -1.0
    for process in sorted((each for each in processes if each.steps), key=lambda each: each.started_ns):
        if process.started_ns > ended:
            found.append([])
        found[-1].append(process)
        ended = max(ended, process.started_ns + process.latest["host_ns"])
    return found


def _select_longest_launch(processes: Sequence[ProcessCounters]) -> list[ProcessCounters]:
    """Return the launch with the most steps: the one that figures a step describe."""
    return max(group_by_launch(processes), key=lambda launch: max(len(each.steps) for each in launch), default=[])


def _sum_table(processes: Sequence[ProcessCounters], name: str) -> list[dict[str, Any]]:
    """Return the rows of a table added over processes; calls per step are those of a rank of the longest launch."""
    rows: dict[str, dict[str, float]] = {}
    stepping = _select_longest_launch(processes)
    for process in processes:
        for key, row in process.tables[name].items():
            total = rows.setdefault(key, dict.fromkeys((*_TABLE_COLUMNS[:6], "per_step"), 0.0))
            for column in _TABLE_COLUMNS[:6]:
                total[column] += row[column]
            if process in stepping:
                total["per_step"] += process.calls_per_step(row) / len(stepping)
    ordered = sorted(rows.items(), key=lambda item: (-item[1]["paper_ns"], -item[1]["calls"], item[0]))
    return [{"name": key, **row} for key, row in ordered]


def _to_milliseconds(ns: float) -> float:
    return round(ns / 1e6, 6)


def _summarize_operations(processes: Sequence[ProcessCounters], name: str) -> list[dict[str, Any]]:
    return [
        {
            "name": row["name"],
            "calls": int(row["calls"]),
            "per_step": round(row["per_step"], 3),
            "bytes": int(row["bytes"]),
            **({"flops": row["flops"]} if name == "operators" else {"waited_ms": _to_milliseconds(row["waited_ns"])}),
            "paper_ms": _to_milliseconds(row["paper_ns"]),
            "host_ms": _to_milliseconds(row["host_ns"]),
        }
        for row in _sum_table(processes, name)
    ]


def _summarize_syncs(processes: Sequence[ProcessCounters]) -> list[dict[str, Any]]:
    rows = []
    for row in sorted(_sum_table(processes, "syncs"), key=lambda row: (-row["per_step"], -row["calls"])):
        line, _, call = row["name"].partition("\t")
        rows.append(
            {
                "line": line,
                "call": call,
                "count": int(row["calls"]),
                "per_step": round(row["per_step"], 3),
                "waited_ms": _to_milliseconds(row["waited_ns"]),
            }
        )
    return rows


def _summarize_unfused(processes: Sequence[ProcessCounters]) -> list[dict[str, Any]]:
    rows = []
    for row in _sum_table(processes, "unfused"):
        name, _, reason = row["name"].partition(": ")
        rows.append({"name": name, "reason": reason, "count": int(row["calls"]), "per_step": round(row["per_step"], 3)})
    return rows


def _summarize_step(processes: Sequence[ProcessCounters]) -> dict[str, Any]:
    """Return the counters of one step of one process, the mean over ranks and steps after the first."""
    stepping = _select_longest_launch(processes)
    columns = [name for name in _STEP_COLUMNS if not name.endswith("_ns")]
    mean = (
        {name: sum(process.mean_per_step(name) for process in stepping) / len(stepping) for name in columns}
        if stepping
        else {}
    )
    return {
        "count": max((len(process.steps) for process in stepping), default=0),
        "processes": len(stepping),
        "launches": len(group_by_launch(processes)),
        **{name: round(value, 3) for name, value in mean.items()},
    }


def _predict_step(processes: Sequence[ProcessCounters], machine: SimMachine) -> dict[str, Any] | None:
    """Return the predicted step: the slowest process decides. None when no step was seen."""
    stepping = _select_longest_launch(processes)
    if not stepping:
        return None
    used = 0
    for process in stepping:
        used |= process.device_mask
    devices = used.bit_count()
    # Of the ranks that meet in every step, the one that waits least is the one that the others wait for.
    slowest = max(stepping, key=lambda process: process.mean_per_step("paper_ns") - process.mean_per_step("waited_ns"))
    step, alone = slowest.mean_per_step("paper_ns"), slowest.mean_per_step("alone_ns")
    peak = machine.chip.device_spec.half_tflops * 1e12
    flops = sum(process.mean_per_step("flops") for process in stepping) / len(stepping)
    waited = max(process.mean_per_step("waited_ns") for process in stepping)
    return {
        "step_ms": _to_milliseconds(step),
        "device_ms": _to_milliseconds(slowest.mean_per_step("device_ns")),
        "collective_ms": _to_milliseconds(slowest.mean_per_step("collective_ns")),
        "waited_ms": _to_milliseconds(waited),
        "launches": round(sum(slowest.mean_per_step(name) for name in _LAUNCH_COLUMNS), 1),
        "flops": flops,
        "mfu": round(flops / (step / 1e9 * peak), 6) if step else 0.0,
        "bound": _classify_bottleneck(slowest, step, alone, waited),
        "scaling": {
            "devices": devices,
            "alone_ms": _to_milliseconds(alone),
            "efficiency": round(alone / step, 4) if step else 0.0,
            "speedup": round(devices * alone / step, 3) if step else 0.0,
        },
    }


def _classify_bottleneck(slowest: ProcessCounters, step: float, alone: float, waited: float) -> str:
    """Return what decides how long a step is."""
    if waited > 0.3 * step:
        return "slowest device"
    if alone < 0.7 * step:
        return "network"
    return "device" if slowest.mean_per_step("device_ns") > 0.7 * alone else "host"


def _summarize_device(index: int, row: Any) -> dict[str, Any]:
    names = ["hbm_total", "hbm_peak", "allocations", *_COUNTER_COLUMNS]
    figures = {name: int(getattr(row, name)) for name in names}
    return {
        "npu": index,
        **figures,
        "host_ms": _to_milliseconds(row.busy_ns),
        "paper_ms": _to_milliseconds(row.paper_ns),
    }


def _summarize_faults(machine: SimMachine, rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [{"fault": str(fault), "struck": int(row.struck)} for fault, row in zip(machine.faults, rows, strict=False)]


def build_report(
    machine: SimMachine, segment: Any, folder: Path, command: Sequence[str], code: int, seconds: float
) -> dict[str, Any]:
    """Return the whole report."""
    processes = read_processes(folder)
    steps = [
        {
            name: round(b[name] - (a[name] if a else 0), 3)
            for name in ("operators", "syncs", "paper_ns", "host_ns", "flops")
        }
        for process in _select_longest_launch(processes)[:1]
        for a, b in zip([None, *process.steps], process.steps, strict=False)
    ]
    return {
        "machine": {"npus": machine.npus, "chip": machine.chip.soc, "hbm": machine.hbm_bytes},
        "command": list(command),
        "state": "ended",
        "exit_code": code if code >= 0 else 128 - code,
        "signal": signal.Signals(-code).name if code < 0 else None,
        "seconds": round(seconds, 3),
        "faults": _summarize_faults(machine, segment.fault),
        "devices": [_summarize_device(index, segment.device[index]) for index in range(machine.npus)],
        "processes": [
            {"pid": process.pid, "steps": len(process.steps), **{name: process.latest[name] for name in _STEP_COLUMNS}}
            for process in processes
        ],
        "step": _summarize_step(processes),
        "steps": steps[-_MAX_STEPS:],
        "operators": _summarize_operations(processes, "operators"),
        "collectives": _summarize_operations(processes, "collectives"),
        "syncs": _summarize_syncs(processes),
        "unfused": _summarize_unfused(processes),
        "paper": _predict_step(processes, machine),
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write `sim.json`."""
    write_atomic(path, json.dumps(report, indent=1, ensure_ascii=False) + "\n", OTHER_FILE_HINT)


def write_trace(folder: Path, path: Path) -> None:
    """Join the processes' events into a Chrome trace: a process per device, a row per stream."""
    lines: list[str] = []
    rows: set[tuple[int, int]] = set()
    for part in sorted(folder.glob("*.trace")):
        for line in part.read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.endswith("},"):
                continue  # the process was killed while it wrote
            try:
                event = json_reader.loads(line[:-1])
                rows.add((event["pid"], event["tid"]))
            except (ValueError, KeyError, TypeError):  # torn in the middle, by a full disk
                continue
            lines.append(line[:-1])
    for device, stream in sorted(rows):
        name = "host waits" if stream < 0 else f"stream {stream}"
        lines.append(
            json.dumps({"ph": "M", "name": "thread_name", "pid": device, "tid": stream, "args": {"name": name}})
        )
    for device in sorted({device for device, _ in rows}):
        lines.append(json.dumps({"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"npu:{device}"}}))
    write_atomic(path, '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n", OTHER_FILE_HINT)


_MAX_ROWS = 8
"""Rows of a list; sim.json has all of them."""


def _format_summary(report: dict[str, Any]) -> list[str]:
    machine, step, devices = report["machine"], report["step"], report["devices"]
    copies = [
        sum(device[f"{way}_{what}"] for device in devices) for way in ("h2d", "d2h") for what in ("calls", "bytes")
    ]
    lines = [
        f"simulated {machine['npus']} x {machine['chip']}: {report['seconds']:.1f} s, exit code {report['exit_code']}",
        f"  peak HBM         {', '.join(format_size(device['hbm_peak']) for device in devices)}",
        f"  host to device   {copies[0]} copies, {format_size(copies[1])}",
        f"  device to host   {copies[2]} copies, {format_size(copies[3])}",
    ]
    if step["count"]:
        others = f", the longest of {step['launches']} launches" if step["launches"] > 1 else ""
        lines.append(
            f"  a step           {step['operators']:.0f} operators, {step['syncs']:.1f} synchronisations, "
            f"{step['collectives']:.1f} collectives of {format_size(step['collective_bytes'])} "
            f"(mean of {step['count']} steps{others})"
        )
    return lines


def _format_prediction(paper: dict[str, Any] | None) -> list[str]:
    if paper is None:
        return [f"  estimated time  no step was seen: see `step` in the guide to `{PROGRAM}`"]
    scaling = paper["scaling"]
    lines = [
        f"  estimated time  {paper['step_ms']:.3f} ms a step, bound by the {paper['bound']}: "
        f"operators {paper['device_ms']:.3f} ms, "
        f"collectives {paper['collective_ms']:.3f} ms, MFU {100 * paper['mfu']:.1f} %"
    ]
    if scaling["devices"] > 1:
        lines.append(f"  scaling          {scaling['speedup']:.2f}x on {scaling['devices']} devices")
    return lines


def _format_list(title: str, rows: list[str]) -> list[str]:
    more = [f"    ... {len(rows) - _MAX_ROWS} more in the report"] if len(rows) > _MAX_ROWS else []
    return [f"  {title}", *(f"    {row}" for row in rows[:_MAX_ROWS]), *more] if rows else []


def render_table(report: dict[str, Any]) -> str:
    """Return the table."""
    lines = _format_summary(report) + _format_prediction(report["paper"])
    seen = bool(report["step"]["count"])

    def format_frequency(row: dict[str, Any], width: int = 9) -> str:
        return f"  {row['per_step']:>{width}.1f} a step" if seen else ""

    operators = [
        f"{row['name']:<44} {row['calls']:>9}{format_frequency(row)}  {row['paper_ms']:>10.3f} ms estimated"
        for row in report["operators"]
    ]
    lines += _format_list("operators", operators)
    collectives = [
        f"{row['name']:<44} {row['calls']:>9}{format_frequency(row)}  {format_size(row['bytes'])}"
        for row in report["collectives"]
    ]
    lines += _format_list("collectives", collectives)
    syncs = [
        f"{row['line']} ({row['call']})  {row['count']} times{format_frequency(row, 0)}" for row in report["syncs"]
    ]
    lines += _format_list("host synchronisations", syncs)
    unfused = [f"{row['name']}: {row['reason']}  {row['count']} times" for row in report["unfused"]]
    lines += _format_list("operators that fell out of their fused kernel", unfused)
    struck = [f"{row['fault']}: struck {row['struck']} times" for row in report["faults"]]
    return "\n".join(lines + _format_list("faults", struck)) + "\n"
