"""Which devices a job takes on a machine that others use, by a fake npu-smi in the real layouts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from anabatic.core import cpu_info, log
from anabatic.core.errors import DeviceError
from anabatic.device.table import DEVICES
from anabatic.launch.local import device_selection, placement
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot
from anabatic.monitor.sources import npu_smi_command
from anabatic.plan import detect_chip
from anabatic_sim import npu_smi_layout
from anabatic_sim.npu_smi_layout import SmiProcess as Row
from anabatic_sim.npu_smi_layout import SmiReading
from unit.monitor import fake

Used = Mapping[int, int]


def readings(count: int, name: str, used: Used, busy: tuple[int, ...], per_card: int = 1) -> list[SmiReading]:
    """Return devices; `used` is memory in MiB of those that hold more than an idle one."""
    return [
        replace(
            one,
            name=name,
            used_mib=used.get(one.logic_id, 3000 + one.logic_id),
            processes=(Row(900 + one.logic_id, "python3.11", 40_000),) if one.logic_id in busy else (),
        )
        for one in fake.dies(count, per_card)
    ]


@pytest.fixture
def torch_npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch_npu that can be found."""
    (tmp_path / "path" / "torch_npu").mkdir(parents=True)
    (tmp_path / "path" / "torch_npu" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "path")


def choose(
    folder: Path,
    rows: list[SmiReading],
    nproc: int,
    family: npu_smi_layout.ChipFamily = "A2",
    wanted: str = "auto",
    **environ: str,
) -> device_selection.DeviceSelection | None:
    """Choose on a machine whose npu-smi shows these rows."""
    text, mapping = (
        npu_smi_layout.format_info(rows, "26.0.rc1", family),
        npu_smi_layout.format_mapping(rows, "Ascend", family),
    )
    source = npu_smi_command.NpuSmiSource(str(fake.printing(folder / "bin", text, mapping) / "npu-smi"))
    return device_selection.select_devices(wanted, nproc, environ, lambda: (source, []))


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_four_of_eight(tmp_path: Path) -> None:
    found = choose(tmp_path, readings(8, "910B3", {}, busy=(0, 2, 5)), 4)
    assert found is not None and found.variables == {"ASCEND_RT_VISIBLE_DEVICES": "1,3,4,6"}
    assert found.summary == "NPU 1,3-4,6 of 8: nothing runs there; 0,2,5 are in use"
    assert [device.bus_id for device in found.devices] == [f"0000:0{index}:00.0" for index in (1, 3, 4, 6)]


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_memory_of_a_process_that_is_not_shown_counts(tmp_path: Path) -> None:
    found = choose(tmp_path, readings(4, "910B3", {0: 30_000, 1: 3400}, busy=()), 2)
    assert found is not None and found.variables == {"ASCEND_RT_VISIBLE_DEVICES": "2,3"}, "the least used of the free"
    with pytest.raises(DeviceError, match="4 NPUs are wanted, 3 of 4 are free .0: 29.3 of 64 GiB by a process that is"):
        choose(tmp_path, readings(4, "910B3", {0: 30_000}, busy=()), 4)


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_all_of_them_need_no_variable(tmp_path: Path) -> None:
    found = choose(tmp_path, readings(2, "910B3", {}, busy=()), 2)
    assert found is not None and (found.variables, found.summary, found.indices) == ({}, "", (0, 1))


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_dies_of_cards_are_counted_as_torch_counts_them(tmp_path: Path) -> None:
    found = choose(tmp_path, readings(8, "Ascend910", {}, busy=(0, 1, 3), per_card=2), 3, "A3")
    assert found is not None and found.variables == {"ASCEND_RT_VISIBLE_DEVICES": "2,4,5"}


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_the_first_generation_stays_in_one_ring(tmp_path: Path) -> None:
    found = choose(tmp_path, readings(8, "910A", {}, busy=(0, 5)), 2, "910")
    assert found is not None and found.indices == (1, 2)
    with pytest.raises(DeviceError, match="4 NPUs are wanted in one ring of four, 6 of 8 are free"):
        choose(tmp_path, readings(8, "910A", {}, busy=(0, 5)), 4, "910")
    assert choose(tmp_path, readings(8, "910A", {}, busy=(0, 5)), 6, "910") is not None


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_too_few_are_free(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        choose(tmp_path, readings(4, "910B3", {}, busy=(1, 3)), 3)
    assert str(caught.value) == (
        "3 NPUs are wanted, 2 of 4 are free (1: python3.11 (901) with 39.1 GiB; 3: python3.11 (903) with 39.1 GiB)"
    )
    assert "ASCEND_RT_VISIBLE_DEVICES" in caught.value.hint


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_a_device_that_is_broken_is_left_out(tmp_path: Path) -> None:
    rows = [replace(one, health="Alarm" if one.logic_id == 0 else "OK") for one in readings(3, "910B3", {}, busy=())]
    found = choose(tmp_path, rows, 2)
    assert found is not None and found.indices == (1, 2)


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_a_lost_device_leaves_a_gap_in_the_numbers(tmp_path: Path) -> None:
    rows = [one for one in readings(8, "910B3", {}, busy=(0,)) if one.logic_id != 2]
    found = choose(tmp_path, rows, 4)
    assert found is not None and found.variables == {"ASCEND_RT_VISIBLE_DEVICES": "1,3,4,5"}
    assert found.summary == "NPU 1,3-5 of 7: nothing runs there; 0 is in use"
    rest = [one for one in rows if one.logic_id]
    every = choose(tmp_path, rest, 6)
    assert every is not None and every.variables == {"ASCEND_RT_VISIBLE_DEVICES": "1,3,4,5,6,7"}
    own = choose(tmp_path, rows, 2, ASCEND_RT_VISIBLE_DEVICES="3,7")
    assert own is not None and [device.bus_id for device in own.devices] == ["0000:03:00.0", "0000:07:00.0"]
    ring = choose(tmp_path, [one for one in readings(8, "910A", {}, busy=(4,)) if one.logic_id != 1], 3, "910")
    assert ring is not None and ring.indices == (0, 2, 3)
    last = choose(tmp_path, [one for one in readings(8, "910A", {}, busy=(4,)) if one.logic_id > 3], 3, "910")
    assert last is not None and last.indices == (5, 6, 7)


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_more_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="9 processes need as many NPUs, and there are 8"):
        choose(tmp_path, readings(8, "910B3", {}, busy=()), 9)


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_the_users_own_choice_is_kept(tmp_path: Path) -> None:
    rows = readings(4, "910B3", {}, busy=(0, 1, 2, 3))
    found = choose(tmp_path, rows, 2, ASCEND_RT_VISIBLE_DEVICES="2,3")
    assert found is not None and (found.variables, found.indices, found.summary) == ({}, (2, 3), "")
    odd = choose(tmp_path, rows, 2, ASCEND_RT_VISIBLE_DEVICES="x")
    assert odd is not None and odd.devices == ()


