"""How long does the block of experts take, compared with transformers' own ways of computing it?

    python benchmarks/moe.py [--tokens N] [--hidden N] [--inner N] [--experts N] [--chosen N] [--rounds N] [--skew X]

Forward and backward pass of one Qwen3-MoE block (router and experts) in fp32 on one thread, CPU seconds, in turns:
`eager` is transformers' loop over experts, `grouped_mm` its default since 5.0, `anabatic` the fused layer. `frozen`:
the experts get no gradient, as under an adapter. `skew` shifts the router towards the first experts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from option_types import positive_int, positive_number

WAYS = ("eager", "grouped_mm", "anabatic")


def build_blocks(options: argparse.Namespace) -> dict[str, Any]:
    """Return a block with the same weights for each way."""
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from anabatic.device.ops import get_device_ops
    from anabatic.models import fused_ops

    blocks: dict[str, Any] = {}
    for way in WAYS:
        config = Qwen3MoeConfig(
            hidden_size=options.hidden,
            moe_intermediate_size=options.inner,
            num_experts=options.experts,
            num_experts_per_tok=options.chosen,
        )
        config._experts_implementation = "eager" if way == "anabatic" else way
        torch.manual_seed(0)
        block = Qwen3MoeSparseMoeBlock(config)
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        if way == "anabatic":
            assert fused_ops.install_fused_ops(block, get_device_ops("cpu")).fused["expert layers"] == 1
        blocks[way] = block
    return blocks


def time_step(block: Any, x: Any, weights: Any) -> tuple[float, Any]:
    """Return the CPU seconds of a forward and a backward pass, and the gradient of the input."""
    block.zero_grad(set_to_none=True)
    x.grad = None
    start = time.process_time()
    (block(x) * weights).sum().backward()
    return time.process_time() - start, x.grad


def measure(options: argparse.Namespace, frozen: bool) -> None:
    """Print the median of each way and its ratio to ours."""
    import torch

    blocks = build_blocks(options)
    torch.manual_seed(1)
    x = torch.randn(1, options.tokens, options.hidden)
    if options.skew is not None:
        x = x + options.skew * blocks["eager"].gate.weight[: options.chosen].sum(0) / 0.02
    x = x.detach().requires_grad_()
    weights = torch.randn(1, options.tokens, options.hidden)
    for block in blocks.values():
        block.experts.requires_grad_(not frozen)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    gradients = {}
    for number in range(options.rounds + 1):
        for way, block in blocks.items():
            taken, gradients[way] = time_step(block, x, weights)
            if number:  # the first is to warm up
                times[way].append(taken)
    for way in WAYS[:2]:
        torch.testing.assert_close(gradients["anabatic"], gradients[way], rtol=1e-3, atol=1e-4)
    _, _, index = blocks["eager"].gate(x[0].detach())
    counts = index.flatten().bincount(minlength=options.experts)
    print(
        f"experts {'frozen' if frozen else 'trained'}; busiest expert {counts.max()}, mean {counts.float().mean():.0f}"
    )
    ours = times["anabatic"]
    for way, found in times.items():
        ratios = sorted(a / b for a, b in zip(found, ours, strict=True))
        print(
            f"  {way:10} {statistics.median(found):8.3f} s   {statistics.median(ratios):6.2f}x"
            f" ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 512, "hidden": 256, "inner": 96, "experts": 128, "chosen": 8, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default)
    parser.add_argument("--skew", type=positive_number)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    print(
        f"{options.tokens} tokens, width {options.hidden}, {options.experts} experts of {options.inner},"
        f" {options.chosen} per token"
    )
    for frozen in (False, True):
        measure(options, frozen)


if __name__ == "__main__":
    main()
