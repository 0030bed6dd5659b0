"""Select the device and its dtype, and wrap the calls that differ between devices: copies, memory, readings of torch
itself.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import resource
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.core import cpu_info
from anabatic.core.errors import ConfigError, DeviceError
from anabatic.core.formatting import parse_whole
from anabatic.device.table import DEVICES, Chip, DeviceRow, find_chip
from anabatic.monitor.snapshot import DeviceReading as Figures
from anabatic.monitor.snapshot import Snapshot

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Device:
    """The device of this process and its settings."""

    type: str
    index: int
    name: str
    dtype: torch.dtype
    """Dtype of matrix products; parameters and the optimizer stay fp32."""
    device_row: DeviceRow
    chip: Chip | None
    threads: int
    reasons: dict[str, str] = field(default_factory=dict)
    """Choice -> reason, for the log and the report."""

    @property
    def torch_device(self) -> torch.device:
        """Return the torch.device."""
        return torch.device("cpu") if self.type == "cpu" else torch.device(self.type, self.index)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of a forward pass; a null context in fp32."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.type, self.dtype)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.type != "cpu":
            _get_torch_module(self.type).synchronize()

    def get_peak_memory(self) -> int:
        """Return the peak bytes: of the allocator on an accelerator, of the resident set on a CPU."""
        if self.type in ("cpu", "mps"):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return int(_get_torch_module(self.type).max_memory_allocated())

    def reset_peak_memory(self) -> None:
        """Reset the peak to the memory allocated now; the peak of the resident set cannot be reset."""
        if self.type not in ("cpu", "mps"):
            _get_torch_module(self.type).reset_peak_memory_stats()

    def get_total_memory(self) -> int:
        """Return the bytes of memory on the device; of the machine on a CPU."""
        if self.type == "cpu":
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.type == "mps":
            return int(torch.mps.recommended_max_memory())
        return int(_get_torch_module(self.type).mem_get_info(self.index)[1])

    def get_free_memory(self) -> int:
        """Return the free bytes of the device, or of the machine on a CPU."""
        if self.type in ("cpu", "mps"):
            return int(psutil.virtual_memory().available)
        return int(_get_torch_module(self.type).mem_get_info(self.index)[0])

    def get_rng_state(self) -> dict[str, Tensor]:
        """Return the states of this process's random number generators, as CPU byte tensors."""
        states = {"cpu": torch.get_rng_state()}
        if self.type != "cpu":
            states[self.type] = _get_torch_module(self.type).get_rng_state()
        return states

    def set_rng_state(self, states: dict[str, Tensor]) -> None:
        """Restore the result of `get_rng_state`; the state of another device type is ignored."""
        torch.set_rng_state(states["cpu"])
        if self.type in states and self.type != "cpu":
            _get_torch_module(self.type).set_rng_state(states[self.type])


