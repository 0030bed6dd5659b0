"""NVML as figures, through a stand-in of the library: a GPU that tells all, one that refuses, one that is gone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabatic.monitor.sources.nvml import NvmlSource


class NVMLError(Exception):
    """As pynvml's."""


CALLS = {
    "nvmlDeviceGetName": b"NVIDIA H200",
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:18:00.0"),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=141 << 30),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=77, memory=20),
    "nvmlDeviceGetPowerUsage": 412_300,
    "nvmlDeviceGetTemperature": 51,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetComputeRunningProcesses": [
        SimpleNamespace(pid=7, usedGpuMemory=1 << 30),
        SimpleNamespace(pid=8, usedGpuMemory=None),
    ],
}


def _library() -> Any:
    def answer(name: str) -> Any:
        def call(handle: int, *_: Any) -> Any:
            if handle == 1:
                raise NVMLError("Not Supported")
            return CALLS[name]

        return call

    def handle(index: int) -> int:
        if index == 2:
            raise NVMLError("GPU is lost")
        return index

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_TEMPERATURE_GPU=0,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetCount=lambda: 3,
        nvmlSystemGetDriverVersion=lambda: "570.86",
        nvmlDeviceGetHandleByIndex=handle,
        **{name: answer(name) for name in CALLS},
    )


def test_what_a_gpu_does_not_tell_is_not_known() -> None:
    found = NvmlSource(_library()).read()
    first, second, third = found.devices
    assert (first.name, first.power_w, first.util_pct, first.used_mb, first.bus_id) == (
        "NVIDIA H200",
        412.3,
        77,
        3072,
        "00000000:18:00.0",
    )
    assert (second.name, second.power_w, second.util_pct, second.used_mb, second.temp_c) == (None,) * 5
    assert third.health == "UNKNOWN" and "GPU 2 does not answer" in found.notes[0]
    assert [(each.pid, each.mem_mb) for each in found.processes] == [(7, 1024), (8, None)]
    assert found.driver_version == "570.86"


def test_a_library_that_stops_is_an_error() -> None:
    library = _library()

    def lost() -> int:
        raise NVMLError("Driver Not Loaded")

    library.nvmlDeviceGetCount = lost
    assert NvmlSource(library).read().error == "NVML: Driver Not Loaded"


def test_the_real_package_has_these_names() -> None:
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert [name for name in vars(_library()) if not hasattr(pynvml, name)] == []
