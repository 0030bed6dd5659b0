"""The database of `msprof --export=on --type=db` from a simulated profile: the tables that torch_npu's parser reads.

Tables and columns: Ascend/msprof, docs/en/user_guide/profile_data_file_references_db.md.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from anabatic.core.errors import Failure
from anabatic_sim.profiling.export import NO_MODEL, TENSOR_KEYS, describe_collective, split_overlap
from anabatic_sim.profiling.tasks import Profile, Task

_API_LEVELS = {20000: "acl", 15000: "model", 10000: "node", 5500: "communication", 5000: "runtime"}
_API_LEVELS |= {50001: "op", 50002: "queue", 50003: "trace", 50004: "mstx"}
_ACL, _NODE = 20000, 10000
_HCCL_TYPES = [
    "INT8",
    "INT16",
    "INT32",
    "FP16",
    "FP32",
    "INT64",
    "UINT64",
    "UINT8",
    "UINT16",
    "UINT32",
    "FP64",
    "BFP16",
]
_TASK = "startNs endNs deviceId connectionId globalTaskId globalPid taskType contextId streamId taskId modelId"
_COMPUTE = "name globalTaskId blockNum mixBlockNum taskType opType inputShapes inputDataTypes inputFormats outputShapes"
_COMPUTE += " outputDataTypes outputFormats attrInfo opState hf32Eligible"
_OPERATION = "opName startNs endNs connectionId groupName opId relay retry dataType algType count opType deviceId"
_EVENT = "startNs endNs eventType rangeId category message globalTid endGlobalTid domainId connectionId"


class _Database:
    """One file; text columns of the tables are numbers of STRING_IDS."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._strings: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a string."""
        return self._strings.setdefault(text, len(self._strings))

    def write(self, table: str, columns: str, rows: Iterable[Sequence[Any]], texts: Sequence[str] = ()) -> None:
        """Create a table with integer columns, but for `texts`, and fill it."""
        names = columns.split()
        kinds = ", ".join(f"{name} {'TEXT' if name in texts else 'INTEGER'}" for name in names)
        self._connection.execute(f"CREATE TABLE {table} ({kinds})")
        self._connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", rows)

    def write_strings(self) -> None:
        """Write STRING_IDS, after every other table."""
        rows = [(number, text) for text, number in self._strings.items()]
        self.write("STRING_IDS", "id value", rows, ["value"])


def _write_tasks(database: _Database, profile: Profile) -> None:
    pid = profile.settings["pid"]
    tasks = [
        [task.start, task.end, task.device, task.connection, task.connection, pid, database.number(task.core)]
        + [NO_MODEL, task.stream, task.number, NO_MODEL]
        for task in profile.tasks
    ]
    database.write("TASK", _TASK, tasks)
    operators = [task for task in profile.tasks if not task.is_collective and not task.is_copy]
    unknown = database.number("N/A")
    rows = []
    for task in operators:
        known = profile.is_detailed
        kinds = [database.number(text if known else "N/A") for text in (task.core, task.type)]
        tensors = [database.number((known and task.raw[key]) or "N/A") for key in TENSOR_KEYS]
        state = database.number("dynamic" if known else "N/A")
        blocks = profile.count_blocks(task) if known else 0
        names = [database.number(task.name), task.connection, blocks, 0]
        rows.append([*names, *kinds, *tensors, unknown, state, unknown])
    database.write("COMPUTE_TASK_INFO", _COMPUTE, rows)
    collectives = [task for task in profile.tasks if task.is_collective]
    if collectives:
        rows = [
            [database.number(task.name), task.start, task.end, task.connection]
            + [database.number(task.raw["communicator"]), task.connection, 0, 0, task.raw["type"], unknown]
            + [task.raw["bytes"], database.number(task.type), task.device]
            for task in collectives
        ]
        database.write("COMMUNICATION_OP", _OPERATION, rows)


def _list_calls(database: _Database, task: Task, pid: int) -> list[list[int]]:
    return [
        [task.launch_begin, task.launch_end, kind, pid << 32 | task.thread, task.connection, database.number(name)]
        for kind, name in ((_ACL, task.api), (_NODE, "launch"))
    ]


