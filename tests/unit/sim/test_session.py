"""What is left behind is swept, and a machine that does not fit is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anabatic.core.errors import UserError
from anabatic_sim import machine_spec, session, shared_memory
from anabatic_sim.libraries import build_layout


def test_reports_of_dead_machines_are_swept() -> None:
    """A living owner's are kept: it reads them when its shared memory is gone."""
    reports = build_layout.simulator_folder() / "reports"
    living, dead, old = (reports / f"{shared_memory.SHM_PREFIX}{pid}" for pid in (os.getppid(), 4194305, os.getpid()))
    for folder in (living, dead, old):
        folder.mkdir(parents=True)
        (folder / "1.json").write_text("{}")
    session.remove_dead_machines()
    assert living.is_dir()
    assert not dead.exists() and not old.exists()


def test_more_devices_than_the_host_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "PROCESS_BYTES", 2**60)
    with pytest.raises(UserError, match=r"--npus 2: a process for each needs .* this host has"):
        session.run_simulation(["true"], npus=2, chip="910B3", hbm=None)


@pytest.mark.process
def test_two_machines_stand_side_by_side() -> None:
    one = shared_memory.create_segment(machine_spec.build_machine(1))
    child = os.fork()
    if child == 0:
        two = shared_memory.create_segment(machine_spec.build_machine(2, "910C"))
        with shared_memory.attach_segment(one) as first, shared_memory.attach_segment(two) as second:
            fine = (first.devices, second.devices) == (1, 2)
        shared_memory.remove_segment(two)
        os._exit(0 if fine else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shared_memory.remove_segment(one)


def test_status_names_devices_and_faults(tmp_path: Path) -> None:
    name = shared_memory.create_segment(machine_spec.build_machine(2, "910B3", "1GiB", ("slow@1=3", "aicore#7")))
    try:
        text = session.describe_machines()
        assert f"{name}  2 x Ascend910B3" in text
        assert "npu:1  HBM 0 B of 1.0 GiB" in text
        assert "fault slow@1=3" in text
        assert "fault aicore, 7 events away" in text
    finally:
        shared_memory.remove_segment(name)
