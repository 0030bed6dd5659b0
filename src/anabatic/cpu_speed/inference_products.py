"""Products of few rows with frozen weights, the bulk of a generated token, by the fastest kernel of the device.

On x86 processors the products that torch takes for fp32 read weights at half the memory's speed with one row, and reach
two thirds of the rate of oneDNN's with more (docs/dev). oneDNN is fastest with weights in a layout of its own: a copy.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_NARROW_ROWS = 2
"""Rows up to which the weight is the left factor of the product: the fastest way to read it once."""
_PACKED_DTYPES = (torch.float32, torch.bfloat16)


def has_packed_products(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether oneDNN has products with packed weights here."""
    if device_type != "cpu" or dtype not in _PACKED_DTYPES or platform.machine() not in ("x86_64", "AMD64"):
        return False
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):  # type: ignore[attr-defined]
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class InferenceProduct:
    """`[x W1^T + b1 | x W2^T + b2 | ...]` of layers with the same input, without gradients.

    Args:
        weights: `[out, in]` each.
        biases: `[out]` each, or None.
        pack: copy the weights into oneDNN's layout when a product of several rows first needs it; the copy is renewed
            when a weight has changed.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], pack: bool) -> None:
        self._weights, self._biases = list(weights), list(biases)
        self._sizes = [weight.shape[0] for weight in weights]
        self._num_outputs = sum(self._sizes)
        self._watched = [*weights, *(bias for bias in biases if bias is not None)]
        first = weights[0]
        self._has_onednn = has_packed_products(first.device.type, first.dtype)
        self._packs = pack and self._has_onednn
        self._is_narrow_fast = self._has_onednn and first.dtype == torch.float32 and torch.backends.mkl.is_available()
        self._versions: list[tuple[int, int]] = []
        self._packed: Tensor | None = None
        self._joint_bias: Tensor | None = None

    def multiply(self, x: Tensor) -> Tensor:
        """`[T, in]` -> `[T, sum of out]`."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, self._num_outputs)
        self._watch_changes()
        if self._is_narrow_fast and rows <= _MAX_NARROW_ROWS:
            return self._multiply_narrow(x, rows)
        if self._packs:
            if self._packed is None:
                self._packed = torch.ops.mkldnn._reorder_linear_weight(self._join(self._weights))
            return _multiply_onednn(x, self._packed, self._joint_bias)
        product = _multiply_onednn if self._has_onednn else F.linear
        parts = [product(x, *pair) for pair in zip(self._weights, self._biases, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def _watch_changes(self) -> None:
        """Forget copies of weights that were changed since in a way that counts: not by `weight.data.copy_`."""
        versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in self._watched]
        if versions != self._versions:
            self._versions, self._packed, self._joint_bias = versions, None, None
            if any(bias is not None for bias in self._biases):
                self._joint_bias = self._join(
                    [
                        weight.new_zeros(size) if bias is None else bias
                        for bias, weight, size in zip(self._biases, self._weights, self._sizes, strict=True)
                    ]
                )

    @staticmethod
    def _join(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].detach() if len(tensors) == 1 else torch.cat([tensor.detach() for tensor in tensors])

    def _multiply_narrow(self, x: Tensor, rows: int) -> Tensor:
        """One or two rows: `W x^T` with two columns, which reads the weight once at the memory's speed."""
        columns = (x.expand(_MAX_NARROW_ROWS, -1) if rows < _MAX_NARROW_ROWS else x).contiguous().t()
        out = x.new_empty(self._num_outputs, _MAX_NARROW_ROWS)
        parts = out.split(self._sizes) if len(self._sizes) > 1 else (out,)
        for weight, part in zip(self._weights, parts, strict=True):
            torch.mm(weight, columns, out=part)
        out = out.t()[:rows]
        return out.contiguous() if self._joint_bias is None else out + self._joint_bias


def _multiply_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
