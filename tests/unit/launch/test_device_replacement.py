"""Devices that go while a job runs are replaced by free ones, and only then."""

from __future__ import annotations

import pytest

from anabatic.launch.local import device_replacement
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"


class Machine:
    """A source of devices: the numbers that the driver lists, which are busy, which are sick."""

    def __init__(self, here: list[int], busy: tuple[int, ...] = (), sick: tuple[int, ...] = ()) -> None:
        self.snapshot = Snapshot(
            "npu-smi",
            devices=[
                DeviceReading(number, 0, logic_id=number, health="Critical" if number in sick else "OK")
                for number in here
            ],
            processes=[DeviceProcess(number, 0, pid=1) for number in busy],
        )

    def read(self) -> Snapshot:
        return self.snapshot

    def replace(self, nproc: int, **environ: str) -> tuple[dict[str, str], str]:
        return device_replacement.replace_lost_devices(nproc, environ, lambda: (self, []))


def test_nothing_changes_while_all_are_there() -> None:
    assert Machine([0, 1, 2]).replace(2) == ({}, "")
    assert Machine([0, 2]).replace(2, **{VISIBLE: "2,0"}) == ({}, "")


@pytest.mark.parametrize(
    ("machine", "before", "after"),
    [
        (Machine([1, 2, 3]), "0,1", "1,2"),
        (Machine([0, 2, 3], busy=(2,)), "0,1", "0,3"),
        (Machine([0, 1, 2], sick=(1,)), "0,1", "0,2"),
        (Machine([2, 3]), "0,1", "2,3"),
    ],
)
def test_a_free_one_takes_the_place(machine: Machine, before: str, after: str) -> None:
    variables, line = machine.replace(2, **{VISIBLE: before})
    assert variables == {VISIBLE: after}
    assert "has gone or is broken" in line and "takes its place" in line


def test_none_is_free() -> None:
    variables, line = Machine([0, 2], busy=(2,)).replace(2)
    assert variables == {} and line == "device 1 has gone or is broken, and none of the others is free"


def test_a_choice_of_the_user_stands() -> None:
    assert Machine([1, 2]).replace(2, **{VISIBLE: "0,1", device_replacement.FIXED_DEVICES_VARIABLE: "1"}) == ({}, "")
    assert (
        device_replacement.has_visible_devices({VISIBLE: "0"})
        and device_replacement.has_visible_devices({"CUDA_VISIBLE_DEVICES": "1"})
        and not device_replacement.has_visible_devices({})
    )


def test_without_devices_nothing_happens() -> None:
    assert device_replacement.replace_lost_devices(2, {}, lambda: (None, ["no npu-smi"])) == ({}, "")
    assert Machine([]).replace(2) == ({}, "")
