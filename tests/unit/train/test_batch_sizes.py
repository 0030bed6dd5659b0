"""The tokens of a step that follow from the length of a run."""

from __future__ import annotations

import math

import pytest

from anabatic.config.sections.common import BatchSettings, DerivedSizes, DeviceSettings
from anabatic.device.device import select_device
from anabatic.parallel.mesh import RankGroup
from anabatic.plan import model_shape
from anabatic.plan.pipeline_stages import estimate_bubble
from anabatic.plan.training_setup import TrainingSetup
from anabatic.train import sizing


def batch_of(tokens: float, min_steps: int, ranks: int = 1) -> tuple[int, str]:
    plan = DerivedSizes()
    device = select_device(DeviceSettings(type="cpu"))
    micro, batch, micro_steps = sizing.resolve_batch_sizes(
        plan, BatchSettings(seq_len=256), tokens, None, device, RankGroup(0, ranks), min_steps
    )
    assert micro * micro_steps * ranks == batch
    return batch, plan.reasons["global_batch_tokens"]


@pytest.mark.parametrize("tokens", [4e5, 1.6e6, 1.2e7])
def test_a_short_run_of_a_new_model_has_enough_steps(tokens: float) -> None:
    batch, reason = batch_of(tokens, sizing.MIN_STEPS_OF_NEW_MODEL)
    assert batch <= tokens / 512 < 2 * batch
    assert reason.startswith("at least 512 steps in ")
    law, reason = batch_of(tokens, 1)
    assert law == 2 ** round(math.log2(2**19 * (tokens / 1.3e9) ** 0.383)) > batch
    assert reason.endswith("tokens to the power 0.383")


@pytest.mark.parametrize(("stages", "chunks", "least"), [(1, 1, 1), (2, 1, 4), (4, 1, 12), (4, 3, 4)])
def test_micro_batches_fill_a_pipeline(stages: int, chunks: int, least: int) -> None:
    plan, device = DerivedSizes(), select_device(DeviceSettings(type="cpu"))
    shape, _ = model_shape.get_named_shape("Qwen/Qwen2.5-0.5B")
    setup = TrainingSetup(shape, pipeline=stages, pipeline_chunks=chunks, tuner="lora")
    batch = BatchSettings(seq_len=64, global_batch_tokens=4096)
    micro, _, micro_steps = sizing.resolve_batch_sizes(plan, batch, 1e6, setup, device, RankGroup(0, 1))
    assert micro_steps >= least and (stages == 1 or estimate_bubble(stages, chunks, micro_steps) <= 0.2)
    assert micro == 2 ** int(math.log2(micro))
    assert ("fill the pipeline" in plan.reasons["micro_batch_tokens"]) == (stages > 1)
    short = BatchSettings(seq_len=64, global_batch_tokens=128)  # a segment each, whatever the stages
    assert sizing.resolve_batch_sizes(plan, short, 1e6, setup, device, RankGroup(0, 1))[0] >= 64


def test_a_long_run_follows_the_power_law_and_a_tiny_one_has_a_segment_a_step() -> None:
    batch, reason = batch_of(1.3e9, sizing.MIN_STEPS_OF_NEW_MODEL)
    assert batch == 2**19 and "0.383" in reason
    assert batch_of(1000, sizing.MIN_STEPS_OF_NEW_MODEL)[0] == 256
    assert batch_of(1000, sizing.MIN_STEPS_OF_NEW_MODEL, ranks=2)[0] == 512
