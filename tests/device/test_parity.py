"""The device's own operators against the plain references, forward and gradient, on a real accelerator."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.shared import Device as DeviceConfig
from anabatic.device.device import pick
from anabatic.device.ops import REFERENCE, for_device
from anabatic.device.segments import Segments


def accelerator(kind: str) -> torch.device:
    """The first device of this kind; skips, with the reason, where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        pytest.skip(f"torch {torch.__version__} sees no {kind} device here")
    return pick(DeviceConfig(type=kind)).torch  # type: ignore[arg-type]


KINDS = [pytest.param("npu", marks=pytest.mark.npu), pytest.param("cuda", marks=pytest.mark.cuda)]


def check_same(name: str, kind: str, inputs: list[torch.Tensor], *rest: object) -> None:
    """Run an operator on the device in bf16 and its reference on the host in float64; compare values and gradients."""
    device = accelerator(kind)
    there = [x.to(device, torch.bfloat16).requires_grad_() for x in inputs]
    here = [x.bfloat16().double().requires_grad_() for x in inputs]
    moved = [Segments(x.cu_seqlens, device) if isinstance(x, Segments) else x for x in rest]
    ours = getattr(for_device(kind), name)(*there, *moved)
    theirs = getattr(REFERENCE, name)(*here, *rest)
    assert ours.requires_grad, f"{name} cuts the graph"
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=3e-2, atol=3e-2)
    weight = torch.randn_like(theirs)
    mine = torch.autograd.grad((ours * weight.to(device, ours.dtype)).sum(), there)
    reference = torch.autograd.grad((theirs * weight).sum(), here)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=5e-2, atol=8e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm(kind: str) -> None:
    check_same("rms_norm", kind, [torch.randn(64, 256), torch.randn(256)], 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_swiglu(kind: str) -> None:
    check_same("swiglu", kind, [torch.randn(64, 256), torch.randn(64, 256)])


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_causal_and_isolated(kind: str) -> None:
    borders = [0, 128, 129, 400, 512]
    inputs = [torch.randn(512, heads, 64) for heads in (8, 2, 2)]
    check_same("attention", kind, inputs, Segments(borders, torch.device("cpu")), 0.125)
