"""The joined report: launches that follow one another, ranks that meet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import ConfigError
from anabatic_sim import machine_spec, shared_memory, simulation_report


def _process(folder: Path, pid: int, started: float, device: int, steps: int, step_ns: float) -> None:
    """Write what a process leaves: one operator a step, from `started` (seconds) on, a second a step."""
    columns = simulation_report._STEP_COLUMNS

    def row(count: int) -> list[float]:
        values = {"operators": count, "paper_ns": count * step_ns, "alone_ns": count * step_ns, "host_ns": count * 1e9}
        return [values.get(name, 0) for name in columns]

    left: dict[str, Any] = {
        "pid": pid,
        "dropped_events": 0,
        "started_ns": int(started * 1e9),
        "devices": 1 << device,
        "now": row(steps),
        "operators": {"aten::mm": [steps, 0, steps * step_ns, 0, 0, 0, 1, steps, 1, 0]},
        "collectives": {},
        "syncs": {},
        "unfused": {},
        "steps": [row(count) for count in range(1, steps + 1)],
    }
    (folder / f"{pid}.json").write_text(json.dumps(left))


def _build(folder: Path, npus: int) -> dict[str, Any]:
    wanted = machine_spec.build_machine(npus)
    return simulation_report.build_report(wanted, shared_memory.SimSegment(), folder, ["true"], 0, 1.0)


def test_stages_that_follow_one_another_are_no_more_devices(tmp_path: Path) -> None:
    for stage, (steps, step_ns) in enumerate([(3, 5e6), (6, 2e6), (2, 9e6)]):
        for device in range(2):
            _process(tmp_path, 100 + 10 * stage + device, 100.0 * stage + device / 10, device, steps, step_ns)
    built = _build(tmp_path, 2)
    assert (built["step"]["count"], built["step"]["processes"], built["step"]["launches"]) == (6, 2, 3)
    assert built["paper"]["scaling"]["devices"] == 2
    assert built["paper"]["step_ms"] == pytest.approx(2)
    row = built["operators"][0]
    assert (row["calls"], row["per_step"]) == (22, 1)  # all launches; a step of the longest
    assert len(built["steps"]) == 6
    assert "(mean of 6 steps, the longest of 3 launches)" in simulation_report.render_table(built)


def test_a_restarted_launch_and_two_ranks_on_one_device(tmp_path: Path) -> None:
    _process(tmp_path, 9, 0.0, 0, 2, 1e6)
    _process(tmp_path, 10, 50.0, 0, 4, 1e6)
    _process(tmp_path, 11, 50.5, 0, 4, 1e6)
    built = _build(tmp_path, 1)
    assert built["step"]["launches"] == 2
    assert built["step"]["processes"] == 2
    assert built["paper"]["scaling"]["devices"] == 1


def test_no_step_at_all(tmp_path: Path) -> None:
    _process(tmp_path, 9, 0.0, 0, 0, 1e6)
    built = _build(tmp_path, 1)
    assert built["paper"] is None
    assert built["step"] == {"count": 0, "processes": 0, "launches": 0}
    assert built["steps"] == []


def test_one_file_for_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report and --trace both name"):
        machine_spec.build_machine(report=tmp_path / "a.json", trace=tmp_path / "." / "a.json")
