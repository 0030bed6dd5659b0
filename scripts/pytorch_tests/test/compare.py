"""Run one function on the CPU and on the NPU with the same values, and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import SkipTest, mock

import torch
from torch.utils import _pytree as pytree

SEED = 20


def move(value: Any, device: str) -> Any:
    """Return a copy on a device: tensors, devices and names of devices in any nesting."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return device
        return copy.deepcopy(leaf) if isinstance(leaf, torch.nn.Module) else leaf

    return pytree.tree_map(convert, value)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def compute(
    function: Callable[..., Any], args: Any, kwargs: Any, backward: bool, seed: int = SEED
) -> list[torch.Tensor]:
    """Return the results, and with `backward` also the gradients of the inputs, of one call with a fixed seed."""
    torch.manual_seed(seed)
    result = tensors_of(function(*args, **kwargs))
    if not backward:
        return result
    leaves = [leaf for leaf in tensors_of((args, kwargs)) if leaf.requires_grad]
    losses = [out.abs().sum() if out.is_complex() else out.sum() for out in result if out.requires_grad]
    if leaves and losses:
        gradients = torch.autograd.grad(sum(losses), leaves, allow_unused=True)
        result += [gradient for gradient in gradients if gradient is not None]
    return result


def compare(found: list[torch.Tensor], expected: list[torch.Tensor], values: bool = True) -> None:
    """Fail when results differ: in number, shape, dtype and, unless they are random, in value."""
    assert len(found) == len(expected), f"{len(found)} tensors, {len(expected)} on the CPU"
    for one, other in zip(found, expected, strict=True):
        if not values:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            continue
        limits = {"rtol": 2e-3, "atol": 1e-3} if one.dtype == torch.float16 else {}  # an order of sums is not promised
        torch.testing.assert_close(one.detach().cpu(), other.detach(), equal_nan=True, **limits)


OTHER_SEEDS = range(SEED + 1, SEED + 25)
"""So many that not even the few coins of a small sample come out equal with all of them by chance."""


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()


def _is_random(function: Callable[..., Any], given: Any, backward: bool, expected: list[torch.Tensor]) -> bool:
    """True when another seed gives other numbers."""
    set_seed = torch.manual_seed
    for seed in OTHER_SEEDS:
        # Samples of random operators set a seed themselves (wrapper_set_seed in torch.testing._internal).
        with mock.patch.object(torch, "manual_seed", lambda _, its=seed: set_seed(its)):
            again = compute(function, *move(given, "cpu"), backward, seed)
        for one, two in zip(map(_dense, again), map(_dense, expected), strict=True):
            if one.shape != two.shape or ((one != two) & (one == one)).any():
                return True
    return False


def check_same(
    function: Callable[..., Any], args: Any, kwargs: Any, backward: bool = False, values: bool = True
) -> None:
    """Fail when the NPU's results differ from the CPU's, with `values` not only in shape; skip what the CPU rejects."""
    given = (args, kwargs)
    try:
        expected = compute(function, *move(given, "cpu"), backward)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
        raise SkipTest(f"the CPU rejects it: {error}") from error
    found = compute(function, *move(given, "npu:0"), backward)
    try:
        compare(found, expected, values)
    except AssertionError:
        if not (values and _is_random(function, given, backward, expected)):
            raise
        compare(found, expected, values=False)
