"""Layers of the gated delta rule: a packed batch of ours beside transformers' own layer, document by document.

    python benchmarks/delta_rule.py [--documents 16] [--length 256] [--rounds 5]

One layer of Qwen3.5's shape at a quarter of its width, forward and backward, in turns in one process: medians of the
CPU time, and the largest difference of the outputs and of the gradients relative to their largest value.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from anabatic.device.attention import PackedSegments
from anabatic.models.linear_attention import delta_net
from option_types import positive_int


def measure(run: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    """Return CPU seconds and the results."""
    began = time.process_time()
    results = run()
    return time.process_time() - began, results


def main() -> None:
    """Measure, and print the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=positive_int, default=16)
    parser.add_argument("--length", type=positive_int, default=256, help="of the longest; the shortest has half of it")
    parser.add_argument("--rounds", type=positive_int, default=5)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        hidden_size=512,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    layer = transformers.AutoModelForCausalLM.from_config(config).model.layers[0].linear_attn
    lengths = [asked.length - asked.length // 2 * number // asked.documents for number in range(asked.documents)]
    x = torch.randn(1, sum(lengths), config.hidden_size, requires_grad=True)
    up = torch.randn_like(x)
    segments = PackedSegments([0, *itertools.accumulate(lengths)], torch.device("cpu"))

    def packed() -> list[Tensor]:
        out = layer(x, segments=segments)
        return [out.detach(), torch.autograd.grad((out * up).sum(), x)[0]]

    def by_document() -> list[Tensor]:
        out = torch.cat([layer(part) for part in x.split(lengths, dim=1)], dim=1)
        return [out.detach(), torch.autograd.grad((out * up).sum(), x)[0]]

    delta_net.install_delta_layers(layer)
    times: dict[str, list[float]] = {"packed": [], "by document": []}
    for turn in range(asked.rounds + 1):
        ours, results = measure(packed)
        theirs, expected = measure(by_document)
        if turn:  # the first allocates
            times["packed"].append(ours)
            times["by document"].append(theirs)
    differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(results, expected, strict=True)]
    for name, seconds in times.items():
        print(f"{name}: {1e3 * statistics.median(seconds):.0f} ms of CPU time, {sum(lengths)} tokens")
    ratio = statistics.median(b / a for a, b in zip(times["packed"], times["by document"], strict=True))
    print(f"transformers' layer, document by document: {ratio:.2f}x the CPU time of ours")
    print(f"largest difference: outputs {differences[0]:.1e}, gradients {differences[1]:.1e}")


if __name__ == "__main__":
    main()
