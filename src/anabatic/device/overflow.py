"""Overflow detection on chips without infinities, where results do not show it.

An Ascend 910A or 310P returns 65,504 on fp16 overflow, and 0 instead of NaN; a status register of the device records
it until it is cleared (hiascend.com, INF_NAN_MODE_ENABLE; torch_npu 2.13, npu/utils.py, get_npu_overflow_flag).
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabatic.device import ops_npu
from anabatic.device.device import Device


class OverflowRegister:
    """The status register of a device that saturates."""

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(8, device=device)

    def clear_flag(self) -> None:
        """Clear the overflow flag."""
        ops_npu.clear_overflow(self._buffer)

    def read_flag(self) -> Tensor:
        """Return an fp32 scalar on the device, without synchronization: 1 after an overflow since `clear_flag`."""
        return ops_npu.read_overflow(self._buffer).ne(0).float()


def open_register(device: Device) -> OverflowRegister | None:
    """Return the register of a device that saturates; None for devices with infinities."""
    if device.type != "npu" or ops_npu.has_infinities():
        return None
    return OverflowRegister(device.torch_device)
