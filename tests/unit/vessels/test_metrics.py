"""Scores against scikit-learn, against sums made by hand, and against slow references."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic_vessels.metrics import classification


@st.composite
def predicted(draw):
    classes = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 40))
    label = st.integers(0, classes - 1)
    lists = (draw(st.lists(label, min_size=rows, max_size=rows)) for _ in range(2))
    return classes, *(np.array(one, dtype=np.int64) for one in lists)


@settings(max_examples=60, deadline=None)
@given(predicted())
def test_scores_are_scikit_learns(case):
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    classes, truth, said = case
    found = classification.compute_scores(truth, said, [str(at) for at in range(classes)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of one class only, and of predicted classes that are nowhere true
        assert found.balanced_accuracy == pytest.approx(sk.balanced_accuracy_score(truth, said))
        assert (found.confusion == sk.confusion_matrix(truth, said, labels=range(classes))).all()
        assert found.macro_f1 == pytest.approx(sk.f1_score(truth, said, average="macro", zero_division=0))
        table = sk.precision_recall_fscore_support(truth, said, labels=range(classes), zero_division=0)
    assert found.accuracy == pytest.approx(sk.accuracy_score(truth, said))
    for row, one in enumerate(zip(*table, strict=True)):
        ours = found.classes[row]
        assert (ours.precision, ours.recall, ours.f1, ours.support) == pytest.approx(one)


def test_three_classes_by_hand():
    #            true:  A  A  A  B  B  C
    truth = np.array([0, 0, 0, 1, 1, 2])
    found = classification.compute_scores(truth, np.array([0, 0, 1, 1, 0, 1]), ["A", "B", "C"])
    a, b, c = found.classes
    assert (a.precision, a.recall, a.support) == (2 / 3, 2 / 3, 3)
    assert (b.precision, b.recall, b.f1) == (1 / 3, 1 / 2, 0.4)
    assert (c.precision, c.recall, c.f1, c.support) == (0, 0, 0, 1)
    assert found.accuracy == 3 / 6
    assert found.macro_f1 == pytest.approx((2 / 3 + 0.4 + 0) / 3)
    assert found.balanced_accuracy == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)
    assert found.confusion.tolist() == [[2, 1, 0], [1, 1, 0], [0, 1, 0]]


def test_a_class_that_never_occurs_does_not_lower_the_mean():
    truth = np.array([0, 1])
    assert classification.compute_scores(truth, truth, ["A", "B", "never"]).macro_f1 == 1.0


def test_no_rows_are_no_score():
    with pytest.raises(ValueError, match="no rows"):
        classification.compute_scores(np.array([], dtype=np.int64), np.array([], dtype=np.int64), ["A"])


def test_a_vessel_is_the_geometric_mean_of_its_segments():
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]])
    vessels, mean = classification.pool_by_vessel(probabilities, ["b", "a", "b", "b"])
    assert vessels == ["b", "a"]
    both = [(0.9 * 0.4 * 0.3) ** (1 / 3), (0.1 * 0.6 * 0.7) ** (1 / 3)]
    assert mean == pytest.approx(np.array([[one / sum(both) for one in both], [0.2, 0.8]]))
    _, (ruled_out,) = classification.pool_by_vessel(np.array([[0.0, 1.0], [0.5, 0.5]]), ["a", "a"])
    assert 0 < ruled_out[0] < 0.01 and ruled_out.sum() == pytest.approx(1)


def test_the_class_of_a_vessel_is_the_most_frequent_of_its_rows():
    truth, torn = classification.find_majority_truth(np.array([1, 0, 1, 2, 2, 1]), ["x", "x", "x", "y", "z", "z"])
    assert truth.tolist() == [1, 2, 1]  # z: one of each, the lower counts
    assert torn == ["x", "z"]


def slow_calibration_error(truth, probabilities, bins):
    groups = {}
    for label, row in zip(truth, probabilities, strict=True):
        sure = max(row)
        at = min(bins - 1, max(0, math.ceil(sure * bins) - 1))
        groups.setdefault(at, []).append((sure, list(row).index(sure) == label))
    gap = 0.0
    for found in groups.values():
        gap += abs(sum(sure for sure, _ in found) - sum(hit for _, hit in found))
    return gap / len(truth)


def test_calibration_error_against_the_definition():
    draw = random.Random(1)
    rows = [[draw.random() ** 3 for _ in range(4)] for _ in range(300)]
    probabilities = np.array([[one / sum(row) for one in row] for row in rows])
    truth = np.array([draw.randrange(4) for _ in rows])
    error, table = classification.compute_calibration(truth, probabilities)
    assert error == pytest.approx(
        slow_calibration_error(truth.tolist(), probabilities.tolist(), classification.DEFAULT_BINS)
    )
    assert sum(one.rows for one in table) == 300
    assert all(one.low < one.confidence <= one.high for one in table)


def test_always_sure_and_half_right_is_an_error_of_one_half():
    probabilities = np.array([[1.0, 0.0]] * 10)
    error, table = classification.compute_calibration(np.array([0, 1] * 5), probabilities)
    assert error == 0.5
    assert [(one.rows, one.accuracy) for one in table] == [(10, 0.5)]


def test_the_interval_is_that_of_resampled_rows():
    draw = np.random.default_rng(3)
    truth = draw.integers(0, 3, 200)
    said = np.where(draw.random(200) < 0.7, truth, draw.integers(0, 3, 200))
    ours = classification.bootstrap_intervals(truth, said, 3, rounds=2000)
    accuracy, macro = [], []
    for _ in range(2000):
        rows = draw.integers(0, 200, 200)
        one = classification.compute_scores(truth[rows], said[rows], "ABC")
        accuracy.append(one.accuracy)
        macro.append(one.macro_f1)
    for name, slow in (("accuracy", accuracy), ("macro_f1", macro)):
        assert (ours[name].low, ours[name].high) == pytest.approx(np.quantile(slow, (0.025, 0.975)), abs=0.012)
        assert ours[name].low < ours[name].value < ours[name].high
    assert ours["accuracy"].value == pytest.approx((truth == said).mean())
    # Of 200 rows near 0.8 the normal approximation gives 1.96 * sqrt(0.16 / 200) = 0.055 to each side.
    assert ours["accuracy"].high - ours["accuracy"].low == pytest.approx(0.11, abs=0.02)


def test_paired_comparison_by_hand():
    first = np.array([True] * 8 + [False] * 2 + [True] * 5)
    second = np.array([False] * 8 + [True] * 2 + [True] * 5)
    won, lost, p = classification.mcnemar_test(first, second)
    assert (won, lost) == (8, 2)
    assert p == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert classification.mcnemar_test(first, first)[2] == 1.0


def test_abstaining_answers_less_and_counts_only_what_it_answers():
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.55, 0.45]])
    table = classification.abstention_table(np.array([0, 1, 0]), probabilities, (0.0, 0.7, 0.95))
    assert [(row["answered"], row["accuracy"]) for row in table] == [
        (1.0, pytest.approx(2 / 3)),
        (pytest.approx(1 / 3), 1.0),
        (0.0, 0.0),
    ]
