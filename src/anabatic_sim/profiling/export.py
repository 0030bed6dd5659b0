"""The files of `msprof --export=on` and `--analyze=on` from a simulated profile.

Names and columns are those of CANN (Ascend/msprof, docs/en/user_guide/profile_data_file_references.md) that torch_npu's
own parser reads (torch_npu/profiler/analysis). Columns of hardware counters, which nobody can predict, are absent.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from anabatic.core.errors import Failure
from anabatic_sim.profiling.tasks import Profile, Row, Task

# Rows of the timeline from the top (analysis/common_func/trace_view_header_constant.py of Ascend/msprof).
_FRAMEWORK, _CANN, _HARDWARE, _COMMUNICATION, _OVERLAP = 6, 7, 14, 17, 18
_LAYERS = {
    _FRAMEWORK: ("MsprofTx", "CPU"),
    _CANN: ("CANN", "CPU"),
    _HARDWARE: ("Ascend Hardware", "NPU"),
    _COMMUNICATION: ("Communication", "NPU"),
    _OVERLAP: ("Overlap Analysis", "NPU"),
}
_OVERLAP_ROWS = ("Computing", "Communication", "Communication(Not Overlapped)", "Free")
NO_MODEL = 4294967295
"""The model ID of single operators."""
_DETAILS = ("Input Shapes", "Input Data Types", "Input Formats", "Output Shapes", "Output Data Types", "Output Formats")
TENSOR_KEYS = ("input_shapes", "input_types", "input_formats", "output_shapes", "output_types", "output_formats")
Interval = tuple[int, int]


def format_us(ns: int) -> str:
    """Return nanoseconds as microseconds with three decimals, exactly."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def _format_cell(ns: int) -> str:
    return format_us(ns) + "\t"  # as CANN does, so that a spreadsheet keeps all digits


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def subtract_intervals(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """Return what of `whole` is not in `taken`; both disjoint and in order."""
    left: list[Interval] = []
    for begin, end in whole:
        for start, stop in taken:
            if stop <= begin or start >= end:
                continue
            if start > begin:
                left.append((begin, start))
            begin = stop
        if begin < end:
            left.append((begin, end))
    return left


def split_overlap(tasks: Sequence[Task]) -> tuple[list[Interval], ...]:
    """Return when a device computed, communicated, only communicated, and was free between its first and last task."""
    computing = merge_intervals((task.start, task.end) for task in tasks if not task.is_collective)
    talking = merge_intervals((task.start, task.end) for task in tasks if task.is_collective)
    busy = merge_intervals([*computing, *talking])
    free = subtract_intervals([(busy[0][0], busy[-1][1])], busy) if busy else []
    return computing, talking, subtract_intervals(talking, computing), free


def _write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(columns)
        table.writerows(rows)


class _Timeline:
    """Events of a Chrome trace in CANN's layout."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.events: list[Row] = []
        self._named: set[tuple[int, int]] = set()

    def _process(self, layer: int, device: int) -> int:
        # Three numbers in one, which torch_npu computes likewise (TraceEventManager.get_pid_format).
        return int(self._profile.settings["pid"]) << 10 | layer << 5 | device

    def _name(self, layer: int, device: int, row: int, title: str) -> int:
        process = self._process(layer, device)
        if (process, -1) not in self._named:
            self._named.add((process, -1))
            name, kind = _LAYERS[layer]
            labels = kind if kind == "CPU" else f"{kind} {device}"
            for key, value in (("process_name", {"name": name}), ("process_labels", {"labels": labels})):
                self.events.append({"name": key, "pid": process, "tid": 0, "ph": "M", "args": value})
            sort = {"sort_index": layer}
            self.events.append({"name": "process_sort_index", "pid": process, "tid": 0, "ph": "M", "args": sort})
        if (process, row) not in self._named:
            self._named.add((process, row))
            for key, args in (("thread_name", {"name": title}), ("thread_sort_index", {"sort_index": row})):
                self.events.append({"name": key, "pid": process, "tid": row, "ph": "M", "args": args})
        return process

    def _add(self, name: str, process: int, row: int, begin: int, ns: int, args: Row) -> None:
        event = {"name": name, "pid": process, "tid": row, "ts": format_us(begin), "dur": ns / 1000, "ph": "X"}
        self.events.append({**event, "args": args})

    def add_launch(self, task: Task) -> None:
        """Add the calls of the host."""
        process = self._name(_CANN, 0, task.thread, f"Thread {task.thread}")
        ns = task.launch_end - task.launch_begin
        args = {"Thread Id": task.thread, "Mode": task.api, "level": "acl", "id": "0", "item_id": "0"}
        connected = {"connection_id": task.connection}
        self._add(f"AscendCL@{task.api}", process, task.thread, task.launch_begin, ns, {**args, **connected})
        args = {"Thread Id": task.thread, "Mode": "launch", "level": "node", "id": "0", "item_id": task.name}
        self._add("Node@launch", process, task.thread, task.launch_begin, ns, {**args, **connected})

    def add_task(self, task: Task) -> None:
        """Add what ran on the device, with an arrow from its launch."""
        layer = _COMMUNICATION if task.is_collective else _HARDWARE
        title = "Group 0 Communication" if task.is_collective else f"Stream {task.stream}"
        process = self._name(layer, task.device, task.stream, title)
        args: Row = {"Model Id": NO_MODEL, "Task Type": task.core, "Physic Stream Id": task.stream}
        args |= {"Task Id": task.number, "Batch Id": 0, "Subtask Id": NO_MODEL, "connection_id": task.connection}
        if task.is_collective:
            args |= {"group": task.raw["communicator"], "ranks": task.raw["ranks"], "size(Byte)": task.raw["bytes"]}
        self._add(task.name, process, task.stream, task.start, task.ns, args)
        flow = {"cat": "HostToDevice", "id": str(task.connection), "name": f"HostToDevice{task.connection}"}
        launcher = self._process(_CANN, 0)
        begin = {"ph": "s", "pid": launcher, "tid": task.thread, "ts": format_us(task.launch_begin)}
        end = {"ph": "f", "bp": "e", "pid": process, "tid": task.stream, "ts": format_us(task.start)}
        self.events += [{**flow, **begin}, {**flow, **end}]

    def add_overlap(self, device: int, tasks: Sequence[Task]) -> None:
        """Add when a device computed, communicated and did neither."""
        for row, (title, intervals) in enumerate(zip(_OVERLAP_ROWS, split_overlap(tasks), strict=True)):
            process = self._name(_OVERLAP, device, row, title)
            for begin, end in intervals:
                self._add(title, process, row, begin, end - begin, {})

    def add_mark(self, mark: Row, number: int) -> None:
        """Add a mark or range of mstx."""
        process = self._name(_FRAMEWORK, 0, mark["thread"], f"Thread {mark['thread']}")
        args = {"Thread Id": mark["thread"], "domain": mark["domain"], "event_type": "start/end"}
        ns = mark["end_ns"] - mark["begin_ns"]
        self._add(mark["message"], process, mark["thread"], mark["begin_ns"], ns, args)
        if mark["device"] < 0:
            return
        device = self._name(_HARDWARE, mark["device"], mark["stream"], f"Stream {mark['stream']}")
        took = mark["device_end_ns"] - mark["device_begin_ns"]
        args = {"Physic Stream Id": mark["stream"], "Task Id": NO_MODEL - number}
        self._add(mark["message"], device, mark["stream"], mark["device_begin_ns"], took, args)
        flow = {"cat": "MsTx", "id": str(NO_MODEL - number), "name": f"MsTx_{number}"}
        begin = {"ph": "s", "pid": process, "tid": mark["thread"], "ts": format_us(mark["begin_ns"])}
        end = {"ph": "f", "bp": "e", "pid": device, "tid": mark["stream"], "ts": format_us(mark["device_begin_ns"])}
        self.events += [{**flow, **begin}, {**flow, **end}]


def build_timeline(profile: Profile) -> list[Row]:
    """Return the events of msprof_*.json."""
    timeline = _Timeline(profile)
    for task in sorted(profile.tasks, key=lambda task: task.launch_begin):
        timeline.add_launch(task)
    for task in profile.tasks:
        timeline.add_task(task)
    for device in profile.devices:
        timeline.add_overlap(device, [task for task in profile.tasks if task.device == device])
    for number, mark in enumerate(profile.marks):
        timeline.add_mark(mark, number)
    return timeline.events


def _list_waits(tasks: Sequence[Task]) -> dict[int, int]:
    """Return, by connection, the time between the end of the stream's last task and the start of this one."""
    ends: dict[tuple[int, int], int] = {}
    waits: dict[int, int] = {}
    for task in tasks:
        key = (task.device, task.stream)
        waits[task.connection] = max(task.start - ends.get(key, task.start), 0)
        ends[key] = max(ends.get(key, 0), task.end)
    return waits


def _write_summary(profile: Profile, path: Path) -> None:
    columns = ["Device_id", "Model ID", "Task ID", "Stream ID", "Op Name", "OP Type", "OP State", "Task Type"]
    columns += ["Task Start Time(us)", "Task Duration(us)", "Task Wait Time(us)", "Block Num", "Mix Block Num"]
    waits = _list_waits(profile.tasks)
    rows = []
    for task in profile.tasks:
        if task.is_copy:
            continue
        names = ["N/A", "N/A"] if task.is_collective else [task.number, task.stream]
        times = [_format_cell(task.start), format_us(task.ns), format_us(waits[task.connection])]
        details = [task.raw.get(key, "N/A") or "N/A" for key in TENSOR_KEYS]
        if not profile.is_detailed:
            unknown = ["N/A", "N/A", "N/A"] if not task.is_collective else [task.type, "N/A", task.core]
            rows.append([task.device, NO_MODEL, *names, task.name, *unknown, *times, 0, "N/A", *["N/A"] * 6])
            continue
        shapes = [f'"{value}"' if index % 3 == 0 and value != "N/A" else value for index, value in enumerate(details)]
        state = "N/A" if task.is_collective else "dynamic"
        blocks = profile.count_blocks(task)
        what = [task.name, task.type, state, task.core]
        rows.append([task.device, NO_MODEL, *names, *what, *times, blocks, 0, *shapes])
    _write_table(path, [*columns, *_DETAILS], rows)


def _write_statistic(profile: Profile, path: Path) -> None:
    columns = ["Device_id", "OP Type", "Core Type", "Count", "Total Time(us)", "Min Time(us)", "Avg Time(us)"]
    groups: dict[tuple[int, str, str], list[int]] = {}
    totals: dict[int, int] = {}
    for task in profile.tasks:
        if not task.is_collective and not task.is_copy:
            groups.setdefault((task.device, task.type, task.core), []).append(task.ns)
            totals[task.device] = totals.get(task.device, 0) + task.ns
    rows = [
        [*key, len(all_ns), format_us(sum(all_ns)), format_us(min(all_ns)), f"{fmean(all_ns) / 1000:.3f}"]
        + [format_us(max(all_ns)), f"{100 * sum(all_ns) / max(totals[key[0]], 1):.3f}"]
        for key, all_ns in sorted(groups.items(), key=lambda item: -sum(item[1]))
    ]
    _write_table(path, [*columns, "Max Time(us)", "Ratio(%)"], rows)


def _write_api_statistic(profile: Profile, path: Path) -> None:
    columns = ["Device_id", "Level", "API Name", "Time(us)", "Count", "Avg(us)", "Min(us)", "Max(us)", "Variance"]
    groups: dict[tuple[str, str], list[float]] = {}
    for task in profile.tasks:
        took = (task.launch_end - task.launch_begin) / 1000
        groups.setdefault(("acl", task.api), []).append(took)
        groups.setdefault(("node", "launch"), []).append(took)
    rows = [
        ["host", *key, f"{sum(us):.3f}", len(us), f"{fmean(us):.3f}", f"{min(us):.3f}", f"{max(us):.3f}"]
        + [f"{pvariance(us):.3f}"]
        for key, us in sorted(groups.items(), key=lambda item: -sum(item[1]))
    ]
    _write_table(path, columns, rows)


def _write_task_times(profile: Profile, path: Path) -> None:
    columns = ["Device_id", "kernel_name", "kernel_type", "stream_id", "task_id", "task_time(us)", "task_start(us)"]
    rows = [
        [task.device, task.name, task.core, task.stream, task.number, format_us(task.ns), _format_cell(task.start)]
        + [_format_cell(task.end)]
        for task in profile.tasks
    ]
    _write_table(path, [*columns, "task_stop(us)"], rows)


def _write_memory(profile: Profile, path: Path) -> None:
    columns = ["Device_id", "event", "ddr(KB)", "hbm(KB)", "memory(KB)", "timestamp(us)"]
    rows = [
        [row["device"], "APP", 0, row["bytes"] / 1024, row["bytes"] / 1024, _format_cell(row["at"])]
        for row in profile.memory
    ]
    _write_table(path, columns, rows)


def export_profile(profile: Profile, folder: Path) -> None:
    """Write mindstudio_profiler_output of a folder PROF_*.

    Raises:
        Failure: it cannot be written.
    """
    stamp = time.strftime("%Y%m%d%H%M%S")
    target = folder / "mindstudio_profiler_output"
    try:
        target.mkdir(exist_ok=True)
        # The timeline first: torch_npu reads it as soon as there is a table.
        timeline = json.dumps(build_timeline(profile), ensure_ascii=False)
        (target / f"msprof_{stamp}.json").write_text(timeline, encoding="utf-8")
        if profile.memory:
            _write_memory(profile, target / f"npu_mem_{stamp}.csv")
        if profile.is_detailed:
            _write_statistic(profile, target / f"op_statistic_{stamp}.csv")
        if profile.has_api:
            _write_api_statistic(profile, target / f"api_statistic_{stamp}.csv")
        _write_task_times(profile, target / f"task_time_{stamp}.csv")
        _write_summary(profile, target / f"op_summary_{stamp}.csv")
    except OSError as error:
        raise Failure(f"{target}: {error.strerror}", "make room for the profile, or choose another folder") from error


def describe_collective(task: Task) -> Row:
    """Return what communication.json says about a collective. Waiting is the predicted one, for the last rank."""
    megabytes, milliseconds = task.raw["bytes"] / 1e6, task.ns / 1e6
    waited = task.raw["waited_ns"] / 1e6
    link = {
        "Transit Size(MB)": round(megabytes, 6),
        "Transit Time(ms)": round(milliseconds, 6),
        "Bandwidth(GB/s)": round(megabytes / milliseconds, 4) if milliseconds else 0,
        "Large Packet Ratio": 0,
        "Size Distribution": {str(round(megabytes, 6)): [1, round(milliseconds, 6)]},
    }
    none: Row = {name: 0 for name in link} | {"Size Distribution": {}}
    return {
        "Communication Time Info": {
            "Start Timestamp(us)": format_us(task.start),
            "Elapse Time(ms)": round(milliseconds + waited, 6),
            "Transit Time(ms)": round(milliseconds, 6),
            "Wait Time(ms)": round(waited, 6),
            "Synchronization Time(ms)": round(waited, 6),
            "Idle Time(ms)": 0,
            "Wait Time Ratio": round(waited / (waited + milliseconds), 4) if waited + milliseconds else 0,
            "Synchronization Time Ratio": round(waited / (waited + milliseconds), 4) if waited + milliseconds else 0,
        },
        "Communication Bandwidth Info": {"RDMA": none, "HCCS": link, "PCIE": none, "SDMA": link, "SIO": none},
    }


def analyze_profile(profile: Profile, folder: Path) -> None:
    """Write analyze/communication.json of a folder PROF_*.

    Raises:
        Failure: it cannot be written.
    """
    collectives = [task for task in profile.tasks if task.is_collective]
    if not collectives:
        return
    target = folder / "analyze"
    found = {f"{task.name}@{task.raw['communicator']}": describe_collective(task) for task in collectives}
    try:
        target.mkdir(exist_ok=True)
        (target / "communication.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        raise Failure(f"{target}: {error.strerror}", "make room for the profile, or choose another folder") from error
