"""Published memory of Qwen fine-tuning on 910B3 beside formulas for the way it was done then.

    python benchmarks/plan_published.py

Nine rows of ms-swift 2's NPU guide (LoRA on Qwen1.5 7B and 14B, one row a batch) and two of a guide for a 32B model
over 16 devices. Those jobs had attention that keeps its scores and logits of all tokens, so they are computed by the
formulas of the literature, in bytes, with b rows of s tokens, a heads, width h, L blocks, V words, P parameters:

    weights             2 P, under zero3 2 P / N
    activations         L s b (34 h + 5 a s)                arXiv 2205.05198, eq. 1
    with recomputation  2 L s b h + s b (34 h + 5 a s), and logits s b V (2 + 4 + 4): half, fp32, their gradient
    zero3 holds         2 bytes x (max_live_parameters + max_reuse_distance, 1e9 each in the file that ms-swift wrote)
                        and embedding and head, which are gathered whole

What a guide does not say is assumed: ms-swift's longest row has 1,000 tokens (blossom-math) and nothing was recomputed;
that is the one number chosen to fit. The last column is what `anabatic plan` says of the same job here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from anabatic.device.table import find_chip
from anabatic.plan import fit, known
from anabatic.plan.setup import Setup

GB = 1e9
LONGEST = 1000
LIVE = 2 * 2e9


class Row(NamedTuple):
    """A published row: GB on each device."""

    model: str
    devices: int
    strategy: str
    published: float
    rows: int = 1
    length: int = LONGEST
    recompute: bool = False
    rank: int = 8


ROWS = (
    Row("Qwen1.5-7B", 1, "single", 28),
    Row("Qwen1.5-7B", 4, "ddp", 22),
    Row("Qwen1.5-7B", 4, "zero2", 28),
    Row("Qwen1.5-7B", 4, "zero3", 22),
    Row("Qwen1.5-7B", 8, "ddp", 22),
    Row("Qwen1.5-14B", 1, "single", 45),
    Row("Qwen1.5-14B", 8, "ddp", 51),
    Row("Qwen1.5-14B", 8, "zero2", 49),
    Row("Qwen1.5-14B", 8, "zero3", 31),
    Row("Qwen1.5-32B", 16, "zero3", 50, 8, 2048, True, 64),
    Row("Qwen1.5-32B", 16, "zero3", 55, 4, 4096, True, 64),
)


def then(row: Row) -> float:
    """Bytes by the formulas above."""
    shape, _ = known.named(row.model)
    tokens, zero3 = row.rows * row.length, row.strategy == "zero3"
    weights = 2.0 * shape.params / (row.devices if zero3 else 1)
    block = tokens * (34.0 * shape.hidden + 5.0 * shape.heads * row.length)
    activations = 2.0 * shape.layers * tokens * shape.hidden + block if row.recompute else shape.layers * block
    logits = 10.0 * tokens * shape.vocab if row.recompute else 0.0
    gathered = LIVE + 4.0 * shape.embedding if zero3 else 0.0
    return weights + activations + logits + gathered


def now(row: Row) -> float:
    """Bytes here."""
    shape, _ = known.named(row.model)
    chip = find_chip("Ascend910B3")
    assert chip is not None
    tokens = row.rows * row.length
    setup = Setup(
        shape, strategy=row.strategy, ranks=row.devices, tuner="lora", rank=row.rank,  # type: ignore[arg-type]
        recompute="full" if row.recompute else "none", micro_tokens=tokens, seq_len=row.length,
    )  # fmt: skip
    return fit.judge(replace(setup), chip).needs


def main() -> None:
    print(f"{'':34}{'published':>10}{'formula':>9}{'':>9}{'here':>8}   GB a device")
    for row in ROWS:
        job = f"{row.model}, {row.devices} x 910B3, {row.strategy}"
        found = then(row) / GB
        print(f"{job:34}{row.published:10.0f}{found:9.1f}{found / row.published - 1:+9.0%}{now(row) / GB:8.1f}")


if __name__ == "__main__":
    main()
