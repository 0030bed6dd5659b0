"""Products of 16-bit numbers against double precision: forward, gradients, in-place and out= forms, a graph."""

import itertools
import json

import torch
import torch.nn.functional as F

EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance of neighbouring numbers, relative: what one rounding costs."""


def draw(dtype, *shape):
    return torch.randn(*shape).to(dtype)


def error(found, exact, dtype):
    """The largest error in roundings of the largest number."""
    assert found.dtype == dtype and found.shape == exact.shape, (found.dtype, found.shape, exact.shape)
    return ((found.cpu().double() - exact).abs().max() / exact.abs().max() / EPSILON[dtype]).item()


def check_products(dtype):
    a, b, bias = draw(dtype, 33, 80), draw(dtype, 48, 80), draw(dtype, 48)
    left, right = draw(dtype, 4, 9, 40), draw(dtype, 4, 40, 17)
    base = draw(dtype, 4, 9, 17)
    image, filters = draw(dtype, 2, 3, 12, 12), draw(dtype, 5, 3, 3, 3)
    into = torch.empty(0, dtype=dtype, device="npu")
    torch.mm(a.npu(), b.npu().t(), out=into)
    inside = base.npu()
    kept = inside.data_ptr()
    inside.baddbmm_(left.npu(), right.npu(), beta=0.5, alpha=2)
    assert inside.data_ptr() == kept
    double = [tensor.double() for tensor in (a, b, bias, left, right, base, image, filters)]
    a64, b64, bias64, left64, right64, base64, image64, filters64 = double
    one, two = a[:1], a[:2]
    found = {
        "mm": (a.npu() @ b.npu().t(), a64 @ b64.t()),
        "mm.out": (into, a64 @ b64.t()),
        "one row": (one.npu() @ b.npu().t(), a64[:1] @ b64.t()),
        "two rows": (two.npu() @ b.npu().t(), a64[:2] @ b64.t()),
        "linear": (F.linear(a.npu(), b.npu(), bias.npu()), F.linear(a64, b64, bias64)),
        "bmm": (torch.bmm(left.npu(), right.npu()), left64 @ right64),
        "baddbmm_": (inside, 0.5 * base64 + 2 * (left64 @ right64)),
        "conv2d": (F.conv2d(image.npu(), filters.npu()), F.conv2d(image64, filters64)),
        "no elements": (
            torch.cat([a[:0].npu() @ b.npu().t(), torch.ones(1, 48, dtype=dtype).npu()]),
            torch.ones(1, 48).double(),
        ),
    }
    with torch.inference_mode():
        found["matmul"] = (torch.matmul(left.npu(), right.npu()), left64 @ right64)
    return {name: error(npu, exact, dtype) for name, (npu, exact) in found.items()}


def check_gradients(dtype):
    shapes = {
        "linear": ((33, 80), (48, 80)),
        "attention": ((2, 4, 24, 16),) * 3,
        "conv2d": ((2, 3, 12, 12), (5, 3, 3, 3)),
    }
    calls = {
        "linear": F.linear,
        "attention": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "conv2d": F.conv2d,
    }
    found = {}
    for name, call in calls.items():
        values = [draw(dtype, *shape) for shape in shapes[name]]
        npu = [value.npu().requires_grad_() for value in values]
        exact = [value.double().requires_grad_() for value in values]
        out = call(*npu)
        weights = draw(dtype, *out.shape)
        (out * weights.npu()).sum().backward()
        (call(*exact) * weights.double()).sum().backward()
        found[f"{name} gradient"] = max(error(a.grad, b.grad, dtype) for a, b in zip(npu, exact, strict=True))
    return found


def check_memory():
    """Copies in fp32 are the simulation's: the device holds the result alone."""
    a, b = draw(torch.bfloat16, 512, 512).npu(), draw(torch.bfloat16, 512, 512).npu()
    torch.npu.synchronize()
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.memory_allocated()
    result = a @ b
    return (torch.npu.max_memory_allocated() - before) / (result.numel() * 2)


def check_graph():
    a, b = draw(torch.bfloat16, 64, 96).npu(), draw(torch.bfloat16, 96, 32).npu()
    eager = a @ b
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        captured = a @ b
    graph.replay()
    torch.npu.synchronize()
    return torch.equal(eager.cpu(), captured.cpu())


def check_refusals():
    """Differing formats are an error, as without the copies."""
    refused = []
    for left, right in itertools.permutations((torch.bfloat16, torch.float16, torch.float32), 2):
        try:
            draw(left, 4, 4).npu() @ draw(right, 4, 4).npu()
        except RuntimeError as raised:
            refused.append("same dtype" in str(raised))
    return refused


torch.manual_seed(0)
results = {str(dtype): check_products(dtype) | check_gradients(dtype) for dtype in EPSILON}
results |= {"memory": check_memory(), "graph": check_graph(), "refused": check_refusals()}
print(json.dumps(results))
