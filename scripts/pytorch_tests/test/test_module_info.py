"""PyTorch's module samples (module_db): the same weights and inputs on the NPU and on the CPU, with gradients."""

from __future__ import annotations

import copy
import unittest
from typing import Any

import torch
from compare import SEED, compare, compute, move
from torch.testing._internal.common_modules import module_db

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TestModuleInfo(unittest.TestCase):
    """One test for each module, dtype and mode, made below."""


def _make_test(info: Any, dtype: torch.dtype, training: bool) -> Any:
    def run(self: unittest.TestCase) -> None:
        torch.manual_seed(SEED)
        gradients = dtype == torch.float32
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=gradients, training=training)
        done = 0
        for sample in inputs:
            args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
            given = sample.forward_input
            if given is None:
                continue
            torch.manual_seed(SEED)
            module = info.module_cls(*args, **kwargs).to(dtype).train(training)
            if any(torch.nn.parameter.is_lazy(weight) for weight in (*module.parameters(), *module.buffers())):
                module(*given.args, **given.kwargs)  # makes the weights
            other = copy.deepcopy(module).to("npu:0")
            try:
                expected = compute(module, *move((given.args, given.kwargs), "cpu"), gradients)
            except (RuntimeError, NotImplementedError) as error:
                self.skipTest(f"the CPU rejects it: {error}")
            found = compute(other, *move((given.args, given.kwargs), "npu:0"), gradients)
            compare(found, expected)
            done += 1
        if not done:
            self.skipTest("no samples")

    return run


for _info in module_db:
    for _dtype in DTYPES:
        if _dtype not in _info.dtypes:
            continue
        for _mode in (True, False):
            _label = f"{_info.formatted_name}_{'train' if _mode else 'eval'}_{str(_dtype).partition('.')[2]}"
            setattr(TestModuleInfo, f"test_{_label}", _make_test(_info, _dtype, _mode))
