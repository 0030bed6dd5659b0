"""Trees beside a network: the copy answers as scikit-learn does, and as a walk made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from anabatic.core.errors import DataError
from anabatic_vessels.model import forest
from anabatic_vessels.model.forest import Forest

sklearn = pytest.importorskip("sklearn", reason="scikit-learn is not installed")


def rows(classes, count=160, seed=0):
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, count)
    numbers = draw.normal(size=(count, 5))
    numbers[:, 1] += 3 * labels
    numbers[draw.random(numbers.shape) < 0.1] = np.nan
    return numbers.astype(np.float32), labels


def walked(trees: Forest, row):
    """What the arrays say of one row, read as their documentation describes them."""
    scores = trees.base.copy()
    for number, at in enumerate(trees.root):
        while trees.feature[at] >= 0:
            value = float(row[trees.feature[at]])
            left = trees.missing_left[at] if np.isnan(value) else value <= trees.threshold[at]
            at = trees.left[at] if left else trees.right[at]
        scores[number % len(scores)] += trees.value[at]
    return np.exp(scores) / np.exp(scores).sum()


@pytest.mark.parametrize("classes", [2, 3])
def test_the_copy_is_walked_as_documented(classes):
    numbers, labels = rows(classes)
    made = forest.fit_forest(
        numbers, labels, np.ones(len(labels)), classes, rounds=6
    )  # compares itself with scikit-learn
    found = made.predict_probabilities(numbers[:20])
    assert found == pytest.approx(np.array([walked(made, row) for row in numbers[:20]]))
    assert (made.predict_probabilities(numbers).argmax(1) == labels).mean() > 0.6


def test_a_number_that_no_row_knows_splits_none():
    numbers, labels = rows(2)
    numbers[:, 3] = np.nan
    made = forest.fit_forest(numbers, labels, np.ones(len(labels)), 2, rounds=4)
    assert 3 not in made.feature
    known = numbers.copy()
    known[:, 3] = 7.0
    assert np.array_equal(made.predict_probabilities(numbers), made.predict_probabilities(known))


def test_a_class_without_rows_is_never_said():
    numbers, labels = rows(2)
    found = forest.fit_forest(numbers, labels * 3, np.ones(len(labels)), classes=5, rounds=3).predict_probabilities(
        numbers
    )
    assert (found[:, [1, 2, 4]] == 0).all()
    assert found.sum(1) == pytest.approx(np.ones(len(numbers)))


def test_weights_decide_what_a_row_counts():
    numbers, labels = rows(2)
    doubled = forest.fit_forest(
        np.vstack([numbers, numbers[labels == 1]]),
        np.append(labels, labels[labels == 1]),
        np.ones(len(labels) + (labels == 1).sum()),
        2,
        rounds=3,
    )
    weighed = forest.fit_forest(numbers, labels, 1.0 + labels, 2, rounds=3)
    assert weighed.predict_probabilities(numbers).mean(0) == pytest.approx(
        doubled.predict_probabilities(numbers).mean(0), abs=0.05
    )


def test_a_forest_survives_its_file_bit_for_bit(tmp_path):
    numbers, labels = rows(3)
    made = forest.fit_forest(numbers, labels, np.ones(len(labels)), 3, rounds=3)
    (tmp_path / forest.FOREST_FILE).write_bytes(made.to_bytes())
    again = forest.load_forest(tmp_path)
    assert (again.predict_probabilities(numbers) == made.predict_probabilities(numbers)).all()
    many = np.repeat(numbers, 8, axis=0)  # several blocks
    assert (again.predict_probabilities(many) == np.repeat(made.predict_probabilities(numbers), 8, axis=0)).all()
    assert again.predict_probabilities(numbers[:0]).shape == (0, 3)


def test_a_missing_or_torn_file_is_named(tmp_path):
    with pytest.raises(DataError, match="forest.safetensors"):
        forest.load_forest(tmp_path)
    (tmp_path / forest.FOREST_FILE).write_bytes(b"not a forest")
    with pytest.raises(DataError, match="forest.safetensors"):
        forest.load_forest(tmp_path)


def test_one_class_trains_nothing():
    numbers, labels = rows(2)
    with pytest.raises(DataError, match="1 class"):
        forest.fit_forest(numbers, labels * 0, np.ones(len(labels)), 2, rounds=3)


def test_every_vessel_counts_the_same():
    weights = forest.weigh_groups_equally(["a", "b", "b", "c", "c", "c"])
    assert weights == pytest.approx(np.array([2, 1, 1, 2 / 3, 2 / 3, 2 / 3]))


def test_the_mean_of_network_and_trees():
    network, trees = np.array([[0.8, 0.2], [np.nan, np.nan]]), np.array([[0.4, 0.6], [0.5, 0.5]])
    found = forest.mix_probabilities(network, trees, 0.25)
    assert found[0] == pytest.approx([0.7, 0.3])
    assert np.isnan(found[1]).all()
