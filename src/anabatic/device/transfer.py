"""Host tensors to a device without waiting."""

from __future__ import annotations

import torch
from torch import Tensor


def send_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on `device`. From ordinary memory a copy waits for the device, from page-locked it does not."""
    if device.type in ("cpu", "mps"):
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)
