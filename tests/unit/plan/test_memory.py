"""Memory and estimated time: sums add up, and what saves memory saves it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.device.table import CHIPS, find_chip
from anabatic.plan import cost_model, memory_estimate, model_shape, step_time, strategy_search
from anabatic.plan.job_rules import find_shape_problems, raise_problems
from anabatic.plan.memory_estimate import estimate_activations, estimate_peak_memory
from anabatic.plan.shapes.decoder_shape import DecoderShape
from anabatic.plan.training_setup import TrainingSetup

CHIP = find_chip("Ascend910B3")
assert CHIP is not None
SHAPE, _ = model_shape.get_named_shape("Qwen/Qwen2.5-7B")
BASE = TrainingSetup(SHAPE, micro_tokens=8192)
SETUPS = st.builds(
    TrainingSetup,
    st.just(SHAPE) | st.just(model_shape.get_named_shape("Qwen/Qwen3-30B-A3B")[0]),
    strategy=st.sampled_from(["ddp", "zero2", "zero3"]),
    ranks=st.sampled_from([2, 8, 16]),
    tuner=st.sampled_from(["full", "lora", "freeze"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro_tokens=st.sampled_from([2048, 8192]),
    micro_steps=st.sampled_from([1, 4]),
    half=st.booleans(),
    muon=st.booleans(),
    weights=st.sampled_from(["fp32", "bf16_kahan"]),
    quantize=st.sampled_from(["none", "nf4"]),
    targets=st.sampled_from([0.2, 1.0]),
).filter(lambda setup: setup.quantize == "none" or setup.tuner == "lora")


def test_activations_of_a_block_are_those_of_the_operators() -> None:
    """Counted by hand for Qwen2 with 4 heads of 64, 2 for keys and values, width 256, inner size 704, in bf16."""
    small = replace(SHAPE, hidden=256, heads=4, kv_heads=2, head_dim=64, inner=704, vocab=512, layers=2, qkv_bias=True)
    full = estimate_activations(TrainingSetup(small))
    assert full.stream == 2 * (4 * 256 + 4) + 2 * 2 * 256  # fp32 inputs of two norms, their reciprocals; bf16 outputs
    assert full.attention == 2 * ((256 + 128) * 2 + 128 + 256) + 64 * 4  # before and after rotation, values, output
    assert full.mlp == 2 * 2 * 704  # gate and up side by side; their product is computed again
    assert estimate_activations(TrainingSetup(small, strategy="zero2", ranks=2)).mlp == 2 * 3 * 704
    lora = estimate_activations(TrainingSetup(small, tuner="lora", rank=8))
    assert lora.stream == full.stream - 2 * 2 * 256 and lora.adapters == 2 * 8 * 7


@settings(max_examples=100, deadline=None)
@given(SETUPS)
def test_parts_are_not_negative_and_saving_saves(setup: TrainingSetup) -> None:
    found = estimate_peak_memory(setup)
    assert all(size >= 0 for size in found.parts.values()) and found.total > 0
    assert sum(found.kinds.values()) == pytest.approx(found.parts.get("activations", 0.0))
    assert estimate_peak_memory(replace(setup, micro_tokens=2 * setup.micro_tokens)).total >= found.total
    if setup.strategy == "zero3":
        assert estimate_peak_memory(replace(setup, ranks=2 * setup.ranks)).total <= found.total
        assert estimate_peak_memory(replace(setup, offload=True)).total < found.total
    if setup.recompute == "full":
        alike = replace(setup, casts_blocks=False)  # recomputed blocks keep copies of their weights that others do not
        kept = estimate_peak_memory(replace(alike, recompute="none"))
        assert estimate_peak_memory(alike).total <= kept.total * 1.02
    rates = cost_model.get_chip_rates(CHIP)
    time = step_time.estimate_step_time(setup, rates)
    assert time.total_seconds > 0 and 0 <= time.exposed_collectives <= time.collectives and time.update < time.compute
    if setup.tuner != "freeze":  # utilisation counts gradients that nobody needs below the blocks that are trained
        assert strategy_search.estimate_strategy(setup, CHIP).compute_mfu(CHIP) < cost_model.COMPUTE_EFFICIENCY


def test_the_theory_of_dividing() -> None:
    """arXiv 1910.02054, figure 1: 16 bytes a parameter in mixed precision, divided by the ranks under stage 3."""
    one = estimate_peak_memory(replace(BASE, strategy="ddp", ranks=64)).parts
    split = estimate_peak_memory(replace(BASE, strategy="zero3", ranks=64)).parts
    held = ("trained weights", "optimizer")
    assert sum(one[name] for name in held) == 12 * SHAPE.params
    assert sum(split[name] for name in held) == pytest.approx(12 * SHAPE.params / 64)


def test_what_is_proposed_fits_and_comes_in_order() -> None:
    setup = TrainingSetup(SHAPE, ranks=8, strategy="ddp", micro_tokens=2048)
    found = strategy_search.pick_fastest(strategy_search.list_fitting(setup, 8 * 16_384, CHIP))
    assert found and all(one.can_fit for one in found)
    speeds = [one.tokens_per_s for one in found]
    assert speeds == sorted(speeds, reverse=True)
    for one in found:
        assert one.setup.micro_tokens * one.setup.micro_steps * 8 == 8 * 16_384
    assert not any(one.setup.strategy == "ddp" for one in found)  # 7 B parameters at 16 bytes
    assert strategy_search.list_fitting(TrainingSetup(SHAPE, micro_tokens=2048), 2048, CHIP) == []


def test_every_chip_of_the_table_can_be_planned_for() -> None:
    small, _ = model_shape.get_named_shape("Qwen/Qwen2.5-0.5B")
    for chip in CHIPS:
        assert (
            strategy_search.estimate_strategy(
                TrainingSetup(small, tuner="lora", micro_tokens=512, seq_len=512), chip
            ).tokens_per_s
            > 0
        )


def test_context_ranks_divide_tokens_and_shards() -> None:
    """Two groups of four ranks that share a batch keep what eight ranks with a batch each keep, and attention's output
    twice: before and after its exchange."""
    alone = replace(BASE, strategy="zero3", ranks=8, micro_tokens=8192)
    shared = replace(alone, ranks=2, context=4, micro_tokens=4 * 8192)
    assert (shared.world_size, shared.shard_ranks, shared.local_tokens) == (8, 8, 8192)
    more = estimate_activations(shared).attention - estimate_activations(alone).attention
    assert more == 2 * 28 * 128  # Qwen2.5-7B: 28 heads of 128, in bf16; 4 key heads for 4 ranks
    for name in ("trained weights", "optimizer", "gradients"):
        assert estimate_peak_memory(shared).parts[name] == estimate_peak_memory(alone).parts[name]


def test_key_heads_for_several_ranks_are_counted_as_often_as_they_are_sent() -> None:
    setup = replace(BASE, strategy="zero3", context=14, micro_tokens=14 * 1024)  # 4 key heads: the multiple is 28
    assert setup.repeated_key_heads == 28
    more = estimate_activations(setup).attention - estimate_activations(replace(setup, context=1)).attention
    assert more == 2 * (28 * 128 + 2 * (28 - 4) * 128)


def test_the_exchange_of_context_ranks_takes_its_time() -> None:
    """Four calls of each kind in a step without recomputation: forward and backward of all blocks."""
    rates = cost_model.get_chip_rates(CHIP)
    setup = replace(BASE, strategy="zero3", context=4, micro_tokens=32768, seq_len=32768)
    apart = replace(setup, context=1, ranks=4, micro_tokens=8192)
    with_exchange, without = (step_time.estimate_step_time(one, rates) for one in (setup, apart))
    sizes = [2 * 128 * heads * 8192 for heads in (28 + 2 * 4, 28)]
    expected = 2 * SHAPE.layers * sum(cost_model.estimate_collective_ns(rates, "all_to_all", size, 4) for size in sizes)
    assert with_exchange.collectives - without.collectives == pytest.approx(expected / 1e9)
    assert with_exchange.compute == pytest.approx(without.compute) and with_exchange.tokens == without.tokens == 32768


def test_copies_of_shards_add_gradients_between_machines() -> None:
    rates = cost_model.get_chip_rates(CHIP)
    one = replace(BASE, strategy="zero3", ranks=16)
    two = replace(one, replicate=2)
    assert two.shard_ranks == 8 and two.world_size == 16
    assert estimate_peak_memory(two).parts["optimizer"] == 2 * estimate_peak_memory(one).parts["optimizer"]
    times = [step_time.estimate_step_time(setup, rates).collectives for setup in (one, two)]
    assert times[1] < times[0]  # weights are not gathered over the network


def test_tensor_ranks_have_no_gradient_buckets() -> None:
    """DDP's wrapper keeps all gradients in buckets, beside which AdamW copies them and the weights that decay; with
    tensor ranks there is none."""
    plain = replace(BASE, strategy="ddp", ranks=4, fused_adamw=False, weight_decay=0.1)
    divided = replace(plain, ranks=2, tensor=2)
    bucket = memory_estimate.UPDATE_BUCKET_ELEMENTS
    assert memory_estimate._estimate_update(plain).parts["update"] == 8 * bucket
    assert memory_estimate._estimate_update(replace(plain, weight_decay=0.0)).parts["update"] == 4 * bucket
    assert memory_estimate._estimate_update(divided).parts["update"] == 4 * bucket


MIXTURE, _ = model_shape.get_named_shape("Qwen/Qwen3-30B-A3B")
STACKED = 128 * 3 * 2048 * 768
"""Parameters of the experts of one of its blocks."""


def test_expert_ranks_hold_and_gather_their_own_experts() -> None:
    whole = TrainingSetup(MIXTURE, strategy="ddp", ranks=8, micro_tokens=2048)
    divided = replace(whole, expert=4)
    assert MIXTURE.stacked_params == STACKED
    assert whole.params - divided.params == 48 * STACKED * 3 // 4 == whole.trained_params - divided.trained_params
    assert divided.whole_experts == whole
    parts, less = (estimate_peak_memory(setup).parts for setup in (whole, divided))
    assert parts["optimizer"] - less["optimizer"] == 8 * 48 * STACKED * 3 // 4
    sharded, both = (replace(setup, strategy="zero3") for setup in (whole, divided))
    assert both.params == sharded.params  # divided by all ranks in either way
    assert sharded.gathered_block_params - both.gathered_block_params == STACKED * 3 // 4
    parts, less = (estimate_peak_memory(setup).parts for setup in (sharded, both))
    assert parts["optimizer"] == less["optimizer"] and parts["gathered weights"] > less["gathered weights"]


def test_experts_that_no_other_rank_has_are_not_gathered() -> None:
    """Eight ranks: eight groups of experts are plain fp32 tensors, cast for their products; four are FSDP's."""
    shared = TrainingSetup(MIXTURE, strategy="zero3", ranks=8, expert=4, micro_tokens=2048)
    alone = replace(shared, expert=8)
    assert (shared.has_plain_experts, alone.has_plain_experts) == (False, True)
    assert shared.gathered_block_params - alone.gathered_block_params == STACKED // 4
    parts, other = (memory_estimate._estimate_loss(setup).parts for setup in (alone, shared))
    assert other["half-precision copies"] == 0
    assert parts["half-precision copies"] == 2 * 48 * STACKED // 8
    assert parts["trained weights"] == other["trained weights"]
    sums = "sums of the experts' gradients"
    assert sums not in memory_estimate._estimate_expert_sums(shared).parts
    assert memory_estimate._estimate_expert_sums(alone).parts[sums] == 4 * memory_estimate.UPDATE_BUCKET_ELEMENTS


