"""The tables of `npu-smi` equal captured ones letter by letter, and what the tool says to wrong arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabatic.core import process_info
from anabatic_sim import fake_npu_smi, machine_spec, npu_smi_layout, shared_memory
from anabatic_sim.npu_smi_layout import ChipFamily, SmiProcess, SmiReading

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data" / "npu-smi"
TABLES: tuple[tuple[str, ChipFamily], ...] = (
    ("info-910b4-25.2.0-8dev", "A2"),
    ("info-910b4-25.5.2-id5-only", "A2"),
    ("info-910b2c-25.0.rc1.2-2dev-procs", "A2"),
    ("info-910b3-23.0.7-8dev-idle", "A2"),
    ("info-910premiuma-23.0.rc2-8dev-procs", "910"),
    ("info-310p3-24.1.0.1-duo-2cards-procs", "310P"),
)


def _reading(row: dict[str, Any], processes: list[dict[str, Any]], family: ChipFamily) -> SmiReading:
    used, total = ("mem_used_mb", "mem_total_mb") if family == "310P" else ("hbm_used_mb", "hbm_total_mb")
    return SmiReading(
        npu=row["npu_id"],
        chip=row["chip_id"],
        logic_id=row["logic_id"] if row["logic_id"] is not None else row["npu_id"],
        name=row["name"],
        health=row["health"],
        watt=row["power_w"] or 0.0,
        celsius=row["temp_c"],
        bus=row["bus_id"],
        aicore=row["util_pct"],
        used_mib=row[used],
        total_mib=row[total],
        processes=tuple(
            SmiProcess(each["pid"], each["name"], each["mem_mb"])
            for each in processes
            if (each["npu_id"], each["chip_id"]) == (row["npu_id"], row["chip_id"])
        ),
        ddr=f"{row['mem_used_mb']} / {row['mem_total_mb']}" if family != "310P" else "",
        hugepages=f"{row['hugepages_used']} / {row['hugepages_total']}",
    )


@pytest.mark.parametrize(("name", "family"), TABLES)
def test_the_table_is_the_real_one(name: str, family: ChipFamily) -> None:
    if not (SAMPLES / f"{name}.txt").is_file():
        pytest.skip("the collected outputs of npu-smi are not here")
    expected = json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))["expected"]
    readings = [_reading(row, expected["processes"], family) for row in expected["devices"]]
    text = (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")
    assert npu_smi_layout.format_info(readings, expected["driver_version"], family).splitlines() == text.splitlines()


@pytest.fixture
def machine_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[shared_memory.SimSegment]:
    wanted = machine_spec.build_machine(2, "910B3", "2GiB", ("health@1=warning",))
    name = shared_memory.create_segment(wanted)
    monkeypatch.setenv(machine_spec.SEGMENT_VARIABLE, name)
    try:
        with shared_memory.attach_segment(name) as live:
            yield live
    finally:
        shared_memory.remove_segment(name)


def _said(capsys: pytest.CaptureFixture[str], line: str) -> tuple[int, str]:
    code = fake_npu_smi.main(line.split())
    return code, capsys.readouterr().out


def test_it_reads_the_live_segment(
    machine_of_two: shared_memory.SimSegment, capsys: pytest.CaptureFixture[str]
) -> None:
    row = machine_of_two.process[0]
    row.pid, row.started, row.name = os.getpid(), process_info.read_start_time(os.getpid()), b"python"
    row.hbm[0] = machine_of_two.device[0].hbm_used = 300 << 20
    code, text = _said(capsys, "info")
    assert code == 0
    assert "| 0                         | 0000:C1:00.0  | 0           0    / 0          300  / 2048          |" in text
    assert "| 1     910B3               | Warning       |" in text
    assert (
        f"| 0       0                 | {os.getpid():<14}| python                   | 300                     |" in text
    )
    assert "| No running processes found in NPU 1 " in text
    assert "Process memory(MB):300" in _said(capsys, "info -t proc-mem -i 0")[1]
    assert "HBM Usage Rate(%)              : 14" in _said(capsys, "info -t usages -i 0")[1]


def test_memory_of_a_dead_process_is_free(
    machine_of_two: shared_memory.SimSegment, capsys: pytest.CaptureFixture[str]
) -> None:
    row = machine_of_two.process[0]
    row.pid, row.started = 2**22 + 1, 1  # above the largest pid
    row.hbm[0] = machine_of_two.device[0].hbm_used = 300 << 20
    assert "0    / 2048" in _said(capsys, "info")[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("info -t usages", "This command must input card id."),
        ("info -t sio-info -i 0", "This device does not support querying sio-info."),
        ("info -t nothing -i 0", "Error parameter of -t"),
        ("info -t usages -i 7", "Error parameter of -i"),
        ("info -t usages -i 0 -c 3", "Error parameter of -c"),
        ("info -x", "Error parameter of -x"),
        ("reset", "Error parameter of reset"),
    ],
)
def test_wrong_arguments(
    machine_of_two: shared_memory.SimSegment, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    code, text = _said(capsys, line)
    assert code == 1
    assert text.startswith(words)


def test_without_a_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(machine_spec.SEGMENT_VARIABLE, raising=False)
    assert _said(capsys, "info") == (1, "dcmi module initialize failed. ret is -8005\n")
    monkeypatch.setenv(machine_spec.SEGMENT_VARIABLE, "anabatic-sim-0")
    assert _said(capsys, "info")[0] == 1


def test_a_lost_device_is_not_listed(
    machine_of_two: shared_memory.SimSegment, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_of_two.device[0].lost = 1
    assert "Total Count                    : 1" in _said(capsys, "info -l")[1]
    machine_of_two.device[1].lost = 1
    assert _said(capsys, "info") == (1, "There is no NPU card on this server.\n")


def test_dies_of_a_card_share_its_id() -> None:
    rows = [
        SmiReading(0, chip, chip, "Ascend910", "OK", 90.0 if chip == 0 else None, 38, "0000:9D:00.0", 0, 1, 65536)
        for chip in (0, 1)
    ]
    text = npu_smi_layout.format_info(rows, "26.0.rc1", "A3").splitlines()
    assert text[4].startswith("| Chip  Phy-ID ")
    assert text[8] == "+" + "-" * 96 + "+"
    assert "| -           38 " in text[9]
    assert "SIO" in npu_smi_layout.format_topology(rows, "A3", 8)
