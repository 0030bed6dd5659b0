"""The device's own operators against the plain references, forward and gradient, on a real accelerator."""

from __future__ import annotations

import pytest
import torch

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.device.attention import AttentionOptions, PackedSegments
from anabatic.device.device import select_device
from anabatic.device.experts import compute_expert_ends
from anabatic.device.ops import REFERENCE_OPS, get_device_ops, get_plain_sinks_reason


def accelerator(kind: str) -> torch.device:
    """The first device of this kind; skips, with the reason, where there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind:
        pytest.skip(f"torch {torch.__version__} sees no {kind} device here")
    return select_device(DeviceConfig(type=kind)).torch_device  # type: ignore[arg-type]


KINDS = [pytest.param("npu", marks=pytest.mark.npu), pytest.param("cuda", marks=pytest.mark.cuda)]


def check_same(name: str, kind: str, inputs: list[torch.Tensor], *rest: object) -> None:
    """Run an operator on the device in bf16 and its reference on the host in float64; compare values and gradients."""
    device = accelerator(kind)
    there = [x.to(device, torch.bfloat16).requires_grad_() for x in inputs]
    here = [x.bfloat16().double().requires_grad_() for x in inputs]
    moved = [PackedSegments(x.cu_seqlens, device, x.is_causal) if isinstance(x, PackedSegments) else x for x in rest]
    ours = getattr(get_device_ops(kind), name)(*there, *moved)
    theirs = getattr(REFERENCE_OPS, name)(*here, *rest)
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
def test_swiglu_of_one_tensor(kind: str) -> None:
    check_same("swiglu_joint", kind, [torch.randn(64, 512)])


@pytest.mark.parametrize("kind", KINDS)
def test_rms_norm_takes_a_weight_in_fp32(kind: str) -> None:
    device = accelerator(kind)
    x, weight = torch.randn(64, 256).bfloat16(), 1 + 0.1 * torch.randn(256)
    there = weight.to(device).requires_grad_()
    here = weight.double().requires_grad_()
    ours = get_device_ops(kind).rms_norm(x.to(device), there, 1e-6)
    theirs = REFERENCE_OPS.rms_norm(x.double(), here, 1e-6)
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=2e-2, atol=2e-2)
    (mine,), (reference,) = torch.autograd.grad(ours.sum(), there), torch.autograd.grad(theirs.sum(), here)
    torch.testing.assert_close(mine.cpu().double(), reference, rtol=5e-2, atol=0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rotary", "rotary_neighbours"])
@pytest.mark.parametrize("turned", [True, False])
def test_rotary(kind: str, name: str, turned: bool) -> None:
    """Models make `[B, S, N, D]` and turn it; both orders in memory are right."""
    device = accelerator(kind)
    x = torch.randn(1, 40, 4, 64).bfloat16()
    angles = torch.randn(1, 1, 40, 32).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    there = x.to(device).requires_grad_()
    here = x.double().requires_grad_()
    wide = there.transpose(1, 2) if turned else there.transpose(1, 2).contiguous()
    ours = getattr(get_device_ops(kind), name)(wide, cos.to(device, torch.bfloat16), sin.to(device, torch.bfloat16))
    theirs = getattr(REFERENCE_OPS, name)(here.transpose(1, 2), cos.double(), sin.double())
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=3e-2, atol=3e-2)
    weight = torch.randn_like(theirs)
    (mine,) = torch.autograd.grad((ours * weight.to(device, ours.dtype)).sum(), there)
    (reference,) = torch.autograd.grad((theirs * weight).sum(), here)
    torch.testing.assert_close(mine.cpu().double(), reference, rtol=5e-2, atol=8e-2)


SEGMENTS = PackedSegments([0, 128, 129, 400, 512], torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize("value_size", [64, 32])
def test_attention_is_causal_and_isolated(kind: str, window: int | None, value_size: int) -> None:
    inputs = [torch.randn(512, heads, size) for heads, size in ((8, 64), (2, 64), (2, value_size))]
    check_same("attention", kind, inputs, SEGMENTS, AttentionOptions(0.125, window))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 50])
def test_attention_both_ways_is_isolated(kind: str, window: int | None) -> None:
    inputs = [torch.randn(512, heads, 64) for heads in (8, 2, 2)]
    both_ways = PackedSegments([0, 128, 129, 238, 400, 512], torch.device("cpu"), causal=False)
    check_same("attention", kind, inputs, both_ways, AttentionOptions(0.125, window))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("softcap", "sinks"), [(5.0, False), (None, True), (5.0, True)])
def test_attention_with_capped_scores_and_sinks(
    kind: str, window: int | None, softcap: float | None, sinks: bool
) -> None:
    device = accelerator(kind)
    values = [torch.randn(512, heads, 64).bfloat16() for heads in (8, 2, 2)] + [torch.randn(8).bfloat16()]
    there, here = ([x.to(*to).requires_grad_() for x in values] for to in ((device,), (torch.float64,)))
    outs = []
    for ops, where, (q, k, v, sink) in (
        (get_device_ops(kind), device, there),
        (REFERENCE_OPS, torch.device("cpu"), here),
    ):
        scores = AttentionOptions(0.125, window, softcap, sink if sinks else None)
        outs.append(ops.attention(q, k, v, PackedSegments(SEGMENTS.cu_seqlens, where), scores))
    ours, theirs = outs
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=3e-2, atol=3e-2)
    weight = torch.randn_like(theirs)
    used = 4 if sinks else 3
    mine = torch.autograd.grad((ours * weight.to(device, ours.dtype)).sum(), there[:used])
    reference = torch.autograd.grad((theirs * weight).sum(), here[:used])
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=5e-2, atol=0.15)


@pytest.mark.npu
@pytest.mark.parametrize("borders", [[0, 256], [0, 100, 256]], ids=["one document", "two documents"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_are_in_one_operator(borders: list[int], window: int | None, dtype: torch.dtype) -> None:
    """Output and the gradients of sinks, queries, keys and values, against plain operators in float64."""
    device = accelerator("npu")
    assert get_plain_sinks_reason("npu") == ""
    values = [torch.randn(256, heads, 64).to(dtype) for heads in (8, 2, 2)] + [torch.linspace(-2, 3, 8).to(dtype)]
    there, here = ([x.to(*to).requires_grad_() for x in values] for to in ((device,), (torch.float64,)))
    outs = [
        ops.attention(q, k, v, PackedSegments(borders, sinks.device), AttentionOptions(0.125, window, sinks=sinks))
        for ops, (q, k, v, sinks) in ((get_device_ops("npu"), there), (REFERENCE_OPS, here))
    ]
    assert type(outs[0].grad_fn).__name__.startswith("NpuFusionAttention")
    close = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    torch.testing.assert_close(outs[0].cpu().double(), outs[1], **close)
    weight = torch.randn_like(outs[1])
    mine = torch.autograd.grad((outs[0] * weight.to(device, dtype)).sum(), there)
    reference = torch.autograd.grad((outs[1] * weight).sum(), here)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, **close)
    assert mine[3].dtype == dtype and float(reference[3].abs().min()) > 1e-2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", ["in-out", "out-in"])
@pytest.mark.parametrize("idle", [False, True])
def test_experts(kind: str, stored: str, idle: bool) -> None:
    """Tokens to their experts, a product for each, and back; an expert may have no token."""
    device = accelerator(kind)
    index = torch.stack([torch.randperm(3 if idle else 4)[:2] for _ in range(50)])
    x, probs = torch.randn(50, 32).bfloat16(), torch.rand(50, 2).bfloat16()
    weight = (torch.randn(4, 32, 48) if stored == "in-out" else torch.randn(4, 48, 32)).bfloat16() / 6
    there, here = ([v.to(*to).requires_grad_() for v in (x, weight, probs)] for to in ((device,), (torch.float64,)))
    outs = []
    for ops, where, (rows, w, p) in ((get_device_ops(kind), device, there), (REFERENCE_OPS, torch.device("cpu"), here)):
        chosen = index.to(where)
        sorted_rows, places = ops.permute(rows, chosen)
        product = ops.grouped(
            sorted_rows, w if stored == "in-out" else w.transpose(1, 2), compute_expert_ends(chosen, 4)
        )
        outs.append(ops.unpermute(product, places, p))
    ours, theirs = outs
    torch.testing.assert_close(ours.cpu().double(), theirs, rtol=3e-2, atol=3e-2)
    up = torch.randn_like(theirs)
    mine = torch.autograd.grad((ours * up.to(device, ours.dtype)).sum(), there)
    reference = torch.autograd.grad((theirs * up).sum(), here)
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=5e-2, atol=0.15)
