"""PyTorch's operator samples (op_db): the same values on the NPU and on the CPU, forward, and gradients in fp32."""

from __future__ import annotations

import itertools
import unittest
from typing import Any

import torch
from compare import SEED, check_same
from torch.testing._internal.common_methods_invocations import op_db

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
MOST_SAMPLES = 12
"""Samples of one operator and dtype: some have hundreds."""


class TestOpInfo(unittest.TestCase):
    """One test for each operator and dtype, made below."""


def _samples(op: Any, dtype: torch.dtype, gradients: bool) -> list[Any]:
    torch.manual_seed(SEED)
    samples = op.sample_inputs("cpu", dtype, requires_grad=gradients)
    return list(itertools.islice(samples, MOST_SAMPLES))


def _make_test(op: Any, dtype: torch.dtype, gradients: bool) -> Any:
    def run(self: unittest.TestCase) -> None:
        samples = _samples(op, dtype, gradients)
        if not samples:
            self.skipTest("no samples")
        for sample in samples:
            check_same(op.op, (sample.input, *sample.args), sample.kwargs, gradients, "empty" not in op.name)

    return run


for _op in op_db:
    for _dtype in DTYPES:
        if _dtype not in _op.dtypes:
            continue
        _name = f"test_{_op.formatted_name}_{str(_dtype).partition('.')[2]}"
        setattr(TestOpInfo, _name, _make_test(_op, _dtype, gradients=False))
    if _op.supports_autograd and torch.float32 in _op.dtypes:
        setattr(TestOpInfo, f"test_grad_{_op.formatted_name}_float32", _make_test(_op, torch.float32, gradients=True))
