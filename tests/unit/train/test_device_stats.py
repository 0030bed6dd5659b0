"""Where device figures are not taken, and how a machine's share of the tokens is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import LogSettings
from anabatic.core.errors import ConfigError
from anabatic.device.device import select_device
from anabatic.parallel.world import World
from anabatic.train.metrics.device_stats import local_token_fraction, watch_devices


def test_a_processor_another_rank_and_zero_seconds_have_no_figures() -> None:
    cpu = select_device(DeviceConfig(type="cpu", threads=1))
    accelerator = replace(cpu, type="npu")
    for log, device, world in (
        (LogSettings(), cpu, World()),
        (LogSettings(), accelerator, World(1, 2)),
        (LogSettings(device_every=0), accelerator, World()),
    ):
        with watch_devices(log, device, world) as watch:
            assert watch is None


def test_a_machine_trains_its_share_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_token_fraction(World()) == 1.0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_token_fraction(World(0, 16)) == 0.5


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"log\.device_every is -1"):
        LogSettings(device_every=-1)
