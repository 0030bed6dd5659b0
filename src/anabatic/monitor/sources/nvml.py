"""NVIDIA GPUs, through NVML (package nvidia-ml-py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabatic.core import extras
from anabatic.monitor.snapshot import DeviceProcess, DeviceReading, Snapshot


def _decode_text(value: Any) -> str | None:
    """Older versions of the package return bytes."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text if isinstance(text, str) else None


class NvmlSource:
    """Reads through NVML. A value that a GPU does not report is None."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    def _call_or_none(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._nvml.NVMLError:  # not supported by this GPU, or not permitted
            return None

    def read(self) -> Snapshot:
        """Return the GPUs now."""
        nvml = self._nvml
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return Snapshot("nvml", error=f"NVML: {error}", hint="run `nvidia-smi` by hand, and look at `dmesg`")
        found = Snapshot("nvml", driver_version=_decode_text(self._call_or_none(nvml.nvmlSystemGetDriverVersion)))
        for index in range(count):
            handle = self._call_or_none(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                found.devices.append(DeviceReading(index, kind="gpu", logic_id=index, health="UNKNOWN"))
                found.notes.append(f"GPU {index} does not answer: it has fallen off the bus, or is not ours to see")
                continue
            found.devices.append(self._read_device(index, handle))
            found.processes += self._read_processes(index, handle)
        return found

    def _read_device(self, index: int, handle: Any) -> DeviceReading:
        nvml, ask = self._nvml, self._call_or_none
        memory, rates = ask(nvml.nvmlDeviceGetMemoryInfo, handle), ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
        power = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        return DeviceReading(
            index,
            kind="gpu",
            logic_id=index,
            name=_decode_text(ask(nvml.nvmlDeviceGetName, handle)),
            uuid=_decode_text(ask(nvml.nvmlDeviceGetUUID, handle)),
            bus_id=_decode_text(pci.busId) if pci is not None else None,
            power_w=None if power is None else power / 1000,
            temp_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            util_pct=None if rates is None else rates.gpu,
            util_kind="gpu",
            bandwidth_pct=None if rates is None else rates.memory,
            mem_used_mb=None if memory is None else memory.used >> 20,
            mem_total_mb=None if memory is None else memory.total >> 20,
            freq_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        )

    def _read_processes(self, index: int, handle: Any) -> list[DeviceProcess]:
        running = self._call_or_none(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return [
            DeviceProcess(
                index, None, each.pid, mem_mb=None if each.usedGpuMemory is None else each.usedGpuMemory >> 20
            )
            for each in running
        ]


def open_source() -> NvmlSource | str | None:
    """Return the source; a sentence where there are GPUs that cannot be read; None where there are none."""
    nodes = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    try:
        import pynvml
    except ImportError:
        command = extras.format_install_command("pynvml")
        return f"NVIDIA device nodes are here, but NVML needs nvidia-ml-py: {command}" if nodes else None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"NVIDIA device nodes are here, but NVML does not start: {error}" if nodes else None
    return NvmlSource(pynvml)