def test_gradients_of_divided_experts_are_in_no_bucket() -> None:
    """DDP's buckets hold the others from the first gradient on; those of experts come block by block."""
    setup = TrainingSetup(MIXTURE, strategy="ddp", ranks=8, expert=8, micro_tokens=2048)
    last, first = (moment.parts["gradients"] for moment in memory_estimate._estimate_backward(setup))
    assert first == 4 * setup.trained_params
    assert first - last == 4 * 47 * STACKED // 8
    several = memory_estimate._estimate_backward(replace(setup, micro_steps=2))  # those of the first micro-batch stay
    assert [moment.parts["gradients"] for moment in several] == [first, first]


def test_blocks_of_experts_keep_casts_of_experts_alone() -> None:
    """Linear layers are cast together, and again in the backward pass; experts and the router are not among them."""
    setup = TrainingSetup(MIXTURE, micro_tokens=2048)
    parts = memory_estimate._estimate_loss(setup).parts
    assert parts["half-precision copies"] == 2 * 48 * (STACKED + 128 * 2048) + 2 * MIXTURE.embedding_params
    linears = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048  # 32 heads of 128, 4 for keys and values
    assert memory_estimate._recast_bytes(setup) == 2 * linears


def test_adapters_of_experts_are_divided_too() -> None:
    lora = dict(tuner="lora", rank=8, targets_of_adapters=("all-experts",), strategy="ddp", ranks=8)
    whole = TrainingSetup(MIXTURE, **lora)  # type: ignore[arg-type]
    assert whole.trained_params == 48 * 128 * 8 * (2048 + 2 * 768 + 2048 + 768)
    assert replace(whole, expert=8).trained_params == whole.trained_params // 8
    assert replace(whole, expert=8, strategy="zero3").trained_params == whole.trained_params


