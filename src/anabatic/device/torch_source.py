"""External ids of this process's devices, and a metrics source that reads torch where no driver tool works."""

from __future__ import annotations

import os
from typing import Any

import torch

from anabatic.device.device import Device
from anabatic.monitor.snapshot import DeviceReading as Figures
from anabatic.monitor.snapshot import Snapshot


def get_device_ids(device: Device, count: int) -> frozenset[int | str]:
    """Return logic ids, or UUIDs if torch has them, of the first `count` devices visible to this process."""
    module: Any = getattr(torch, device.type)
    count = min(count, module.device_count())
    if device.type == "cuda":
        uuids = [getattr(module.get_device_properties(index), "uuid", None) for index in range(count)]
        if all(uuids):
            return frozenset(f"GPU-{uuid}" for uuid in uuids)
    visible = os.environ.get(device.device_row.visible_env, "").split(",")
    if len(visible) >= count and all(entry.strip().isdigit() for entry in visible):
        return frozenset(int(entry) for entry in visible[:count])
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
