"""A pipeline in the plan: its stages are the model, and its time and memory those of the schedule, played here event by
event."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabatic.core.errors import ConfigError
from anabatic.device.table import find_chip
from anabatic.plan import cost_model, model_shape
from anabatic.plan.job_rules import find_shape_problems, raise_problems
from anabatic.plan.memory_estimate import estimate_peak_memory, get_persistent_bytes
from anabatic.plan.pipeline_stages import count_passes_in_flight, list_stages, split_layers
from anabatic.plan.step_time import estimate_step_time
from anabatic.plan.strategy_search import choose_micro_batch, estimate_strategy, list_strategies
from anabatic.plan.training_setup import TrainingSetup

CHIP = find_chip("Ascend910B3")
assert CHIP is not None
RATES = cost_model.get_chip_rates(CHIP)
SHAPE, _ = model_shape.get_named_shape("Qwen/Qwen3-8B")
TIED = replace(SHAPE, is_tied=True)
MIXTURE, _ = model_shape.get_named_shape("deepseek-ai/DeepSeek-V3")
"""Three dense blocks, then 58 of experts."""


def play(seconds: list[float], micro_batches: int) -> tuple[float, list[int]]:
    """The end of a step of 1F1B, and the most micro-batches in flight on each stage.

    A pass starts when its stage is free and its input there; a third of a micro-batch's time is its forward pass.
    """
    stages = len(seconds)
    order: list[list[tuple[bool, int]]] = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micro_batches)
        passes = [(True, index) for index in range(ahead)]
        for index in range(micro_batches - ahead):
            passes += [(True, ahead + index), (False, index)]
        order.append(passes + [(False, index) for index in range(micro_batches - ahead, micro_batches)])
    ends: dict[tuple[int, bool, int], float] = {}
    free, most, alive = [0.0] * stages, [0] * stages, [0] * stages
    while any(order):
        for stage in range(stages):
            while order[stage]:
                is_forward, index = order[stage][0]
                neighbour = stage - 1 if is_forward else stage + 1
                inputs = [(neighbour, is_forward, index)] if 0 <= neighbour < stages else []
                if any(one not in ends for one in inputs):
                    break
                start = max([free[stage], *(ends[one] for one in inputs)])
                free[stage] = ends[stage, is_forward, index] = start + seconds[stage] * (1 if is_forward else 2) / 3
                alive[stage] += 1 if is_forward else -1
                most[stage] = max(most[stage], alive[stage])
                order[stage].pop(0)
    return max(free), most


@pytest.mark.parametrize("shape", [SHAPE, TIED, MIXTURE], ids=["untied", "tied", "mixture"])
@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("tuner", ["full", "lora"])
def test_stages_together_are_the_model(shape: model_shape.DecoderShape, stages: int, tuner: str) -> None:
    whole = TrainingSetup(shape, pipeline=stages, tuner=tuner)  # type: ignore[arg-type]
    parts = list_stages(whole)
    twice = shape.embedding_params * shape.is_tied  # on the first and on the last stage
    assert sum(part.shape.layers for part in parts) == shape.layers
    assert sum(part.params for part in parts) == whole.params + twice
    assert sum(part.trained_params for part in parts) == whole.trained_params + twice * (tuner == "full")
    assert [part.has_lm_head for part in parts] == [False] * (stages - 1) + [True]
    if not shape.kinds:
        assert parts[-1].shape.layers <= parts[0].shape.layers  # it has the head besides
    assert [kind for part in parts for kind in part.shape.order] == list(shape.order)


@pytest.mark.parametrize(("stages", "micro_steps"), [(2, 1), (2, 8), (4, 2), (4, 4), (4, 32), (8, 3)])
def test_micro_batches_in_flight(stages: int, micro_steps: int) -> None:
    counts = [count_passes_in_flight(stages, 1, micro_steps, rank) for rank in range(stages)]
    assert counts == play([3.0] * stages, micro_steps)[1]


@pytest.mark.parametrize(("stages", "micro_steps"), [(2, 1), (2, 4), (4, 4), (4, 32), (8, 16)])
def test_the_time_of_a_step_is_that_of_the_schedule(stages: int, micro_steps: int) -> None:
    setup = TrainingSetup(SHAPE, pipeline=stages, micro_steps=micro_steps, recompute="full", micro_tokens=8192)
    each = [estimate_step_time(part, RATES) for part in list_stages(setup)]
    busy = [(time.compute - time.update) / micro_steps for time in each]
    played, _ = play(busy, micro_steps)
    found = estimate_step_time(setup, RATES)
    together = found.total_seconds - found.exposed_collectives - found.update
    assert played * (1 - 1e-9) <= together <= played + max(busy) - min(busy) + 1e-9  # exact if all are alike
    assert found.flops == pytest.approx(estimate_step_time(replace(setup, pipeline=1), RATES).flops)
    assert found.exposed_collectives > 0 < found.waiting


def test_chunks_wait_less_and_keep_more() -> None:
    whole = TrainingSetup(SHAPE, pipeline=4, micro_steps=8, micro_tokens=8192)
    chunked = replace(whole, pipeline_chunks=2)
    assert sum(part.shape.layers for part in list_stages(chunked)) == SHAPE.layers
    one, two = (estimate_step_time(setup, RATES) for setup in (whole, chunked))
    assert two.waiting == pytest.approx(one.waiting / 2, rel=0.3)  # stages are not exactly alike
    assert two.exposed_collectives > one.exposed_collectives
    assert estimate_peak_memory(chunked).total > estimate_peak_memory(whole).total


@pytest.mark.parametrize(("layers", "head"), [(36, 32), (64, 16), (24, 90), (61, 0), (12, 5)])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3), (2, 4)])
def test_chunks_divide_the_work_of_stages_evenly(layers: int, head: int, stages: int, chunks: int) -> None:
    """A stage is at most a layer above its share, unless the head and a layer of each chunk are more."""
    weights = [10] * layers
    weights[0] = 7  # a first layer of another kind
    parts = split_layers(weights, head, stages, chunks)
    assert [layer for part in parts for layer in part] == list(range(layers)) and all(parts)
    costs = [sum(weights[layer] for layer in part) for part in parts]
    costs[-1] += head
    mean = sum(costs) / stages
    assert max(sum(costs[rank::stages]) for rank in range(stages)) <= max(mean + 10, head + 10 * chunks)


def test_a_micro_batch_that_fills_the_stages_is_chosen() -> None:
    one = TrainingSetup(SHAPE, strategy="zero3", ranks=8, tuner="lora", seq_len=4096)
    largest = choose_micro_batch(one, 1 << 20, CHIP)
    assert (
        largest.can_fit
        and not estimate_strategy(replace(largest.setup, micro_tokens=4 * largest.setup.micro_tokens), CHIP).can_fit
    )
    stages = replace(one, ranks=2, pipeline=4)
    chosen = choose_micro_batch(stages, 1 << 20, CHIP)
    wasteful = estimate_strategy(replace(chosen.setup, micro_tokens=(1 << 20) // 2, micro_steps=1), CHIP)
    assert chosen.can_fit and chosen.setup.micro_steps >= 4
    assert chosen.tokens_per_s > wasteful.tokens_per_s


def test_a_longer_step_waits_less() -> None:
    setups = [TrainingSetup(SHAPE, pipeline=4, micro_steps=steps) for steps in (4, 64)]
    times = [estimate_step_time(setup, RATES) for setup in setups]
    shares = [time.waiting / (time.waiting + time.compute - time.update) for time in times]
    assert shares == pytest.approx([3 / 7, 3 / 67], rel=0.1)


def test_the_first_stage_keeps_most_and_a_checkpoint_is_whole() -> None:
    setup = TrainingSetup(SHAPE, pipeline=4, micro_steps=8, recompute="full", tuner="lora", micro_tokens=4096)
    peaks = [estimate_peak_memory(part) for part in list_stages(setup)]
    flights = [peak.parts.get("micro-batches in flight", 0.0) for peak in peaks]
    assert flights[0] > flights[1] > flights[2] > flights[3] == 0.0
    found = estimate_peak_memory(setup)
    assert found.total == max(peak.total for peak in peaks) and "of 4" in found.moment
    assert found.total < estimate_peak_memory(replace(setup, pipeline=1)).total / 2
    assert get_persistent_bytes(setup) == get_persistent_bytes(replace(setup, pipeline=1))


def test_stages_are_sharded_and_count_as_devices() -> None:
    setup = TrainingSetup(SHAPE, strategy="ddp", ranks=4, pipeline=2, micro_steps=4)
    assert setup.world_size == 8
    strategies = list_strategies(setup, CHIP)
    assert {one.strategy for one in strategies} == {"ddp", "zero2", "zero3"}
    assert not any(one.offload for one in strategies)
    totals = {one.strategy: estimate_peak_memory(one).total for one in strategies if one.recompute == "full"}
    assert totals["ddp"] > totals["zero2"] > totals["zero3"]
    estimate = estimate_strategy(setup, CHIP)
    assert estimate.compute_mfu(CHIP) < cost_model.COMPUTE_EFFICIENCY
    alone = replace(setup, strategy="single", ranks=1)
    near, across = (estimate_step_time(alone, replace(RATES, server=server)) for server in (2, 1))
    assert across.exposed_collectives > near.exposed_collectives


def test_what_no_pipeline_divides_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel.pipeline is 37, the model has 36 layers"):
        raise_problems(find_shape_problems(SHAPE, pipeline=37))
    assert list(find_shape_problems(SHAPE, pipeline=36)) == []
