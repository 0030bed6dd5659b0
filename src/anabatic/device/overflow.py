"""Overflow on chips without infinities, where no number shows it.

An Ascend 910A or 310P computes 65,504 where fp16 overflows, and 0 where there is no number; a status register of the
device remembers it until it is cleared (hiascend.com, INF_NAN_MODE_ENABLE; torch_npu 2.13, npu/utils.py,
get_npu_overflow_flag).
"""

from __future__ import annotations

import torch
from torch import Tensor

from anabatic.device import ops_npu
from anabatic.device.device import Device


class OverflowRegister:
    """The status register of a device that saturates."""

    def __init__(self, device: torch.device) -> None:
        self._room = torch.zeros(8, device=device)

    def clear_flag(self) -> None:
        """Forget what has overflowed so far."""
        ops_npu.clear_overflow(self._room)

    def read_flag(self) -> Tensor:
        """Return an fp32 scalar on the device: 1 when anything has overflowed since `clear_flag`. Nobody waits."""
        return ops_npu.read_overflow(self._room).ne(0).float()


def open_register(device: Device) -> OverflowRegister | None:
    """Return the register of a device whose numbers end at the largest one; None where there are infinities."""
    if device.type != "npu" or ops_npu.has_infinities():
        return None
    return OverflowRegister(device.torch_device)
