"""What a model must beat."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from anabatic.core.errors import DataError
from anabatic_vessels.commands import evaluate_classifier
from anabatic_vessels.config.evaluation import ClassifyEvalJob
from anabatic_vessels.model import baselines
from anabatic_vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES
from anabatic_vessels.words.segments import Segment


def segment(vessel, label, number):
    return Segment("", label, vessel, "rows.jsonl", None, 3, (float(number),) * len(FEATURE_NAMES), 1)


def swapped(one):
    """Its numbers with those of the location turned round."""
    return tuple(
        1 - value if FEATURE_GROUPS[name] == "location" else value
        for name, value in zip(FEATURE_NAMES, one.features, strict=True)
    )


def test_the_most_frequent_class_wins_always():
    told = baselines.predict_majority(np.array([2, 2, 0, 2]), rows=3, classes=4)
    assert told.tolist() == [[0.25, 0, 0.75, 0]] * 3


def test_trees_learn_from_other_vessels_alone():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    train = [segment(f"t{at}", at % 2, at % 2) for at in range(120)]
    test = [segment("a", None, 0), segment("b", None, 1)]
    assert baselines.fit_and_predict_trees(train, test, classes=3).argmax(1).tolist() == [0, 1]
    place = [name for name in FEATURE_NAMES if FEATURE_GROUPS[name] == "location"]
    misled = [dataclasses.replace(one, features=swapped(one)) for one in test]  # the place says the other class
    assert baselines.fit_and_predict_trees(train, misled, 3, names=place).argmax(1).tolist() == [1, 0]
    motion = [name for name in FEATURE_NAMES if FEATURE_GROUPS[name] == "motion"]
    assert baselines.fit_and_predict_trees(train, misled, 3, names=motion).argmax(1).tolist() == [0, 1]
    with pytest.raises(DataError, match="1 vessels both train and test"):
        baselines.fit_and_predict_trees(train, [*test, train[0]], classes=3)
    with pytest.raises(DataError, match="fewer than two classes"):
        baselines.fit_and_predict_trees(train[:1], test, classes=3)
    with pytest.raises(DataError, match=r"line 1 of its file\): no `features`"):
        baselines.stack_features([Segment("", 0, "a", "rows.jsonl", None, 3, None, 1)])


def test_trees_stand_beside_the_model_on_the_same_vessels(tmp_path, capsys):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")

    def rows(name, vessels):
        lines = []
        for at in range(vessels):
            row = {"text": "DT_60 SPD_50 TURN_0 MOVE_NONE", "words": "motion-v1-r10", "vessel": f"{name}{at}"}
            lines.append({**row, "label": at % 2, "class": "AB"[at % 2], "features": [at % 2] * len(FEATURE_NAMES)})
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return str(path), lines

    train, _ = rows("train", 120)
    test, lines = rows("test", 10)
    said = [{"true_label": one["label"], "probabilities": [0.6, 0.4], "vessel": one["vessel"]} for one in lines]
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(one) + "\n" for one in said))
    job = ClassifyEvalJob(
        predictions=[str(tmp_path / "said.jsonl")],
        data=[test],
        baseline=[train, test],  # what is scored never trains
        out=str(tmp_path / "eval"),
        figures=False,
    )
    evaluate_classifier.run(job)
    found = json.loads((tmp_path / "eval/eval.json").read_text())
    assert found["baselines"]["boosted trees"]["vessel"]["accuracy"] == 1.0
    assert found["parts"]["all"]["vessel"]["accuracy"] == 0.5
    assert "Against boosted trees: 0 vessels right where it is wrong, 5 the other way round" in capsys.readouterr().out