def test_nothing_is_chosen_where_torch_drives_no_such_device(tmp_path: Path) -> None:
    assert choose(tmp_path, readings(2, "910B3", {}, busy=(0, 1)), 2) is None  # no torch_npu
    assert choose(tmp_path, readings(2, "910B3", {}, busy=(0, 1)), 2, wanted="cpu") is None


class Gpus:
    """GPUs as NVML shows them."""

    def read(self) -> Snapshot:
        """Two, of which the first is busy."""
        devices = [
            DeviceReading(index, kind="gpu", logic_id=index, uuid=f"GPU-{index}f", mem_used_mb=1, mem_total_mb=8000)
            for index in range(2)
        ]
        return Snapshot("nvml", devices, [DeviceProcess(0, None, 7, "python", user="ann")])


def test_gpus_go_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_chip.metadata, "version", lambda name: "2.13.0")
    found = device_selection.select_devices("auto", 1, {}, lambda: (Gpus(), []))
    assert found is not None and found.variables == {"CUDA_VISIBLE_DEVICES": "GPU-1f"}
    assert found.summary == "GPU 1 of 2: nothing runs there; 0 is in use"
    with pytest.raises(DeviceError, match=r"1 of 2 are free .0: python .7, ann.."):
        device_selection.select_devices("cuda", 2, {}, lambda: (Gpus(), []))
    assert device_selection.select_devices("npu", 1, {}, lambda: (Gpus(), [])) is None


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_variables_of_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = readings(4, "910B3", {}, busy=(0,))
    topology = npu_smi_layout.format_topology(rows, "A2", 16)
    folder = fake.printing(tmp_path / "bin", npu_smi_layout.format_info(rows, "26.0.rc1", "A2"), topology)
    monkeypatch.setenv("PATH", fake.on_path(folder))
    monkeypatch.setattr(device_selection.selection.dcmi, "LIBRARY_PATHS", ())
    monkeypatch.setattr(placement, "get_allowed_cores", lambda: set(range(16)))
    device = {"type": "auto", "bind": "auto"}
    found = placement.place_workers(device, 2, {}, multi_node=False)
    assert found["ASCEND_RT_VISIBLE_DEVICES"] == "1,2"
    assert found["HCCL_IF_BASE_PORT"] == "60032", "another job on this machine has 60000 to 60031"
    assert found["HCCL_CONNECT_TIMEOUT"] == dict(DEVICES["npu"].start_env)["HCCL_CONNECT_TIMEOUT"]
    assert (found[cpu_info.CORES_VARIABLE], found["OMP_NUM_THREADS"]) == ("4-7;8-11", "4"), (
        "as npu-smi info -t topo has it"
    )
    kept = placement.place_workers(device, 2, {"HCCL_CONNECT_TIMEOUT": "300", "OMP_NUM_THREADS": "1"}, multi_node=True)
    assert set(kept) == {"ASCEND_RT_VISIBLE_DEVICES", cpu_info.CORES_VARIABLE}
    for off in ({**device, "bind": "off"}, device):
        told = {"CPU_AFFINITY_CONF": "1"} if off is device else {}
        loose = placement.place_workers(off, 2, told, multi_node=False)
        assert cpu_info.CORES_VARIABLE not in loose and loose["OMP_NUM_THREADS"] == "8"


@pytest.mark.process
@pytest.mark.usefixtures("torch_npu")
def test_one_process_takes_a_free_device_or_shares_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_selection.selection.dcmi, "LIBRARY_PATHS", ())
    monkeypatch.setattr(log.LOGGER, "propagate", True)
    caplog.set_level("INFO", "anabatic")
    for busy, expected in (((0,), {"ASCEND_RT_VISIBLE_DEVICES": "1"}), ((0, 1), {})):
        table = npu_smi_layout.format_info(readings(2, "910B3", {}, busy=busy), "26.0.rc1", "A2")
        monkeypatch.setenv("PATH", fake.on_path(fake.printing(tmp_path / "bin", table)))
        assert device_selection.place_single_process({"type": "npu"}, {}) == expected
    assert caplog.messages[0] == "NPU 1 of 2: nothing runs there; 0 is in use"
    assert caplog.messages[1].startswith("1 NPU is wanted, 0 of 2 are free (0: python3.11 (900)")
    assert caplog.messages[1].endswith(": the first one is shared")
    assert device_selection.place_single_process({"type": "cpu"}, {}) == {}


def test_variables_on_a_processor() -> None:
    found = placement.place_workers({"type": "cpu", "bind": "off"}, 1, {}, multi_node=False)
    assert found == {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