def get_free_host_memory() -> int:
    """Return the bytes of host memory that this process may still use, within a container's limit (cgroup v2)."""
    free = psutil.virtual_memory().available
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        return min(free, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no such file, or "max"
        return free


def select_device(config: DeviceConfig) -> Device:
    """Select the device and its dtype, and set up this process for them.

    Raises:
        DeviceError: the requested device does not work here.
        ConfigError: the device does not support the requested dtype.
    """
    device_type, reason = _choose_type(config.type)
    row = DEVICES[device_type]
    _set_allocator(row)
    index = int(os.environ.get("LOCAL_RANK", "0")) if device_type in ("npu", "cuda") else 0
    threads = config.threads or _default_threads()
    torch.set_num_threads(threads)
    if device_type == "cpu":
        _keep_freed_memory()
        torch.set_flush_denormal(True)
    name = "" if device_type == "cpu" else _activate_device(device_type, index)
    chip = find_chip(name) if name else None
    dtype, dtype_reason = _choose_dtype(config.dtype, row, chip)
    name = name or cpu_info.get_cpu_name(cpu_info.read_cpuinfo(), "CPU")
    reasons = {"device": reason, "dtype": dtype_reason}
    return Device(device_type, index, name, DTYPES[dtype], row, chip, threads, reasons)


def should_compile(config: DeviceConfig, row: DeviceRow, steps: int) -> tuple[bool, str]:
    """Return whether to use torch.compile, and the reason."""
    if config.compile != "auto":
        return config.compile == "on", "asked for"
    if not row.compile_pays:
        return False, f"the device table says it does not pay on {row.type}"
    if steps < 500:
        return False, f"{steps} steps are too few to earn the compilation back"
    return True, f"{steps} steps on {row.type}"


def measure_peak_flops(dtype: torch.dtype = torch.float32, seconds: float = 0.15) -> float:
    """Return the operations per second of matrix products on this CPU, measured with 1024 x 1024 matrices.

    It is computed from CPU time instead of wall time: on a busy machine wall time gives a peak that training exceeds
    once the load is gone. The number of threads follows from both times.
    """
    generator = torch.Generator().manual_seed(0)  # keeps the global generator of the training unchanged
    a, b = (torch.randn(1024, 1024, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(1024, 1024, dtype=dtype)
    torch.mm(a, b, out=out)
    end, timings = time.perf_counter() + seconds, list[tuple[float, float]]()
    while time.perf_counter() < end or not timings:
        start, cpu_start = time.perf_counter(), time.process_time()
        torch.mm(a, b, out=out)
        timings.append((time.perf_counter() - start, time.process_time() - cpu_start))
    return 2 * 1024**3 / _estimate_idle_seconds(timings, torch.get_num_threads())


def _estimate_idle_seconds(timings: Sequence[tuple[float, float]], max_threads: int) -> float:
    """Return the seconds of a call with at most `max_threads` threads on an idle machine, from several (wall seconds,
    CPU seconds of all threads)."""
    threads = min(
        max_threads, max(1, math.ceil(max(cpu_seconds / wall_seconds for wall_seconds, cpu_seconds in timings) - 0.1))
    )
    return min(
        min(wall_seconds for wall_seconds, _ in timings), min(cpu_seconds for _, cpu_seconds in timings) / threads
    )


def get_peak_flops(device: Device) -> tuple[float, str]:
    """Return the peak operations per second for MFU, and the source of the figure."""
    if device.type == "cpu":
        dtype_name = str(device.dtype).removeprefix("torch.")
        return measure_peak_flops(device.dtype), f"measured: {dtype_name} matrix product of 1024 x 1024"
    if device.chip is None:
        return 0.0, f"unknown chip {device.name!r}: MFU is not shown"
    # fp32 has no full rate on matrix units; MFU is then relative to the half-precision peak, as usual.
    return device.chip.half_tflops * 1e12, f"{device.chip.name}, dense half precision"


def _choose_type(requested: str) -> tuple[str, str]:
    _load_npu_backend()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = accelerator.type if accelerator is not None else None
    if requested == "auto":
        if available in DEVICES:
            return str(available), "auto: the accelerator that torch found"
        if available is not None:
            return "cpu", f"auto: torch found {available}, for which there is no row in the device table"
        return "cpu", "auto: torch found no accelerator"
    if requested != "cpu" and requested != available:
        raise DeviceError(
            f"device {requested} was asked for, but torch {torch.__version__} sees {available or 'no accelerator'}",
            "check the driver and that torch (and torch_npu) match it, or use --device.type auto",
        )
    return requested, "asked for"


def _load_npu_backend() -> None:
    """Import torch_npu if it is installed but torch did not load it (TORCH_DEVICE_BACKEND_AUTOLOAD=0)."""
    if hasattr(torch, "npu") or importlib.util.find_spec("torch_npu") is None:
        return
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise DeviceError(
            f"torch_npu is installed but cannot be loaded: {error}",
            "source the set_env.sh of CANN, or uninstall torch_npu to use another device",
        ) from error


def _set_allocator(row: DeviceRow) -> None:
    """Set the allocator's options before its first use, unless the user has set them.

    Setting both the device's own variable and PYTORCH_ALLOC_CONF is an error from TorchNPU 26.2.0 on.
    """
    variable, value = row.alloc_env
    if variable and not os.environ.get(variable) and not os.environ.get("PYTORCH_ALLOC_CONF"):
        os.environ[variable] = value


def _activate_device(device_type: str, index: int) -> str:
    if device_type == "mps":
        return "Apple GPU"
    module = _get_torch_module(device_type)
    count = module.device_count()
    if index >= count:
        raise DeviceError(
            f"LOCAL_RANK {index} has no device: {count} {device_type} devices are visible",
            f"start at most {count} processes, or widen {DEVICES[device_type].visible_env}",
        )
    module.set_device(index)
    return str(module.get_device_name(index))


def _choose_dtype(requested: str, row: DeviceRow, chip: Chip | None) -> tuple[str, str]:
    has_bf16 = chip.has_bf16 if chip is not None else row.dtype == "bf16" or row.type == "cpu"
    if requested == "auto":
        if row.dtype == "bf16" and not has_bf16:
            return "fp16", f"{chip.name if chip else row.type} has no bf16"
        reason = f"the device table's choice for {row.type}"
        if row.type == "cpu" and cpu_info.has_bf16_products(cpu_info.read_cpuinfo()):
            reason += "; this CPU multiplies bf16 faster: --device.dtype bf16"
        return row.dtype, reason
    if requested == "bf16" and not has_bf16:
        raise ConfigError(f"device.dtype is bf16, which {chip.name if chip else row.type} does not have", "use fp16")
    if requested == "fp16" and row.type == "cpu":
        raise ConfigError("device.dtype is fp16, which is not supported on a CPU", "use fp32 or bf16")
    return requested, "asked for"


def _default_threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS")
    if given and (threads := parse_whole(given, 6)):
        return threads
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def _keep_freed_memory() -> None:
    """Make the C library keep freed blocks: new pages for every large tensor cost up to a third of a CPU step.

    Source: mallopt(3); M_MMAP_THRESHOLD is -3, M_TRIM_THRESHOLD -1, M_TOP_PAD -2. Measured in docs/dev.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, (1 << 31) - 1)
        libc.mallopt(-2, 64 << 20)


def _get_torch_module(device_type: str) -> Any:
    return torch.get_device_module(device_type)


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. Pageable memory is pinned first: a copy from it would wait for the device."""
    if device.type in ("cpu", "mps"):
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def get_device_ids(device: Device, count: int) -> frozenset[int | str]:
    """Return logic ids, or UUIDs if torch has them, of the first `count` devices visible to this process."""
    module: Any = getattr(torch, device.type)
    count = min(count, module.device_count())
    if device.type == "cuda":
        uuids = [getattr(module.get_device_properties(index), "uuid", None) for index in range(count)]
        if all(uuids):
            return frozenset(f"GPU-{uuid}" for uuid in uuids)
    entries = os.environ.get(device.device_row.visible_env, "").split(",")
    visible = [number for entry in entries if (number := parse_whole(entry.strip())) is not None]
    if len(visible) >= count and len(visible) == len(entries):
        return frozenset(visible[:count])
    return frozenset(range(count))


class TorchDeviceSource:
    """Reads this process's device through torch, for containers in which no driver tool works.

    `torch.npu.utilization` is the mean of cube and vector units (aclrtGetDeviceUtilizationRate): a saturating matrix
    product reads 50. Both calls query the driver and wait for no kernel.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)

    def read(self) -> Snapshot:
        """Return a snapshot of the device."""
        index = self._device.index
        free, total = self._module.mem_get_info(index)
        figures = Figures(
            index, kind="npu" if self._device.type == "npu" else "gpu", logic_id=index, name=self._device.name
        )
        figures.hbm_total_mb, figures.hbm_used_mb = int(total) >> 20, int(total - free) >> 20
        if self._device.type == "npu":
            figures.util_pct, figures.util_kind = self._read_utilization(index), "own"
        return Snapshot("torch", [figures])

    def _read_utilization(self, index: int) -> float | None:
        try:
            return float(self._module.utilization(index))
        except RuntimeError:  # some drivers and virtual devices do not report it
            return None
