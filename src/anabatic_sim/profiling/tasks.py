"""Read what the simulated runtime wrote while torch_npu's profiler ran (csrc/runtime/profile_data.cpp), as tasks with
names and times.

Times are nanoseconds since 1970: the raw clock of the files plus the difference in start_info, as torch_npu computes
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import DataError

Row = dict[str, Any]
_Names = tuple[str, str, str, str]
"""Name, type, core and function of a task."""

# Bits of acl_prof.h.
_ACL_API, _TASK_TIME, _TASK_TIME_L0 = 0x1, 0x2, 0x800
# Operator types that differ from the rest of the API's name (`Name("…")` in op_plugin/ops/aclops).
_TYPES = {
    "Mm": "MatMul",
    "Addmm": "MatMul",
    "Linear": "MatMul",
    "Bmm": "BatchMatMul",
    "Baddbmm": "BatchMatMul",
    "Cat": "ConcatD",
    "IndexSelect": "GatherV2",
    "Silu": "Swish",
    "SiluBackward": "SwishGrad",
    "NativeLayerNorm": "LayerNorm",
    "LogSoftmaxBackwardData": "LogSoftmaxGrad",
}


@dataclass(frozen=True)
class Task:
    """Task of a device."""

    device: int
    number: int
    """Task ID: the position on the device, from 1."""
    name: str
    type: str
    core: str
    """Task Type: AI_CORE, AI_VECTOR_CORE, COMMUNICATION, …"""
    api: str
    stream: int
    thread: int
    launch_begin: int
    launch_end: int
    start: int
    ns: int
    raw: Row
    connection: int
    """Joins the launch on the host with the task."""

    @property
    def end(self) -> int:
        """The first moment after it."""
        return self.start + self.ns

    @property
    def is_collective(self) -> bool:
        """True for what HCCL ran."""
        return bool(self.raw["kind"] == "collective")

    @property
    def is_copy(self) -> bool:
        """True for a copy from or to the host, which is not an operator to op_summary."""
        return bool(self.raw.get("unit") == "link")


@dataclass(frozen=True)
class Profile:
    """One folder PROF_*."""

    settings: Row
    tasks: list[Task]
    """Of all devices, by start."""
    marks: list[Row]
    memory: list[Row]

    @property
    def devices(self) -> list[int]:
        """Physical numbers."""
        return [int(number) for number in self.settings["devices"].split(",")]

    def count_blocks(self, task: Task) -> int:
        """Return the cores that a task is taken to use: all of its kind."""
        cores = {"AI_CORE": self.settings["cube_cores"], "AI_VECTOR_CORE": self.settings["vector_cores"]}
        return int(cores.get(task.core, 0))

    @property
    def is_detailed(self) -> bool:
        """True from Level1 on: types and shapes are collected (`task_time` is l1 in CANN's words)."""
        return bool(self.settings["types"] & _TASK_TIME)

    @property
    def has_api(self) -> bool:
        """True when the host's calls are collected."""
        return bool(self.settings["types"] & _ACL_API)


def name_type(api: str) -> str:
    """Return the operator type of an aclnn function."""
    base = api.removeprefix("aclnn").removeprefix("Inplace")
    return _TYPES.get(base, base)


def _name_core(unit: str, soc: str) -> str:
    # Cube and vector cores are separate on the 910B and later (Ascend/msprof, op_summary: Task Type).
    is_split = bool(re.match(r"Ascend(910B|910_93|950)", soc))
    return "AI_VECTOR_CORE" if unit == "vector" and is_split else "AI_CORE"


def _read_json(path: Path) -> Row:
    try:
        found = json_reader.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}", "the profile is incomplete: was the program killed?") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: not an object", "the profile is damaged: profile again")
    return found


def _read_lines(path: Path) -> Iterator[Row]:
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return  # the program was killed while it wrote
        try:
            yield json_reader.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}", "the profile is damaged: profile again") from error


def _to_nanoseconds(microseconds: str) -> int:
    whole, _, rest = microseconds.partition(".")
    return int(whole) * 1000 + int(rest[:3].ljust(3, "0"))


def _make_operator(row: Row, settings: Row) -> _Names:
    if row["unit"] == "link":
        return "MEMCPY_ASYNC", "MEMCPY_ASYNC", "MEMCPY_ASYNC", "aclrtMemcpyAsync"
    api = row["api"]
    kind = name_type(api)
    return f"{api}_{kind}", kind, _name_core(row["unit"], settings["soc"]), api


def _make_collective(row: Row, counts: dict[str, int]) -> _Names:
    # hcom_allReduce__816_0_1: the last three digits of the group, the number in the group, the number of its loop.
    group = row["communicator"]
    number = counts.get(group, 0)
    counts[group] = number + 1
    kind = f"hcom_{row['name']}_"
    label = f"{sum(group.encode()) % 1000:03d}"
    api = "Hccl" + row["name"][:1].upper() + row["name"][1:]
    return f"{kind}_{label}_{number}_1", kind, "COMMUNICATION", api


def _make_task(device: int, number: int, connection: int, row: Row, names: _Names, offset: int) -> Task:
    name, kind, core, api = names
    begin, end, start = (row[key] + offset for key in ("launch_begin_ns", "launch_end_ns", "start_ns"))
    place = (row["stream"], row["thread"])
    return Task(device, number, name, kind, core, api, *place, begin, end, start, row["ns"], row, connection)


def read_profile(folder: Path) -> Profile:
    """Return the tasks, marks and memory of a folder PROF_*.

    Raises:
        DataError: a file is missing or damaged.
    """
    try:
        return _build_profile(folder)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{folder}: {error!r}", "the profile is damaged: profile again") from error


def _build_profile(folder: Path) -> Profile:
    settings = _read_json(folder / "host" / "sample.json")
    begun = _read_json(folder / "host" / "start_info")
    offset = _to_nanoseconds(begun["collectionTimeBegin"]) - int(begun["clockMonotonicRaw"])
    tasks: list[Task] = []
    memory: list[Row] = []
    for device in sorted(folder.glob("device_*")):
        number = int(device.name.partition("_")[2])
        rows = list(_read_lines(device / "data" / "tasks.jsonl"))
        memory += [
            {"device": number, "at": row["at_ns"] + offset, "bytes": row["bytes"]}
            for row in rows
            if row["kind"] == "memory"
        ]
        if not settings["types"] & (_TASK_TIME | _TASK_TIME_L0):
            continue  # Level_none
        counts: dict[str, int] = {}
        ran = sorted((row for row in rows if row["kind"] != "memory"), key=lambda row: row["start_ns"])
        for position, row in enumerate(ran, 1):
            is_collective = row["kind"] == "collective"
            names = _make_collective(row, counts) if is_collective else _make_operator(row, settings)
            tasks.append(_make_task(number, position, len(tasks) + 1, row, names, offset))
    times = ("begin_ns", "end_ns", "device_begin_ns", "device_end_ns")
    marks = [
        {**row, **{name: row[name] + offset for name in times}} for row in _read_lines(folder / "host/data/marks.jsonl")
    ]
    return Profile(settings, sorted(tasks, key=lambda task: task.start), marks, memory)
