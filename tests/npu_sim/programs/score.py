"""Likelihoods of choices on a simulated NPU and on the CPU; prints how many batches there were."""

from __future__ import annotations

import random

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.device.device import select_device
from anabatic.evals.likelihood import compute_likelihoods
from anabatic.evals.prefix_trees import ScoredText, batch_trees, build_trees
from anabatic_testing.random_models import build_random_model

BATCH = 300


def main() -> None:
    rng = random.Random(0)
    texts = []
    for _ in range(40):
        question = [rng.randrange(1, 60) for _ in range(rng.randrange(10, 30))]
        texts += [ScoredText([*question, *rng.choices(range(1, 60), k=rng.randrange(1, 6))], 1) for _ in range(4)]
    found = []
    for kind in ("npu", "cpu"):
        device = select_device(DeviceConfig(type=kind, dtype="fp32"))
        model = build_random_model(60).to(device.torch_device)
        told: dict[int, float] = {}
        for part in compute_likelihoods(model, device, texts, BATCH, "scoring"):
            told |= {number: one.logprob for number, one in part.items()}
        found.append([told[number] for number in range(len(texts))])
    assert all(abs(a - b) < 1e-4 for a, b in zip(*found, strict=True)), "not the CPU's"
    print(f"batches {len(list(batch_trees(build_trees(texts, 32, BATCH), BATCH)))}")
    print("same")


main()
