"""Intervals, against published figures and slow sums."""

from __future__ import annotations

import math

import numpy as np
import pytest

from anabatic.evals import item_records
from anabatic.evals.confidence_intervals import Estimate, bootstrap_interval, mean_estimate, wilson_interval
from anabatic.evals.tasks import registry
from anabatic.evals.tasks.items import ContextPair, EvalItem


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634), (81, 263, 0.2553, 0.3662)],
)
def test_wilson(right, n, low, high):
    """81 of 263: Newcombe 1998 (Statistics in Medicine 17, 857), table I, method 3."""
    found = wilson_interval(right, n)
    assert (found.value, found.method) == (right / n, "wilson")
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


def test_nothing_asked_is_no_number():
    assert math.isnan(wilson_interval(0, 0).value)


def test_bootstrap_covers_a_mean_and_repeats_itself():
    rows = np.random.default_rng(0).normal(3, 1, (400, 1))
    found = bootstrap_interval(rows, lambda part: float(part.mean()), 1)
    half = 1.96 * rows.std() / 20
    assert (found.low, found.high) == pytest.approx((rows.mean() - half, rows.mean() + half), abs=0.02)
    assert found == bootstrap_interval(rows, lambda part: float(part.mean()), 1)


def test_a_mean_of_figures_is_surer_than_each():
    one = Estimate(0.5, 0.4, 0.6, "wilson")
    found = mean_estimate([(one, 1.0)] * 4)
    assert found.value == 0.5 and found.high - found.low == pytest.approx(0.1)
    assert mean_estimate([(one, 2.0)] * 4).high - 0.5 == pytest.approx(0.1)


def test_replies_that_nobody_can_judge_count_in_no_metric():
    (planned,) = registry.plan_tasks(["task:arithmetic"]).tasks
    item = EvalItem(0, "here", [ContextPair("q")], group="a")
    right, wrong = (item_records.make_reply_record(item, "", "r", passed) for passed in (True, False))
    open_one = item_records.make_reply_record(item, "", "r", False, "cannot be judged", is_judged=False)
    records = [right, open_one, wrong, right]
    metric = planned.task.main_metric
    assert item_records.compute_estimates(planned.task, records, 0)[metric] == wilson_interval(2, 3)
    assert item_records.average_by_group(planned.task, records)["a"] == {metric: 2 / 3, "n": 3}
    assert math.isnan(item_records.compute_estimates(planned.task, [open_one], 0)[metric].value)
