"""Sources: an npu-smi that works, hangs, prints garbage, is missing; DCMI by our own library; the processor."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from anabatic.monitor.snapshot import DeviceProcess, count_devices_per_card, format_device_label
from anabatic.monitor.sources import dcmi, npu_smi_command, selection
from anabatic_sim import npu_smi_layout
from unit.monitor import fake


@pytest.mark.process
def test_npu_smi_gives_devices_processes_and_logic_ids(tmp_path: Path) -> None:
    readings = fake.dies(16)
    folder = fake.printing(
        tmp_path / "bin",
        npu_smi_layout.format_info(readings, "26.0.rc1", "A3"),
        npu_smi_layout.format_mapping(readings, "Ascend910", "A3"),
    )
    found = npu_smi_command.NpuSmiSource(str(folder / "npu-smi")).read()
    assert found.error is None and found.driver_version == "26.0.rc1"
    assert [device.logic_id for device in found.devices] == list(range(16))
    assert [device.power_w for device in found.devices] == [160.5, None] * 8
    assert found.devices[3].used_mb == 3003 and found.devices[3].total_mb == 65536
    assert [process.pid for process in found.processes] == list(range(4_000_000, 4_000_016))
    assert format_device_label(1, 1, count_devices_per_card(found)) == "1.1"


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "says", "hint"),
    [
        (
            "echo 'dcmi model initialized failed, because the device is used. ret is -8020'; exit 1",
            "-8020",
            "container",
        ),
        (
            "echo 'npu-smi: error while loading shared libraries: libdrvdsmi_host.so: no' >&2; exit 127",
            "libdrv",
            "LD_LIB",
        ),
        ("head -c 3000 /dev/urandom", "npu-smi lists no device: ", "dmesg"),
        ("kill -SEGV $$", "no output (ended by SIGSEGV)", "dmesg"),
        ("exit 0", "no output", "dmesg"),
        ("yes garbage", "printed more than 1 MiB", "dmesg"),
    ],
)
def test_an_npu_smi_that_fails_is_an_error_with_a_hint(tmp_path: Path, script: str, says: str, hint: str) -> None:
    folder = fake.install(tmp_path / "bin", script)
    found = npu_smi_command.NpuSmiSource(str(folder / "npu-smi")).read()
    assert found.devices == [] and found.error is not None
    assert says in found.error and hint in found.hint
    assert found.error.isprintable()


def test_an_npu_smi_that_this_user_may_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "npu-smi"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = npu_smi_command.open_source()
    assert isinstance(said, str) and str(program) in said and "HwHiAiUser" in said


@pytest.mark.process
def test_an_npu_smi_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    folder = fake.install(tmp_path / "bin", f"sleep 60 & echo $! > {note}; wait")
    found = npu_smi_command.NpuSmiSource(str(folder / "npu-smi"), timeout=2.0).read()
    assert found.error == "npu-smi did not answer within 2 s"
    child = int(note.read_text())
    for _ in range(3000):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split(")")[1][:3]:
            break
        time.sleep(0.02)
    else:
        pytest.fail("the child of npu-smi is still there")


def test_without_any_tool_there_is_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dcmi, "LIBRARY_PATHS", ())
    monkeypatch.setattr(npu_smi_command, "_NPU_SMI_FOLDERS", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path))
    source, _ = selection.find_accelerator_source()
    if source is not None:
        pytest.skip("this machine has a GPU")
    found = selection.MachineSource().read()
    assert (found.source, len(found.devices), found.devices[0].kind) == ("psutil", 1, "cpu")
    assert found.devices[0].power_w is None and found.devices[0].total_mb
    assert selection.MachineSource(processor=False).read().error == "no accelerator can be read"


@pytest.mark.process
def test_processes_of_this_machine_get_user_and_command() -> None:
    child = subprocess.Popen(["/bin/sleep", "30"])
    try:
        while b"30" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():  # it is still becoming another program
            time.sleep(0.01)
        mine = DeviceProcess(0, 0, child.pid, "sleep", 5)
        other = DeviceProcess(0, 0, child.pid, "VLLMEngineCor", 5)  # the host's pid is another process here
        gone = DeviceProcess(0, 0, 1 << 22, "python", 5)
        selection.ProcessOwners().fill_in_owners([mine, other, gone])
    finally:
        child.kill()
        child.wait()
    assert mine.command == "/bin/sleep 30" and mine.user
    assert (other.user, other.command, gone.user) == (None, None, None)


LIBRARY = r"""
#include <string.h>
struct hbm { unsigned long long size; unsigned freq; unsigned long long used; int temp; unsigned bandwidth; };
struct chip { char type[32], name[32], version[32]; unsigned cores; char npu[32]; };
struct held { int pid; unsigned long bytes; };
int dcmi_init(void) { return RESULT; }
int dcmi_get_card_list(int *n, int *list, int len) { *n = 2; list[0] = 4; list[1] = 7; return 0; }
int dcmi_get_device_id_in_card(int card, int *max, int *mcu, int *cpu) { *max = 2; *mcu = 2; *cpu = -1; return 0; }
int dcmi_get_device_chip_info_v2(int c, int d, struct chip *i) { strcpy(i->name, "Ascend910"); return 0; }
int dcmi_get_device_health(int c, int d, unsigned *h) { *h = c == 7 ? 2 : 0; return 0; }
int dcmi_get_device_power_info(int c, int d, int *p) { *p = 1605; return 0; }
int dcmi_get_device_temperature(int c, int d, int *t) { return -8255; }
int dcmi_get_device_hbm_info(int c, int d, struct hbm *h) {
  h->size = 65536; h->used = 3000 + c + d; h->temp = 41; return 0; }
