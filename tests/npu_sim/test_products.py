"""Products of 16-bit numbers: sums in fp32, one rounding, no memory of the device for the copies."""

from __future__ import annotations

import json

from npu_sim.conftest import PROGRAMS, Sim

ROUNDINGS = {"attention gradient": 4.0}
"""Numbers that a kernel stores in the format on the way; each costs one rounding, half a unit in the last place.

Products keep their sums in fp32 and round the result alone. The gradient of attention rounds the probabilities, their
gradient, the output that it is corrected by, and its result; whether the product in between does, depends on the
processor's units (1.0 with AVX2, 1.16 with AVX512-FP16).
"""
ALMOST_ONE = 1.01
"""A result in the middle of two numbers may be rounded to either, as its sum in fp32 says."""


def test_products_of_16_bit_numbers(sim: Sim) -> None:
    done = sim.command("python", str(PROGRAMS / "products.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for dtype in ("torch.bfloat16", "torch.float16"):
        for name, roundings in told[dtype].items():
            assert roundings <= ROUNDINGS.get(name, ALMOST_ONE), (dtype, name, roundings)
    assert told["memory"] < 1.01  # the allocator adds 32 bytes, rounded up to 512
    assert told["graph"] is True
    assert told["refused"] == [True] * 6