def _write_host(database: _Database, profile: Profile) -> None:
    pid = profile.settings["pid"]
    if profile.has_api:
        calls = [call for task in profile.tasks for call in _list_calls(database, task, pid)]
        database.write("CANN_API", "startNs endNs type globalTid connectionId name", calls)
    if profile.marks:
        events = []
        for number, mark in enumerate(profile.marks):
            thread = pid << 32 | mark["thread"]
            kind = 0 if mark["begin_ns"] == mark["end_ns"] else 2  # ENUM_MSTX_EVENT_TYPE: marker, start/end
            words = [NO_MODEL, database.number(mark["message"]), thread, thread, database.number(mark["domain"])]
            events.append([mark["begin_ns"], mark["end_ns"], kind, number, *words, NO_MODEL - number])
        database.write("MSTX_EVENTS", _EVENT, events)
        database.write(
            "ENUM_MSTX_EVENT_TYPE", "id name", enumerate(["marker", "push/pop", "start/end", "marker_ex"]), ["name"]
        )


def _write_devices(database: _Database, profile: Profile) -> None:
    soc = profile.settings["soc"]
    database.write("NPU_INFO", "id name", [[device, soc] for device in profile.devices], ["name"])
    if profile.memory:
        app = database.number("app")
        rows = [[app, 0, row["bytes"], row["at"], row["device"]] for row in profile.memory]
        database.write("NPU_MEM", "type ddr hbm timestampNs deviceId", rows)
    overlaps: list[list[int]] = []
    for device in profile.devices:
        groups = split_overlap([task for task in profile.tasks if task.device == device])
        for kind, intervals in enumerate(groups):
            overlaps += [[len(overlaps) + i, device, *pair, kind] for i, pair in enumerate(intervals)]
    database.write("OVERLAP_ANALYSIS", "id deviceId startNs endNs type", overlaps)
    begin = min((task.launch_begin for task in profile.tasks), default=0)
    end = max((task.end for task in profile.tasks), default=0)
    database.write("SESSION_TIME_INFO", "startTimeNs endTimeNs", [[begin, end]])
    database.write("ENUM_API_TYPE", "id name", _API_LEVELS.items(), ["name"])
    database.write("ENUM_HCCL_DATA_TYPE", "id name", enumerate(_HCCL_TYPES), ["name"])
    versions = [["SCHEMA_VERSION", "1.0.2"], ["SCHEMA_VERSION_MAJOR", "1"]]
    versions += [["SCHEMA_VERSION_MINOR", "0"], ["SCHEMA_VERSION_MICRO", "2"]]
    database.write("META_DATA", "name value", versions, ["name", "value"])


@contextlib.contextmanager
def _open(path: Path) -> Any:
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            yield connection
    except sqlite3.Error as error:
        raise Failure(f"{path}: {error}", "make room for the profile, or choose another folder") from error


def export_database(profile: Profile, folder: Path) -> None:
    """Write msprof_*.db of a folder PROF_*.

    Raises:
        Failure: it cannot be written.
    """
    draft = folder / "msprof.db.part"  # torch_npu takes the file as soon as it has its name
    draft.unlink(missing_ok=True)
    with _open(draft) as connection:
        database = _Database(connection)
        _write_tasks(database, profile)
        _write_host(database, profile)
        _write_devices(database, profile)
        database.write_strings()
    draft.replace(folder / f"msprof_{time.strftime('%Y%m%d%H%M%S')}.db")


def analyze_database(profile: Profile, folder: Path) -> None:
    """Write analyze/communication_analyzer.db of a folder PROF_*.

    Raises:
        Failure: it cannot be written.
    """
    collectives = [task for task in profile.tasks if task.is_collective]
    if not collectives:
        return
    (folder / "analyze").mkdir(exist_ok=True)
    path = folder / "analyze" / "communication_analyzer.db"
    path.unlink(missing_ok=True)
    times, links = [], []
    for task in collectives:
        found = describe_collective(task)
        who = [task.name, task.raw["communicator"]]
        # The first six: start, elapse, transit, wait, synchronization, idle; ratios follow.
        times.append([*who, *list(found["Communication Time Info"].values())[:6]])
        for link, values in found["Communication Bandwidth Info"].items():
            for size, (count, duration) in values["Size Distribution"].items():
                sent = [values["Transit Size(MB)"], values["Transit Time(ms)"], values["Bandwidth(GB/s)"], 0]
                links.append([*who, link, *sent, float(size), count, duration])
    name = ["hccl_op_name", "group_name", "start_timestamp", "transport_type"]
    with _open(path) as connection:
        database = _Database(connection)
        columns = "elapse_time transit_time wait_time synchronization_time idle_time"
        database.write("CommAnalyzerTime", f"hccl_op_name group_name start_timestamp {columns}", times, name)
        columns = "transit_size transit_time bandwidth large_packet_ratio package_size count total_duration"
        database.write("CommAnalyzerBandwidth", f"hccl_op_name group_name transport_type {columns}", links, name)