int dcmi_get_device_utilization_rate(int c, int d, int kind, unsigned *v) {
  if (kind == 12) return -8002;
  *v = kind == 13 ? 0x80000000u : 10 * c + d; return 0; }
int dcmi_get_device_logic_id(int *logic, int c, int d) { *logic = 2 * (c == 7) + d; return 0; }
int dcmi_get_device_phyid_from_logicid(unsigned logic, unsigned *phy) { *phy = logic + 8; return 0; }
int dcmi_get_device_resource_info(int c, int d, struct held *h, int *n) {
  *n = c == 4 && d == 0; h[0].pid = 4242; h[0].bytes = 512ul << 20; return 0; }
int dcmi_get_device_errorcode_v2(int c, int d, int *n, unsigned *codes, unsigned len) {
  *n = c == 7; codes[0] = 0x80E01801u; return 0; }
int dcmi_get_driver_version(char *text, unsigned len) { strcpy(text, "25.5.1"); return 0; }
"""


def _library(folder: Path, result: int) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    code, library = folder / "dcmi.c", folder / "libdcmi.so"
    code.write_text(LIBRARY.replace("RESULT", str(result)), encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(code)], check=True)
    return library


@pytest.mark.process
def test_dcmi_reads_cards_by_their_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcmi, "LIBRARY_PATHS", (str(tmp_path / "absent.so"), str(_library(tmp_path, 0))))
    source = dcmi.open_source()
    assert isinstance(source, dcmi.DcmiSource)
    found = source.read()
    assert [(each.npu_id, each.chip_id) for each in found.devices] == [(4, 0), (4, 1), (7, 0), (7, 1)]
    first, second, third = found.devices[:3]
    assert (first.power_w, second.power_w) == (160.5, None)  # the card's, once
    assert (first.util_pct, first.overall_pct, first.vector_pct, first.temp_c) == (40, None, None, None)
    assert (first.used_mb, first.total_mb, first.hbm_temp_c) == (3004, 65536, 41)
    assert (third.health, third.error_codes, first.error_codes) == ("Alarm", [0x80E01801], [])
    assert [(each.logic_id, each.phy_id) for each in found.devices] == [(0, 8), (1, 9), (2, 10), (3, 11)]
    assert [(each.pid, each.mem_mb) for each in found.processes] == [(4242, 512)]
    assert found.driver_version == "25.5.1" and found.notes == ["DCMI refused 4 values: not permitted"]


@pytest.mark.process
def test_dcmi_that_refuses_gives_way_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcmi, "LIBRARY_PATHS", (str(_library(tmp_path, -8020)),))
    assert dcmi.open_source() == "DCMI does not start: -8020 (the device is owned by another container)"
    monkeypatch.setenv("PATH", fake.on_path(fake.printing(tmp_path / "bin", fake.table(4))))
    found = selection.MachineSource().read()
    assert found.source == "npu-smi" and len(found.devices) == 4
    assert found.notes == ["DCMI does not start: -8020 (the device is owned by another container)"]


def test_what_is_no_dcmi_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libdcmi.so"
    broken.write_bytes(os.urandom(64))
    monkeypatch.setattr(dcmi, "LIBRARY_PATHS", (str(broken),))
    said = dcmi.open_source()
    assert isinstance(said, str) and said.startswith("DCMI does not load: ")
