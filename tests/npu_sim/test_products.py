"""Products of 16-bit numbers: sums in fp32, one rounding, no memory of the device for the copies."""

from __future__ import annotations

import json

from npu_sim.conftest import PROGRAMS, Sim


def test_products_of_16_bit_numbers(sim: Sim) -> None:
    done = sim.command("python", str(PROGRAMS / "products.py"))
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    for dtype in ("torch.bfloat16", "torch.float16"):
        for name, roundings in told[dtype].items():
            assert roundings <= 1.01, (dtype, name, roundings)
    assert told["memory"] < 1.01  # the allocator adds 32 bytes, rounded up to 512
    assert told["slower"] < 10
    assert told["graph"] is True
    assert told["refused"] == [True] * 6
