"""Published throughput and scaling of large jobs on Ascend beside the plan's, with the residual of every row.

    python benchmarks/plan_scaling.py [--docs]

Three tables; no number of the plan is fitted to a row.

1. Tokens a second and device of pretraining on Atlas 900 A2 PODc (ModelLink, the older name of MindSpeed-LLM, README
   of version 1.0; mcore rows) and of MindFormers 1.3 (its table of models). Those jobs divide models by tensors and
   pipelines; the plan takes the fastest way of its own that fits, on 910B3, with 16 sequences a device and step.
2. Linearity, tokens a second and device relative to the fewest devices: GPT3-175B from 128 to 7,968 NPUs
   (MindSpeed-LLM, docs/zh/appendixes.md), Pangu Ultra 135B on 4,096 and Pangu Ultra MoE 718B on 8,192 relative to 256
   (Huawei, June 2025). Weak scaling under zero3 with the assumptions of `anabatic plan --scale`; failures are left
   out, as short tests are.
3. Utilisation: Pangu Ultra, 135 B on 8,192 NPUs, above 50 % (arXiv 2504.07866); Pangu Ultra MoE, 718 B on "6K" NPUs,
   30.0 % (arXiv 2505.04519), here on 6,144. Eight sequences of a device in a step, in one or several micro-batches;
   with the memory that a device would need, whether it has it or not.

The plan divides jobs by data (shards, and copies of them), context and tensors; not by pipelines, and experts are not
planned on devices of their own. zero3 gathers all experts of a block for every micro-batch, which no one would do with
718 B parameters on thousands of devices. That residual is shown, too.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import plan_tables
from anabatic.device.table import Chip, find_chip
from anabatic.plan import cost_model, model_shape, scale_losses, strategy_search
from anabatic.plan.shapes import config_shape
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.strategy_search import StrategyEstimate
from anabatic.plan.training_setup import TrainingSetup

SEQUENCES = 16
"""Sequences of a device in a step: an assumption, the sources do not tell."""
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "Llama-2-7B": {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                   "intermediate_size": 11008},
    "Llama-2-13B": {"vocab_size": 32000, "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
                    "intermediate_size": 13824},
    "Llama-2-70B": {"vocab_size": 32000, "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
                    "num_key_value_heads": 8, "intermediate_size": 28672},
    # two matrices in its MLP: a gated one of two thirds has as many parameters (arXiv 2002.05202, section 3)
    "GPT3-175B": {"vocab_size": 50257, "hidden_size": 12288, "num_hidden_layers": 96, "num_attention_heads": 96,
                  "intermediate_size": 32768},
    "Pangu Ultra 135B": {"vocab_size": 153376, "hidden_size": 12288, "num_hidden_layers": 94,
                         "num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 28672},
    "Pangu Ultra MoE 718B": {"model_type": "deepseek_v3", "vocab_size": 153376, "hidden_size": 7680,
                             "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432,
                             "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
                             "num_experts_per_tok": 8, "first_k_dense_replace": 3, "q_lora_rank": 1536,
                             "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip


class Throughput(NamedTuple):
    """A published row: tokens a second and device."""

    source: str
    model: str
    length: int
    devices: int
    published: float


THROUGHPUT = (
    Throughput("ModelLink", "Llama-2-7B", 4096, 8, 4672),
    Throughput("ModelLink", "Llama-2-13B", 4096, 8, 2016),
    Throughput("ModelLink", "Llama-2-70B", 4096, 32, 439),
    Throughput("ModelLink", "Llama-3.1-8B", 8192, 8, 2280),
    Throughput("ModelLink", "Llama-3.1-70B", 8192, 32, 399),
    Throughput("ModelLink", "Qwen1.5-7B", 8192, 8, 2862),
    Throughput("ModelLink", "Qwen1.5-14B", 8192, 8, 1717),
    Throughput("ModelLink", "Qwen1.5-32B", 8192, 32, 751),
    Throughput("ModelLink", "Qwen2.5-0.5B", 4096, 8, 28618),
    Throughput("ModelLink", "Qwen2.5-1.5B", 4096, 8, 15456),
    Throughput("ModelLink", "Qwen2.5-7B", 4096, 8, 4034),
    Throughput("ModelLink", "Qwen2.5-7B", 32768, 8, 2040),
    Throughput("ModelLink", "Qwen2.5-72B", 4096, 32, 368),
    Throughput("MindFormers", "Llama-2-7B", 4096, 8, 4160),
    Throughput("MindFormers", "Llama-2-13B", 4096, 8, 1691),
    Throughput("MindFormers", "Llama-3.1-8B", 8192, 8, 2703),
)
"""Qwen2's rows stand under Qwen2.5, whose sizes are the same. MindFormers names no number of devices: one server."""


class Linearity(NamedTuple):
    """A published row: tokens a second and device relative to `base` devices."""

    model: str
    base: int
    devices: int
    published: float


