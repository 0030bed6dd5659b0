"""The last good reading is kept with its age, nothing is read twice at a time, and figures of a job are added up."""

from __future__ import annotations

import threading

import pytest

from anabatic.monitor.sampler import DeviceSampler, compute_pause
from anabatic.monitor.snapshot import DeviceReading, Snapshot
from anabatic.monitor.usage_window import MIB, UsageWindow


class Scripted:
    """A source that answers from a list, then for ever with its last entry."""

    def __init__(self, *answers: Snapshot | Exception) -> None:
        self.answers = list(answers)
        self.inside = self.most = 0
        self.gate = threading.Event()
        self.gate.set()

    def read(self) -> Snapshot:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.gate.wait(5)
        self.inside -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def _good(*utilisations: float, watts: float | None = 100.0) -> Snapshot:
    devices = [
        DeviceReading(
            place, logic_id=place, util_pct=value, power_w=watts, hbm_used_mb=1000 * (place + 1), hbm_total_mb=65536
        )
        for place, value in enumerate(utilisations)
    ]
    return Snapshot("test", devices)


def test_a_failed_reading_keeps_the_last_good_one_and_says_so() -> None:
    source = Scripted(_good(10), Snapshot("test", error="it hangs", hint="wait"), ValueError("no"), _good(20))
    sampler = DeviceSampler(source, 0.01)
    try:
        frames = []
        for number in range(4):
            frame = sampler.get_frame(number, 5)
            assert frame is not None
            frames.append(frame)
    finally:
        sampler.close()
    first, second, third, fourth = frames
    assert (first.problem, second.problem, third.problem, fourth.problem) == ("", "it hangs", "ValueError: no", "")
    assert first.snapshot is second.snapshot is third.snapshot and second.hint == "wait"
    assert fourth.snapshot.devices[0].util_pct == 20 and first.get_age() >= 0


def test_without_a_good_reading_the_failed_one_is_shown() -> None:
    sampler = DeviceSampler(Scripted(Snapshot("npu-smi", error="no")), 0.01)
    frame = sampler.get_frame(0, 5)
    sampler.close()
    assert frame is not None and frame.problem == "no" and frame.snapshot.devices == []


def test_one_reading_at_a_time_however_long_it_takes() -> None:
    source = Scripted(_good(1))
    source.gate.clear()
    sampler = DeviceSampler(source, 0.001)
    assert sampler.get_frame(0, 0.05) is None
    source.gate.set()
    assert sampler.get_frame(3, 5) is not None
    sampler.close()
    assert source.most == 1


def test_a_slow_source_is_asked_less_often() -> None:
    assert compute_pause(5.0, took=0.25, max_fraction=0.1) == 4.75
    assert compute_pause(5.0, took=3.0, max_fraction=0.1) == pytest.approx(27.0)
    assert compute_pause(1.0, took=2.0, max_fraction=0.5) == 2.0


def test_figures_of_a_job_are_mean_least_and_most_of_its_own_devices() -> None:
    window = UsageWindow(Scripted(_good(10, 30, 99), _good(50, 70, 99)), {0, 1})
    window.read()
    window.read()
    row = window.take_figures(seconds=36.0, tokens=1e6)
    assert row["device_util_pct_mean"] == 40 and row["device_util_pct_min"] == 10 and row["device_util_pct_max"] == 70
    assert row["device_memory_bytes_mean"] == 1500 * MIB and row["device_memory_bytes_max"] == 2000 * MIB
    assert row["device_power_w_mean"] == 200
    assert row["energy_wh_per_mtoken"] == pytest.approx(200 * 36 / 3600)
    assert window.take_figures(1.0, 10.0) == {}  # nothing was read since: nothing is said, never a zero
    assert window.get_totals()["energy_wh_per_mtoken"] == pytest.approx(200 * 37 / 3600 / (1.00001))


def test_an_evaluation_and_a_failed_reading_count_nothing() -> None:
    window = UsageWindow(Scripted(_good(10), Snapshot("test", error="no"), _good(30)))
    window.set_paused(True)
    window.read()
    window.set_paused(False)
    window.read()
    assert window.take_figures(1, 1) == {}
    window.read()
    assert window.take_figures(1, 1)["device_util_pct_mean"] == 30


def test_the_power_of_a_card_counts_once_for_its_dies() -> None:
    dies = [
        DeviceReading(0, 0, logic_id=0, power_w=160.0),
        DeviceReading(0, 1, logic_id=1),
        DeviceReading(1, 0, logic_id=2, power_w=90.0),
    ]
    window = UsageWindow(Scripted(Snapshot("test", dies)), {1})
    window.read()
    row = window.take_figures(1, 1)
    assert row["device_power_w_mean"] == 160 and "device_util_pct_mean" not in row


def test_devices_are_also_known_by_uuid_and_by_their_place() -> None:
    devices = [
        DeviceReading(4, util_pct=1.0),
        DeviceReading(5, util_pct=2.0),
        DeviceReading(6, uuid="GPU-a", util_pct=3.0),
    ]
    for mine, expected in (({1}, 2.0), ({"GPU-a"}, 3.0), (frozenset[int | str](), 2.0)):
        window = UsageWindow(Scripted(Snapshot("test", devices)), mine)
        window.read()
        assert window.take_figures(1, 1)["device_util_pct_mean"] == expected


def test_what_stands_still_under_a_profiler_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFILING_MODE", "true")
    window = UsageWindow(Scripted(_good(0)))
    window.read()
    row = window.take_figures(1, 1)
    assert "device_util_pct_mean" not in row and row["device_power_w_mean"] == 100
