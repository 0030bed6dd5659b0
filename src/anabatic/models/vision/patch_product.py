"""Patch embedding as one matrix product.

Its kernel is as large as its steps, so that each patch is read once. CANN's Conv3D is slow or lacks a gradient in half
precision (LLaMA-Factory#6694 and #7352 on GitHub), and on processors it takes longer than the product.
"""

from __future__ import annotations

from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn


def install_patch_product(tower: nn.Module) -> None:
    """Let convolutions of a tower over whole patches return `[patches, channels]` by a matrix product."""
    for module in tower.modules():
        if isinstance(module, nn.Conv3d) and _reads_patches_once(module):
            module.forward = MethodType(_multiply, module)  # type: ignore[method-assign]


def _reads_patches_once(module: nn.Conv3d) -> bool:
    return module.kernel_size == module.stride and module.groups == 1 and set(module.padding) == {0}


def _multiply(self: nn.Conv3d, patches: Tensor) -> Tensor:
    """Return `[patches, channels]` for `[patches, colors, frames, rows, columns]`, each of the kernel's size."""
    return F.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
