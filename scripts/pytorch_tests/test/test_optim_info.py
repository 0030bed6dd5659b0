"""PyTorch's optimizer samples (optim_db): three steps with the same gradients on the NPU and on the CPU."""

from __future__ import annotations

import unittest
from typing import Any

import torch
from compare import SEED
from torch.testing._internal.common_optimizers import optim_db

STEPS = 3


class TestOptimInfo(unittest.TestCase):
    """One test for each optimizer and implementation, made below."""


def _train(info: Any, kwargs: dict[str, Any], device: str) -> list[torch.Tensor]:
    torch.manual_seed(SEED)
    shape = (6, 5) if "Muon" in info.optim_cls.__name__ else (5,)
    start = [torch.randn(shape), torch.randn(4, 3)]
    gradients = [[torch.randn_like(value) for value in start] for _ in range(STEPS)]
    weights = [value.to(device).requires_grad_() for value in start]
    optimizer = info.optim_cls(weights, **kwargs)
    for step in gradients:

        def closure(step: list[torch.Tensor] = step) -> torch.Tensor:
            for weight, gradient in zip(weights, step, strict=True):
                weight.grad = gradient.to(device)
            return weights[0].detach().sum()

        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return [weight.detach().cpu() for weight in weights]


def _make_test(info: Any, implementation: str) -> Any:
    def run(self: unittest.TestCase) -> None:
        for sample in info.optim_inputs_func(device="cpu"):
            kwargs = {key: value for key, value in sample.kwargs.items() if key not in ("foreach", "fused")}
            if implementation != "plain":
                if implementation == "fused" and (kwargs.get("differentiable") or kwargs.get("capturable")):
                    continue
                kwargs[implementation] = True
            try:
                expected = _train(info, kwargs, "cpu")
            except (RuntimeError, ValueError) as error:
                self.skipTest(f"the CPU rejects it: {error}")
            for one, other in zip(_train(info, kwargs, "npu:0"), expected, strict=True):
                torch.testing.assert_close(one, other)

    return run


for _info in optim_db:
    if _info.only_supports_sparse_grads:
        continue
    for _implementation in ("plain", *_info.supported_impls):
        if _implementation in ("plain", "foreach", "fused"):
            _name = f"test_{_info.optim_cls.__name__}_{_implementation}"
            setattr(TestOptimInfo, _name, _make_test(_info, _implementation))
