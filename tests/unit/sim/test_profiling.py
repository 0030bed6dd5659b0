"""`msprof` of a simulation: from the runtime's lines to CANN's tables and timeline."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.core.errors import DataError
from anabatic_sim.profiling import export, fake_msprof, tasks

LEVEL0, LEVEL1 = 0x801, 0x27  # torch_npu/csrc/profiler/profiler_mgr.h
REAL, RAW = 1_700_000_000_000_000_123, 5_000_000_000
"""The same moment on the two clocks."""


def operator(api: str, start: int, ns: int, *, unit: str = "vector", stream: int = 2) -> dict[str, Any]:
    return {
        "kind": "operator",
        "name": f"aten::{api}",
        "overload": "",
        "api": api,
        "unit": unit,
        "stream": stream,
        "thread": 77,
        "launch_begin_ns": RAW + start - 40,
        "launch_end_ns": RAW + start - 10,
        "start_ns": RAW + start,
        "ns": ns,
        "bytes": 96,
        "flops": 12,
        **{f"{way}_{what}": "" for way in ("input", "output") for what in ("shapes", "types", "formats")},
    }


def collective(name: str, start: int, ns: int) -> dict[str, Any]:
    row = {
        **operator(name, start, ns, stream=5),
        "kind": "collective",
        "name": name,
        "communicator": "10.0.0.1%group",
        "type": 4,
    }
    return {**row, "waited_ns": 1000, "ranks": 2}


def write_profile(folder: Path, rows: list[dict[str, Any]], types: int = LEVEL1, soc: str = "Ascend910B3") -> Path:
    root = folder / "PROF_000001_20260101000000000_ABCDEFGHIJKLMNOP"
    for name in ("host", "device_3"):
        (root / name / "data").mkdir(parents=True)
    moment = {"collectionTimeBegin": f"{REAL // 1000}.{REAL % 1000:03d}", "clockMonotonicRaw": str(RAW)}
    (root / "host" / "start_info").write_text(json.dumps(moment))
    settings = {
        "devices": "3",
        "types": types,
        "metrics": 1,
        "pid": 9,
        "soc": soc,
        "cube_cores": 20,
        "vector_cores": 40,
    }
    (root / "host" / "sample.json").write_text(json.dumps(settings))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "device_3" / "data" / "tasks.jsonl").write_text(lines)
    return root


def read_table(root: Path, name: str) -> list[dict[str, str]]:
    [path] = (root / "mindstudio_profiler_output").glob(f"{name}_*.csv")
    return list(csv.DictReader(path.read_text().splitlines()))


ROWS = [
    {
        **operator("aclnnMm", 1000, 300, unit="cube"),
        "input_shapes": "2,3;3,4",
        "input_types": "FLOAT;FLOAT",
        "input_formats": "ND;ND",
    },
    operator("aclnnInplaceAdds", 1400, 100),
    collective("allReduce", 1450, 200),
    operator("aclnnInplaceCopy", 1800, 50, unit="link"),
]


def test_tables_have_the_tasks_with_exact_times(tmp_path: Path) -> None:
    root = write_profile(tmp_path, ROWS)
    assert fake_msprof.main(["--export=on", f"--output={root}"]) == 0
    summary = read_table(root, "op_summary")
    assert [row["Op Name"].split("_")[0] for row in summary] == ["aclnnMm", "aclnnInplaceAdds", "hcom"]  # no copy
    assert [row["Task Type"] for row in summary] == ["AI_CORE", "AI_VECTOR_CORE", "COMMUNICATION"]
    assert [row["OP Type"] for row in summary] == ["MatMul", "Adds", "hcom_allReduce_"]
    assert summary[0]["Task Start Time(us)"] == "1700000000000001.123\t"  # REAL + 1000 ns, to the nanosecond
    assert summary[0]["Task Duration(us)"] == "0.300" and summary[1]["Task Wait Time(us)"] == "0.100"
    assert summary[0]["Input Shapes"] == '"2,3;3,4"' and summary[0]["Block Num"] == "20"
    assert {row["Device_id"] for row in summary} == {"3"}
    times = read_table(root, "task_time")
    assert [row["kernel_type"] for row in times][-1] == "MEMCPY_ASYNC" and len(times) == 4
    statistic = {row["OP Type"]: row for row in read_table(root, "op_statistic")}
    assert statistic["MatMul"]["Ratio(%)"] == "75.000" and statistic["Adds"]["Ratio(%)"] == "25.000"
    api = {row["API Name"]: row for row in read_table(root, "api_statistic")}
    assert api["aclnnMm"]["Time(us)"] == "0.030" and api["HcclAllReduce"]["Count"] == "1"


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    root = write_profile(tmp_path, ROWS)
    events = export.build_timeline(tasks.read_profile(root))
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    for event in events:
        assert event["pid"] in named and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and float(event["ts"]) > 0
    overlap = {event["name"]: event["dur"] for event in events if event["ph"] == "X" and event["args"] == {}}
    # Busy from 1000 to 1850 but for 1300-1400 and 1650-1800; the last "Free" and "Computing" win in the dictionary.
    assert overlap == {"Computing": 0.05, "Communication": 0.2, "Communication(Not Overlapped)": 0.15, "Free": 0.15}
    ends = {(event["pid"], event["tid"], event["ts"]) for event in events if event["ph"] == "f"}
    kernels = {(event["pid"], event["tid"], event["ts"]) for event in events if "Task Id" in event.get("args", {})}
    assert ends == kernels and len(ends) == 4


def test_level0_leaves_out_what_it_does_not_collect(tmp_path: Path) -> None:
    root = write_profile(tmp_path, ROWS, LEVEL0)
    assert fake_msprof.main(["--export=on", f"--output={tmp_path}"]) == 0
    [first, *_] = read_table(root, "op_summary")
    assert first["OP Type"] == first["Task Type"] == first["Input Shapes"] == "N/A"
    assert first["Task Duration(us)"] == "0.300"
    assert not list((root / "mindstudio_profiler_output").glob("op_statistic_*"))


def test_older_chips_have_one_kind_of_core(tmp_path: Path) -> None:
    profile = tasks.read_profile(write_profile(tmp_path, ROWS, soc="Ascend910PremiumA"))
    assert [task.core for task in profile.tasks] == ["AI_CORE", "AI_CORE", "COMMUNICATION", "MEMCPY_ASYNC"]


def test_collectives_are_analysed(tmp_path: Path) -> None:
    root = write_profile(tmp_path, ROWS)
    assert fake_msprof.main(["--analyze=on", f"--output={root}"]) == 0
    [(name, found)] = json.loads((root / "analyze" / "communication.json").read_text()).items()
    assert name.startswith("hcom_allReduce__") and name.endswith("@10.0.0.1%group")
    assert found["Communication Time Info"]["Transit Time(ms)"] == 0.0002
    assert found["Communication Time Info"]["Wait Time Ratio"] == pytest.approx(1000 / 1200, abs=1e-4)


@pytest.mark.parametrize(
    ("api", "kind"),
    [
        ("aclnnInplaceCopy", "Copy"),
        ("aclnnMuls", "Muls"),
        ("aclnnRmsNorm", "RmsNorm"),
        ("aclnnBmm", "BatchMatMul"),
        ("aclmdlRIExecuteAsync", "aclmdlRIExecuteAsync"),
    ],
)
def test_types_follow_from_the_function(api: str, kind: str) -> None:
    assert tasks.name_type(api) == kind


def test_a_killed_program_leaves_its_whole_lines(tmp_path: Path) -> None:
    root = write_profile(tmp_path, ROWS)
    data = root / "device_3" / "data" / "tasks.jsonl"
    data.write_text(data.read_text()[:-5])
    assert len(tasks.read_profile(root).tasks) == 3
    data.write_text("not json\n")
    with pytest.raises(DataError, match="tasks.jsonl:1"):
        tasks.read_profile(root)
    (root / "host" / "start_info").write_text("")
    with pytest.raises(DataError, match="start_info"):
        tasks.read_profile(root)


def test_what_is_not_simulated_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake_msprof.main(["--application=train.sh"]) == 2
    assert "--application is not simulated" in capsys.readouterr().err
    assert fake_msprof.main(["--export=on", f"--output={tmp_path}"]) == 2
    assert "contains no profile" in capsys.readouterr().err
    assert fake_msprof.main(["--help"]) == 0


_INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda pair: (pair[0], sum(pair))), max_size=8
)


@given(_INTERVALS, _INTERVALS)
def test_intervals_are_sets_of_moments(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def moments(intervals: list[tuple[int, int]]) -> set[int]:
        return {moment for begin, end in intervals for moment in range(begin, end)}

    whole, taken = export.merge_intervals(left), export.merge_intervals(right)
    assert moments(whole) == moments(left) and sum(end - begin for begin, end in whole) == len(moments(left))
    rest = export.subtract_intervals(whole, taken)
    assert moments(rest) == moments(left) - moments(right)
    assert sum(end - begin for begin, end in rest) == len(moments(rest))
