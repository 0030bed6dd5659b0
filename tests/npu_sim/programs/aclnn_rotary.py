"""Call CANN's rotary embedding as compiled extensions do, and print its results beside its formula's."""

from __future__ import annotations

import ctypes
import json

import torch
import torch_npu  # noqa: F401

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 27}
SHAPE, ANGLES = (2, 3, 4, 8), (2, 1, 1, 8)
library = ctypes.CDLL("libopapi.so")
library.aclCreateTensor.restype = ctypes.c_void_p


def handle(x: torch.Tensor | None) -> ctypes.c_void_p:
    """Return an aclTensor, or a null pointer."""
    if x is None:
        return ctypes.c_void_p()
    many = ctypes.c_int64 * x.dim()
    dims, strides = many(*x.shape), many(*x.stride())
    count, data = ctypes.c_uint64(x.dim()), ctypes.c_void_p(x.data_ptr())
    made = library.aclCreateTensor(dims, count, TYPES[x.dtype], strides, ctypes.c_int64(0), 2, dims, count, data)
    return ctypes.c_void_p(made)


def call(name: str, *arguments: object) -> int:
    """Run both halves of an operator; return the first error."""
    words = [ctypes.c_int64(word) if isinstance(word, int) else handle(word) for word in arguments]  # type: ignore[arg-type]
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    code = int(getattr(library, f"{name}GetWorkspaceSize")(*words, ctypes.byref(size), ctypes.byref(executor)))
    if code:
        return code
    stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
    code = int(getattr(library, name)(ctypes.c_void_p(), size, executor, stream))
    torch.npu.synchronize()
    return code


def formula(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
    """Return the embedding, element by element: where each comes from, its partner and the partner's sign."""
    size = x.shape[-1]
    columns = []
    for place in range(size):
        own, partner, sign = place, (place + size // 2) % size, -1 if place < size // 2 else 1
        if mode == 1:
            partner, sign = place ^ 1, -1 if place % 2 == 0 else 1
        elif mode == 2:
            part = size // 4
            partner, sign = (place + part, -1) if place // part % 2 == 0 else (place - part, 1)
        elif mode == 3:
            own, partner = (2 * (number % (size // 2)) + number // (size // 2) for number in (place, partner))
        columns.append(x[..., own] * cos[..., place] + sign * x[..., partner] * sin[..., place])
    return torch.stack(columns, -1)


def compare(dtype: torch.dtype, mode: int) -> list[float]:
    """Return the largest differences of the result and of the three gradients."""
    values = [torch.randn(shape).to(dtype) for shape in (SHAPE, ANGLES, ANGLES, SHAPE)]
    x, cos, sin, dy = (value.npu() for value in values)
    leaves = [value.float().requires_grad_() for value in values[:3]]
    expected = formula(*leaves, mode)
    expected.backward(values[3].float())
    out, dx, dcos, dsin, alone = (torch.full_like(like, 99) for like in (x, x, cos, sin, x))
    codes = [
        call("aclnnRotaryPositionEmbedding", x, cos, sin, mode, out),
        call("aclnnRotaryPositionEmbeddingGrad", dy, cos, sin, x, mode, dx, dcos, dsin),
        call("aclnnRotaryPositionEmbeddingGrad", dy, cos, sin, None, mode, alone, None, None),
    ]
    if any(codes):
        raise RuntimeError(f"mode {mode}, {dtype}: {codes}")
    pairs = [(out, expected), *((got, leaf.grad) for got, leaf in zip((dx, dcos, dsin), leaves, strict=True))]
    pairs.append((alone, leaves[0].grad))
    return [float((got.cpu().float() - want).abs().max()) for got, want in pairs]


torch.manual_seed(1)
torch.npu.set_device(0)
report: dict[str, object] = {
    str(dtype): [compare(dtype, mode) for mode in range(4)] for dtype in (torch.float32, torch.bfloat16)
}
x, angle, short, half = (torch.ones(shape).npu() for shape in (SHAPE, ANGLES, (2, 1, 1, 4), (2, 1, 1, 8)))
three = torch.ones(3, 4, 8).npu()
bad = [
    (x, angle, angle, 4),
    (x, angle, short, 0),
    (x, short, short, 0),
    (x, angle, half.half(), 0),
    (three, angle, angle, 0),
]
report["refused"] = [call("aclnnRotaryPositionEmbedding", *words, x) for words in bad]
print(json.dumps(report))
