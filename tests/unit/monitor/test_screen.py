"""The screen fits its width, says n/a and never 0 for what is not known, and shows the power of a card once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from anabatic.core.errors import ConfigError
from anabatic.monitor import device_filter, screen, value_format
from anabatic.monitor.device_filter import DeviceFilter
from anabatic.monitor.sampler import Frame
from anabatic.monitor.screen import UtilizationHistory
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot
from anabatic.monitor.sources import npu_smi_command
from unit.monitor import fake


def _text(snapshot: Snapshot, width: int, height: int | None = None, problem: str = "", hint: str = "") -> list[str]:
    frame, history = Frame(1, snapshot, problem, hint), UtilizationHistory()
    history.add_frame(frame)
    return [
        screen.colorize_line(line, colour=False)
        for line in screen.render_screen(frame, snapshot, history, width, height)
    ]


numbers = st.one_of(st.none(), st.integers(0, 1 << 22))
devices = st.builds(
    DeviceReading,
    npu_id=st.integers(0, 40_000),
    chip_id=st.one_of(st.none(), st.integers(0, 3)),
    name=st.one_of(st.none(), st.text(max_size=30)),
    health=st.one_of(st.none(), st.sampled_from(["OK", "Warning", "Alarm", "Critical", "UNKNOWN"])),
    power_w=st.one_of(st.none(), st.floats(0, 1e4)),
    temp_c=numbers,
    util_pct=st.one_of(st.none(), st.floats(0, 1000)),
    mem_used_mb=numbers,
    mem_total_mb=numbers,
    hbm_used_mb=numbers,
    hbm_total_mb=numbers,
)
processes = st.builds(
    DeviceProcess,
    npu_id=st.integers(0, 9),
    chip_id=st.none(),
    pid=st.integers(1, 1 << 31),
    name=st.one_of(st.none(), st.text(max_size=40)),
    mem_mb=numbers,
    user=st.one_of(st.none(), st.text(max_size=40)),
    command=st.one_of(st.none(), st.text(max_size=200)),
)
snapshots = st.builds(
    Snapshot,
    source=st.just("npu-smi"),
    devices=st.lists(devices, max_size=17),
    processes=st.lists(processes, max_size=9),
    notes=st.lists(st.text(max_size=300), max_size=4),
    taken_at=st.just(1.7e9),
)


@settings(max_examples=40, deadline=None)
@given(snapshots, st.integers(40, 200), st.text(max_size=300))
def test_no_line_is_wider_than_the_screen(snapshot: Snapshot, width: int, problem: str) -> None:
    for line in _text(
        snapshot, width, None, problem, "a hint that is quite long, so that it must be wrapped somewhere"
    ):
        assert cell_len(line) <= width
        assert line.isprintable()


def _a3(count: int = 16) -> Snapshot:
    return npu_smi_command.parse_snapshot(fake.table(count))


@pytest.mark.parametrize("width", [40, 80, 120])
def test_sixteen_dies_have_a_line_each(width: int) -> None:
    lines = _text(_a3(), width)
    for die in ("0.0", "0.1", "7.1"):
        assert sum(line.startswith(f"{die} ") and "OK" in line for line in lines) == 1


def test_the_power_of_a_card_is_told_once() -> None:
    lines = [line for line in _text(_a3(), 80) if "OK" in line]
    assert sum("160.5W" in line for line in lines) == 8 and sum(" card " in line for line in lines) == 8


def test_a_die_that_is_shown_alone_keeps_its_name_and_has_the_power() -> None:
    shown = DeviceFilter(("3.1",)).filter_snapshot(_a3())
    text = screen.render_screen(Frame(1, _a3()), shown, UtilizationHistory(), 80, None)
    (line,) = ["".join(part for _, part in row) for row in text if "OK" in str(row)]
    assert line.startswith("3.1 ") and "160.5W" in line
    assert [each.power_w for each in DeviceFilter(("3",)).filter_snapshot(_a3()).devices] == [160.5, None]


def test_cards_with_long_numbers_and_without_power() -> None:
    dies = [DeviceReading(15360 + index // 2, index % 2, name="Ascend950DT-Pro", health="OK") for index in range(4)]
    for width in (40, 80):
        lines = [line for line in _text(Snapshot("npu-smi", dies), width) if "OK" in line]
        assert [line.split()[0] for line in lines] == ["15360.0", "15360.1", "15361.0", "15361.1"]
        assert not any("card" in line for line in lines)
    assert all("Ascend950DT" in line for line in lines)


def test_what_to_type_about_an_npu_that_is_not_well() -> None:
    dies = [DeviceReading(5, health="OK"), DeviceReading(6, health="Alarm"), DeviceReading(7, health="Warning")]
    assert "Alarm: `npu-smi info -t health -i 6` says why" in _text(Snapshot("npu-smi", dies), 80)
    assert not any("says why" in line for line in _text(Snapshot("npu-smi", dies[:1]), 80))


def test_what_is_not_known_is_not_zero() -> None:
    (line,) = [line for line in _text(Snapshot("npu-smi", [DeviceReading(5)]), 120) if line.startswith("5 ")]
    assert line.split() == ["5", *["n/a"] * 6]
    assert (
        value_format.format_memory(0, 65536) == "0.0/64.0G"
        and value_format.format_fixed(None) == value_format.format_memory(None, None) == "n/a"
    )


def test_a_vnpu_without_memory_figures_has_none() -> None:
    device = DeviceReading(0, mem_used_mb=0, mem_total_mb=0, hbm_used_mb=None, hbm_total_mb=None)
    assert (device.used_mb, device.total_mb) == (None, None)


def test_errors_are_not_cut_on_a_narrow_screen() -> None:
    problem = "npu-smi: dcmi model initialized failed, because the device is used. ret is -8020"
    text = " ".join(" ".join(_text(Snapshot("npu-smi"), 40, 24, problem, "stop the other container")).split())
    assert problem in text and "hint: stop the other container" in text


def test_a_short_screen_counts_the_processes_it_leaves_out() -> None:
    lines = _text(_a3(), 80, 26)
    assert len(lines) <= 26 and lines[-1].startswith("… ") and lines[-1].endswith(" more")


def test_filters() -> None:
    snapshot = _a3()
    for place, process in enumerate(snapshot.processes):
        process.user, process.command = ("ann" if place < 3 else "bob"), f"python train{place}.py"
    assert [(each.npu_id, each.chip_id) for each in DeviceFilter(("1.1", "3")).filter_snapshot(snapshot).devices] == [
        (1, 1),
        (3, 0),
        (3, 1),
    ]
    ann = DeviceFilter(user="ann").filter_snapshot(snapshot)
    assert len(ann.processes) == 3 and [(each.npu_id, each.chip_id) for each in ann.devices] == [(0, 0), (0, 1), (1, 0)]
    assert [each.pid for each in DeviceFilter(name="train12").filter_snapshot(snapshot).processes] == [4_000_012]
    with pytest.raises(ConfigError, match="no device 9 here"):
        DeviceFilter(("9", "1")).require_devices(snapshot)
    with pytest.raises(ConfigError, match="expected a number"):
        device_filter.parse_device_numbers(["0,one"])
    DeviceFilter(("9",)).require_devices(replace(snapshot, devices=[], error="no driver"))  # said elsewhere


@pytest.mark.parametrize(
    ("text", "where"), [("8082", ("127.0.0.1", 8082)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::]:9", ("::", 9))]
)
def test_addresses(text: str, where: tuple[str, int]) -> None:
    assert device_filter.parse_address(text) == where


@pytest.mark.parametrize("text", ["", "abc", "host:", "70000", "1.5"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="expected PORT"):
        device_filter.parse_address(text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=40), st.integers(0, 30))
def test_histories_have_their_width(values: list[float | None], width: int) -> None:
    assert len(value_format.draw_history(values, width)) == width
    assert len(value_format.draw_history(values, width, 100.0)) == width