LINEARITY = (
    Linearity("GPT3-175B", 128, 256, 0.992),
    Linearity("GPT3-175B", 128, 512, 0.987),
    Linearity("GPT3-175B", 128, 1024, 0.979),
    Linearity("GPT3-175B", 128, 2048, 0.957),
    Linearity("GPT3-175B", 128, 4096, 0.934),
    Linearity("GPT3-175B", 128, 6144, 0.923),
    Linearity("GPT3-175B", 128, 7968, 0.938),
    Linearity("Pangu Ultra 135B", 256, 4096, 0.96),
    Linearity("Pangu Ultra MoE 718B", 256, 8192, 0.9505),
)
"""The number of devices of the rows of 4,096 and 6,144 is read from the picture's axis."""
UTILISATION = (
    ("Pangu Ultra 135B", 8192, 0.50, 1, 1),
    ("Pangu Ultra MoE 718B", 6144, 0.30, 1, 1),
    ("Pangu Ultra MoE 718B", 6144, 0.30, 1, 32),
    ("Pangu Ultra MoE 718B", 6144, 0.30, 1, 256),
    ("Pangu Ultra MoE 718B", 6144, 0.30, 8, 1),
)
"""Model, devices, published, sequences of a micro-batch, ranks that share the experts."""


def get_shape(name: str) -> DecoderShape:
    """The shape of a model."""
    if name in OTHER_SHAPES:
        return config_shape.read_shape(OTHER_SHAPES[name], name)
    return model_shape.get_named_shape(name)[0]


def get_chip() -> Chip:
    """The chip of all rows."""
    chip = find_chip("Ascend910B3")
    assert chip is not None
    return chip


def plan_fastest(shape: DecoderShape, length: int, devices: int) -> StrategyEstimate | None:
    """The fastest way that fits; None if none does."""
    setup = TrainingSetup(shape, ranks=devices, strategy="zero3", seq_len=length, micro_tokens=length)
    found = strategy_search.pick_fastest(strategy_search.list_fitting(setup, SEQUENCES * length * devices, get_chip()))
    return found[0] if found else None


class PlannedRate(NamedTuple):
    """Tokens a second and device, the fraction of the peak, and the memory of a device in bytes."""

    tokens_per_s: float
    utilisation: float
    needed_bytes: float


def estimate_rate(
    shape: DecoderShape, devices: int, assumed: scale_losses.ScaleAssumptions, sequences: int = 1, expert: int = 1
) -> PlannedRate:
    """The rate of eight sequences of each device in a step, under zero3 with full recomputation.

    Args:
        sequences: of a micro-batch.
    """
    setup = TrainingSetup(
        shape,
        ranks=devices,
        strategy="zero3",
        expert=expert,
        recompute="full",
        seq_len=4096,
        micro_tokens=4096 * sequences,
        micro_steps=8 // sequences,
    )
    estimate = strategy_search.estimate_strategy(setup, get_chip())
    rates = cost_model.get_chip_rates(get_chip())
    losses = scale_losses.estimate_losses(setup, estimate.step_time, rates, -(-devices // rates.server), assumed)
    share = estimate.step_time.total_seconds / losses.total_seconds
    return PlannedRate(
        estimate.step_time.tokens / losses.total_seconds / devices,
        estimate.compute_mfu(get_chip()) * share,
        estimate.needed_bytes,
    )


def list_throughput() -> list[list[str]]:
    """The cells of the first table."""
    cells = []
    for row in THROUGHPUT:
        best = plan_fastest(get_shape(row.model), row.length, row.devices)
        found = best.tokens_per_s / row.devices if best else 0.0
        way = f"{best.setup.strategy}, recompute {best.setup.recompute}" if best else "does not fit"
        residual = f"{found / row.published - 1:+.0%}" if best else ""
        job = f"{row.source}, {row.model}, {row.length:,} tokens, {row.devices} NPUs"
        cells.append([job, f"{row.published:,.0f}", f"{found:,.0f}", residual, way])
    return cells


def list_linearity() -> list[list[str]]:
    """The cells of the second table."""
    assumed = replace(scale_losses.ScaleAssumptions(), failure_hours=0.0)
    cells = []
    for row in LINEARITY:
        shape = get_shape(row.model)
        base, many = (estimate_rate(shape, devices, assumed).tokens_per_s for devices in (row.base, row.devices))
        job = f"{row.model}, {row.devices:,} to {row.base} NPUs"
        cells.append([job, f"{row.published:.3f}", f"{many / base:.3f}", f"{100 * (many / base - row.published):+.1f}"])
    return cells


def list_utilisation() -> list[list[str]]:
    """The cells of the third table."""
    cells = []
    for model, devices, published, sequences, expert in UTILISATION:
        assumed = scale_losses.ScaleAssumptions()
        found = estimate_rate(get_shape(model), devices, assumed, sequences, expert)
        shared = f", expert {expert}" if expert > 1 else ""
        job = f"{model}, {devices:,} NPUs, micro-batch {4096 * sequences:,}{shared}"
        points = f"{100 * (found.utilisation - published):+.0f}"
        cells.append([job, f"{published:.0%}", f"{found.utilisation:.0%}", points, f"{found.needed_bytes / 2**30:.1f}"])
    return cells


def main() -> None:
    tables = {
        "throughput": (["job", "published", "planned", "", "way"], list_throughput()),
        "linearity": (["job", "published", "planned", "points"], list_linearity()),
        "utilisation": (["job", "published", "planned", "points", "GiB of a device"], list_utilisation()),
    }
    for name, (head, cells) in tables.items():
        print(plan_tables.table(head, cells), end="\n\n")
        if "--docs" in sys.argv[1:]:
            plan_tables.write(name, head, cells)


if __name__ == "__main__":
    main()
