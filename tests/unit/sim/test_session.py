"""What is left behind is swept, and a machine that does not fit is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabatic.core.errors import UserError
from anabatic.sim import build, machine, segment, session


def test_reports_of_dead_machines_are_swept() -> None:
    reports = build.folder() / "reports"
    name = segment.create(machine.build(1))
    living, dead = reports / name, reports / f"{segment.PREFIX}4194305"
    for folder in (living, dead):
        folder.mkdir(parents=True)
        (folder / "1.json").write_text("{}")
    try:
        session.sweep()
        assert living.is_dir()
        assert not dead.exists()
    finally:
        segment.remove(name)


def test_more_devices_than_the_host_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PROCESS_BYTES", 2**60)
    with pytest.raises(UserError, match=r"--npus 2: a process for each needs .* this host has"):
        session.run(["true"], npus=2, chip="910B3", hbm=None)


def test_two_machines_stand_side_by_side() -> None:
    one = segment.create(machine.build(1))
    child = os.fork()
    if child == 0:
        two = segment.create(machine.build(2, "910C"))
        with segment.attached(one) as first, segment.attached(two) as second:
            fine = (first.devices, second.devices) == (1, 2)
        segment.remove(two)
        os._exit(0 if fine else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        segment.remove(one)


def test_status_names_devices_and_faults(tmp_path: Path) -> None:
    name = segment.create(machine.build(2, "910B3", "1GiB", ("slow@1=3", "aicore#7")))
    try:
        text = session.status()
        assert f"{name}  2 x Ascend910B3" in text
        assert "npu:1  HBM 0 B of 1.0 GiB" in text
        assert "fault slow@1=3" in text
        assert "fault aicore, 7 events away" in text
    finally:
        segment.remove(name)