def test_the_exchange_of_expert_ranks_takes_its_time() -> None:
    """Two calls in each block forward and two backward, of eight rows for a token."""
    rates = cost_model.get_chip_rates(CHIP)
    setup = TrainingSetup(MIXTURE, strategy="zero3", ranks=8, micro_tokens=2048)
    call = cost_model.estimate_collective_ns(rates, "all_to_all", 2.0 * 2048 * 8 * 2048, 8) / 1e9
    times = [step_time.estimate_step_time(replace(setup, expert=expert), rates) for expert in (1, 8)]
    assert times[0].compute == times[1].compute
    gathered = [step_time._estimate_sharded(replace(setup, expert=expert), rates)[0] for expert in (1, 8)]
    difference = 48 * (4 * call + gathered[1] - gathered[0])
    assert times[1].collectives - times[0].collectives == pytest.approx(difference)


@pytest.mark.parametrize(
    ("shape", "expert", "message"),
    [
        (MIXTURE, 3, "parallel.expert is 3, which does not divide 128 experts"),
        (SHAPE, 2, "parallel.expert is 2, and the model has no layers of stacked experts"),
    ],
)
def test_expert_ranks_that_cannot_be(shape: DecoderShape, expert: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        raise_problems(find_shape_problems(shape, expert=expert))
