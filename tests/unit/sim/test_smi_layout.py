"""The tables of `npu-smi` equal captured ones letter by letter, and what the tool says to wrong arguments."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anabatic.sim import chips, machine, segment, smi, smi_layout
from anabatic.sim.smi_layout import Family, Process, Reading

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "data" / "npu-smi"
SAMPLES = SAMPLES if SAMPLES.is_dir() else Path("/work/shared/data/npu-smi")
TABLES: tuple[tuple[str, Family], ...] = (
    ("info-910b4-25.2.0-8dev", "A2"),
    ("info-910b4-25.5.2-id5-only", "A2"),
    ("info-910b2c-25.0.rc1.2-2dev-procs", "A2"),
    ("info-910b3-23.0.7-8dev-idle", "A2"),
    ("info-910premiuma-23.0.rc2-8dev-procs", "910"),
    ("info-310p3-24.1.0.1-duo-2cards-procs", "310P"),
)


def _reading(row: dict[str, Any], processes: list[dict[str, Any]], family: Family) -> Reading:
    used, total = ("mem_used_mb", "mem_total_mb") if family == "310P" else ("hbm_used_mb", "hbm_total_mb")
    return Reading(
        npu=row["npu_id"],
        chip=row["chip_id"],
        logic=row["logic_id"] if row["logic_id"] is not None else row["npu_id"],
        name=row["name"],
        health=row["health"],
        watt=row["power_w"] or 0.0,
        celsius=row["temp_c"],
        bus=row["bus_id"],
        aicore=row["util_pct"],
        used_mib=row[used],
        total_mib=row[total],
        processes=tuple(
            Process(each["pid"], each["name"], each["mem_mb"])
            for each in processes
            if (each["npu_id"], each["chip_id"]) == (row["npu_id"], row["chip_id"])
        ),
        ddr=f"{row['mem_used_mb']} / {row['mem_total_mb']}" if family != "310P" else "",
        hugepages=f"{row['hugepages_used']} / {row['hugepages_total']}",
    )


@pytest.mark.parametrize(("name", "family"), TABLES)
def test_the_table_is_the_real_one(name: str, family: Family) -> None:
    if not (SAMPLES / f"{name}.txt").is_file():
        pytest.skip("the collected outputs of npu-smi are not here")
    expected = json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))["expected"]
    readings = [_reading(row, expected["processes"], family) for row in expected["devices"]]
    text = (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")
    assert smi_layout.info(readings, expected["driver_version"], family).splitlines() == text.splitlines()
