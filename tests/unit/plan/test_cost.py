"""Times on paper: the formulas against transfers counted one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabatic.plan import cost_model
from anabatic_sim import chips

RATES = cost_model.get_chip_rates(chips.find_sim_chip("910B3").device_spec)


def sent_by_one(kind: str, ranks: int) -> float:
    """Share of the tensor that the busiest device sends, chunk by chunk, in a scatter-and-gather algorithm."""
    chunk = 1 / ranks
    others = ranks - 1
    scatter = sum(chunk for _ in range(others))
    gather = sum(chunk for _ in range(others))
    return {
        "all_reduce": scatter + gather,
        "broadcast": scatter + gather,
        "reduce": scatter + gather,
        "all_gather": gather,
        "reduce_scatter": scatter,
        "scatter": scatter,
        "all_to_all": scatter,
        "barrier": 0.0,
    }[kind]


@pytest.mark.parametrize("kind", [kind for kind in cost_model.COLLECTIVES if kind not in ("send", "recv")])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_inside_a_server(kind: str, ranks: int) -> None:
    total = 1e9
    link = (ranks - 1) * 28e9 * cost_model.LINK_EFFICIENCY  # one link to each peer
    expected = cost_model.LAUNCH_COLLECTIVE_NS + 1e9 * sent_by_one(kind, ranks) * total / link
    assert cost_model.estimate_collective_ns(RATES, kind, total, ranks) == pytest.approx(expected)


def test_between_servers() -> None:
    inside = cost_model.estimate_collective_ns(RATES, "all_reduce", 1e9, 8)
    both = cost_model.estimate_collective_ns(RATES, "all_reduce", 1e9, 16)
    # Each of the eight devices exchanges its eighth with one partner, twice.
    assert both - inside == pytest.approx(
        2 * cost_model.NETWORK_NS + 1e9 * (1e9 / 8) / (25e9 * cost_model.LINK_EFFICIENCY)
    )


def test_the_dies_of_a_card_have_a_link_of_their_own() -> None:
    rates = cost_model.get_chip_rates(chips.find_sim_chip("910C").device_spec)
    for ranks, apart, gigabytes in ((2, 1, 224.0), (2, 2, 196.0), (4, 1, 196.0)):
        found = cost_model.estimate_collective_ns(cost_model.separate_ranks(rates, apart), "all_gather", 1e9, ranks)
        sent = 1e9 * (ranks - 1) / ranks
        assert found - cost_model.LAUNCH_COLLECTIVE_NS == pytest.approx(sent / (gigabytes * cost_model.LINK_EFFICIENCY))
    assert cost_model.separate_ranks(RATES, 2).server == RATES.server // 2
    assert RATES.card == 0.0  # a card of a 910B has one die


def test_an_operator_is_bound_by_the_slower_side() -> None:
    flops = 2 * 4096.0**3
    moved = 3 * 4096 * 4096 * 2
    compute = 1e9 * flops / (294.9e12 * cost_model.COMPUTE_EFFICIENCY)
    assert cost_model.estimate_operator_ns(RATES, "cube half", flops, moved) == pytest.approx(5000 + compute)
    assert cost_model.estimate_operator_ns(RATES, "cube single", flops, moved) == pytest.approx(5000 + 4 * compute)
    assert cost_model.estimate_operator_ns(RATES, "vector", 0, 1.6e9) == pytest.approx(
        2000 + 1e6 / cost_model.MEMORY_EFFICIENCY
    )


@pytest.mark.parametrize("chip", sorted(chips.CHIPS))
def test_every_chip_has_rates(chip: str) -> None:
    rates = cost_model.get_chip_rates(chips.find_sim_chip(chip).device_spec)
    assert all(value > 0 for value in cost_model.list_rate_values(replace(rates, card=1.0)))
    assert (rates.card > 0) == chip.startswith("Ascend910_93")


@pytest.mark.process
@given(st.sampled_from(cost_model.COLLECTIVES), st.integers(1, 64), st.floats(0, 1e12))
def test_more_bytes_take_longer(kind: str, ranks: int, total: float) -> None:
    less, more = (cost_model.estimate_collective_ns(RATES, kind, size, ranks) for size in (total, 2 * total + 1))
    assert cost_model.LAUNCH_COLLECTIVE_NS <= less <= more
