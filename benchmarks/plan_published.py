"""Published memory of Qwen fine-tuning on 910B3 beside formulas for the way it was done then.

    python benchmarks/plan_published.py [--docs]

Nine rows of ms-swift 2's NPU guide (LoRA on Qwen1.5 7B and 14B, one row a batch) and two of a guide for a 32B model
over 16 devices. Those jobs had attention that keeps its scores and logits of all tokens, so they are computed by the
formulas of the literature, in bytes, with b rows of s tokens, a heads, width h, L blocks, V words, P parameters:

    weights             2 P, under zero3 2 P / N
    activations         L s b (34 h + 5 a s)                arXiv 2205.05198, eq. 1
    with recomputation  2 L s b h + s b (34 h + 5 a s), and logits s b V (2 + 4 + 4): half, fp32, their gradient
    zero3 holds         2 bytes x (max_live_parameters + max_reuse_distance, 1e9 each in the file that ms-swift wrote)
                        and embedding and head, which are gathered whole

What a guide does not say is assumed: ms-swift's longest row has 1,000 tokens and nothing was recomputed; that is the
one number chosen to fit, and a stand-in. By ms-swift's own documents the longest row of blossom-math-zh has 565 tokens
(its table of datasets), and blocks are recomputed unless told otherwise (gradient_checkpointing of `swift sft`); the
column "documented" takes those, 3.3 GiB that the guide's own screen of npu-smi shows on idle cards, and twice
HCCL_BUFFSIZE.
The last column is what `anabatic plan` says of the same job here.

Below: the speed-up of a guide for 8 cards (Qwen2.5-0.5B, 6 rows of 512 tokens a card), and that of ms-swift's table of
hours, on paper with gradients that travel beside the backward pass, and with gradients that are waited for.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import plan_tables
from anabatic.device.table import find_chip
from anabatic.plan import cost_model, model_shape, step_time, strategy_search
from anabatic.plan.training_setup import TrainingSetup

GB = 1e9
LONGEST, DOCUMENTED = 1000, 565
IDLE, BUFFERS = strategy_search.IDLE_DEVICE_GIB["Ascend"] * 2**30, strategy_search.COMMUNICATOR_BYTES
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
    shape, _ = model_shape.get_named_shape(row.model)
    tokens, zero3 = row.rows * row.length, row.strategy == "zero3"
    weights = 2.0 * shape.params / (row.devices if zero3 else 1)
    block = tokens * (34.0 * shape.hidden + 5.0 * shape.heads * row.length)
    activations = 2.0 * shape.layers * tokens * shape.hidden + block if row.recompute else shape.layers * block
    logits = 10.0 * tokens * shape.vocab if row.recompute else 0.0
    gathered = LIVE + 4.0 * shape.embedding_params if zero3 else 0.0
    return weights + activations + logits + gathered


def documented(row: Row) -> float:
    """Bytes by the same formulas, with what the documents say."""
    told = then(row._replace(length=DOCUMENTED, recompute=True))
    return told + IDLE + BUFFERS * (row.devices > 1)


class Speed(NamedTuple):
    """A published speed-up."""

    job: str
    published: str
    model: str
    devices: int
    one: dict[str, Any]
    """What one device does."""
    each: dict[str, Any]
    """What each of them does."""


SPEEDS = (
    Speed("8 cards, full, 6 rows of 512 each", "6-7", "Qwen2.5-0.5B", 8,
          {"micro_tokens": 3072, "seq_len": 512}, {"micro_tokens": 3072, "seq_len": 512}),
    Speed("4 cards, LoRA, 16 rows a step", "4.0", "Qwen1.5-7B", 4,
          {"micro_tokens": 171, "seq_len": 171, "micro_steps": 16, "tuner": "lora", "rank": 8},
          {"micro_tokens": 171, "seq_len": 171, "micro_steps": 4, "tuner": "lora", "rank": 8}),
)  # fmt: skip


def speed_up(speed: Speed) -> tuple[float, float]:
    """Times as many tokens a second, with gradients that are waited for and with such as travel beside."""
    shape, _ = model_shape.get_named_shape(speed.model)
    chip = find_chip("Ascend910B3")
    assert chip is not None
    rates = cost_model.get_chip_rates(chip)
    one = step_time.estimate_step_time(TrainingSetup(shape, **speed.one), rates)
    many = step_time.estimate_step_time(TrainingSetup(shape, strategy="ddp", ranks=speed.devices, **speed.each), rates)
    waited = many.total_seconds - many.exposed_collectives + many.collectives
    return tuple(many.tokens / seconds / (one.tokens / one.total_seconds) for seconds in (waited, many.total_seconds))  # type: ignore[return-value]


def now(row: Row) -> float:
    """Bytes here."""
    shape, _ = model_shape.get_named_shape(row.model)
    chip = find_chip("Ascend910B3")
    assert chip is not None
    tokens = row.rows * row.length
    setup = TrainingSetup(
        shape,
        strategy=row.strategy,
        ranks=row.devices,
        tuner="lora",
        rank=row.rank,  # type: ignore[arg-type]
        recompute="full" if row.recompute else "none",
        micro_tokens=tokens,
        seq_len=row.length,
    )
    return strategy_search.estimate_strategy(replace(setup), chip).needed_bytes


def main() -> None:
    print(f"{'':34}{'published':>10}{'formula':>9}{'':>9}{'documented':>12}{'':>9}{'here':>8}   GB a device")
    cells = []
    for row in ROWS:
        job = f"{row.model}, {row.devices} x 910B3, {row.strategy}"
        found, told, here = then(row) / GB, documented(row) / GB, f"{now(row) / GB:.1f}"
        said = [f"{found:.1f}", f"{found / row.published - 1:+.0%}", f"{told:.1f}", f"{told / row.published - 1:+.0%}"]
        said = said if row.length == LONGEST else [*said[:2], "", ""]
        cells.append([job, f"{row.published:.0f}", *said, here])
        print(f"{job:34}{row.published:10.0f}{said[0]:>9}{said[1]:>9}{said[2]:>12}{said[3]:>9}{here:>8}")
    print()
    print(f"{'':51}{'published':>10}{'waited for':>12}{'beside':>8}   times as fast")
    for speed in SPEEDS:
        waited, beside = speed_up(speed)
        print(f"{speed.model + ', ' + speed.job:51}{speed.published:>10}{waited:12.1f}{beside:8.1f}")
    if "--docs" in sys.argv[1:]:
        plan_tables.write("published", ["job", "published", "formula", "", "documented", "", "here"], cells)


if __name__ == "__main__":
    main()
