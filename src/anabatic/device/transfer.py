"""Asynchronous copies of host tensors to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. Pageable memory is pinned first: a copy from it would wait for the device."""
    if device.type in ("cpu", "mps"):
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
