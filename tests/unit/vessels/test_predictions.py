"""Files of predictions, and `classify eval` from the job to its files."""

from __future__ import annotations

import csv
import json
from xml.etree import ElementTree

import numpy as np
import pytest

from anabatic.core.errors import ConfigError, DataError
from anabatic_vessels.commands import evaluate_classifier
from anabatic_vessels.config.evaluation import ClassifyEvalJob, parse_bounds
from anabatic_vessels.io.split_file import VesselSplit
from anabatic_vessels.metrics import classification, predictions

CLASSES = ("Cargo", "Fishing", "Tug")


def row(vessel, true, told, **also):
    best = int(np.argmax(told))
    return {
        "id": 0,
        "true_label": true,
        "predicted_class": best,
        "class_name": CLASSES[best],
        "confidence": told[best],
        "probabilities": told,
        "vessel": vessel,
        **also,
    }


ROWS = [
    row("a", 0, [0.8, 0.1, 0.1], place=[10.0, 20.0]),
    row("a", 0, [0.3, 0.4, 0.3], place=[10.1, 20.0]),
    row("b", 1, [0.1, 0.8, 0.1], place=[50.0, -170.0]),
    row("b", 1, [0.1, 0.2, 0.7], place=[50.0, -170.0]),
    row("c", 2, [0.6, 0.2, 0.2], place=[11.0, 21.0]),
]


def write(path, rows):
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return str(path)


def test_rows_become_arrays(tmp_path):
    found = predictions.read_predictions([write(tmp_path / "p.jsonl", [*ROWS, row("d", None, [1.0, 0, 0])])])
    assert found.classes == CLASSES
    assert found.truth.tolist() == [0, 0, 1, 1, 2]
    assert found.vessels == ("a", "a", "b", "b", "c")
    assert found.counts["rows without a true label"] == 1
    assert found.probabilities.shape == (5, 3)


def test_names_of_classes_come_from_the_job_the_keys_or_the_rows(tmp_path):
    file = write(tmp_path / "p.jsonl", ROWS[:1])
    assert predictions.read_predictions([file]).classes == ("Cargo", "class 1", "class 2")
    assert predictions.read_predictions([file], ["x", "y", "z"]).classes == ("x", "y", "z")
    keyed = {"true_label": "y", "probabilities": {"x": 0.25, "y": 0.75}, "source_file": "tracks/104694.csv"}
    found = predictions.read_predictions([write(tmp_path / "k.jsonl", [keyed])])
    assert (found.classes, found.truth.tolist(), found.vessels) == (("x", "y"), [1], ("104694",))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"probabilities": [0.5, 0.5]}, "2 probabilities for 3 classes"),
        ({"probabilities": [0.9, 0.9, 0.9]}, "sum to 1"),
        ({"probabilities": [float("nan"), 0.5, 0.5]}, "sum to 1"),
        ({"probabilities": {"x": 1.0}}, "other classes"),
        ({"true_label": 7}, "7 is none of 3"),
        ({"true_label": True}, "True is none of 3"),
        ({"vessel": None}, "neither `vessel` nor `source_file`"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(tmp_path, change, told):
    file = write(tmp_path / "p.jsonl", [ROWS[0], {**ROWS[1], **change}])
    with pytest.raises(DataError, match=told) as raised:
        predictions.read_predictions([file])
    assert "line 2" in str(raised.value)


@pytest.mark.parametrize(("content", "told"), [("{", "broken JSON"), ("[1]", "no `probabilities`"), ("", "no pred")])
def test_a_file_of_another_kind_is_refused(tmp_path, content, told):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(DataError, match=told):
        predictions.read_predictions([tmp_path / "p.jsonl"])
    with pytest.raises(DataError, match="No such file"):
        predictions.read_predictions([tmp_path / "none.jsonl"])


def test_eval_writes_the_score_of_segments_and_vessels(tmp_path, capsys):
    file = write(tmp_path / "p.jsonl", ROWS)
    evaluate_classifier.run(
        ClassifyEvalJob(predictions=[file], out=str(tmp_path / "eval"), regions={"near": "0,20,0,30"})
    )
    found = json.loads((tmp_path / "eval/eval.json").read_text())
    everything = found["parts"]["all"]
    assert everything["segment"]["accuracy"] == 0.4  # rows 1 and 3
    assert everything["vessel"]["accuracy"] == pytest.approx(2 / 3, abs=1e-4)  # a and b, by the mean
    assert found["parts"]["near"]["vessel"]["rows"] == 2
    assert found["baselines"]["majority class"]["segment"]["accuracy"] == 0.4
    with open(tmp_path / "eval/confusion_segment.csv", encoding="utf-8") as file:
        table = list(csv.reader(file))
    assert table[0] == ["true \\ predicted", *CLASSES]
    assert [list(map(int, line[1:])) for line in table[1:]] == [[1, 1, 0], [0, 1, 1], [1, 0, 0]]
    for name in ("confusion_segment.svg", "confusion_vessel.svg", "reliability.svg"):
        words = {each.text for each in ElementTree.parse(tmp_path / "eval" / name).iter() if each.text}
        assert words >= ({"share right", "confidence"} if name == "reliability.svg" else {"true", *CLASSES})
    printed = capsys.readouterr().out
    assert "majority class" in printed and "Cargo" in printed and "95 %" in printed


def test_vessels_seen_in_training_are_refused_left_out_or_scored_apart(tmp_path):
    rows = predictions.read_predictions([write(tmp_path / "p.jsonl", ROWS)])
    split = VesselSplit(train=("a",), valid=("c",))
    job = ClassifyEvalJob(predictions=["p"], out="x")
    with pytest.raises(DataError, match="trained on 1 of 3 vessels"):
        evaluate_classifier._find_training_vessels(split, rows.vessels, job.seen)
    with pytest.raises(DataError, match="all 3 vessels"):
        evaluate_classifier._find_training_vessels(VesselSplit(("a", "b", "c"), ()), rows.vessels, "skip")
    assert evaluate_classifier._find_training_vessels(split, rows.vessels, "skip") == {"a"}
    assert evaluate_classifier._find_training_vessels(VesselSplit(("z",), ()), rows.vessels, "refuse") == set()
    job.seen = "skip"
    divided = {
        name: set(part.vessels) for name, part in evaluate_classifier.split_predictions(rows, split, job).items()
    }
    assert divided == {"new vessels": {"b"}, "validation vessels": {"c"}}
    job.seen = "mark"
    assert list(evaluate_classifier.split_predictions(rows, split, job)) == [
        "new vessels",
        "validation vessels",
        "TRAINED ON",
    ]


def test_rows_say_which_vessels_the_model_was_trained_on(tmp_path):
    sides = {"a": "train", "c": "valid"}
    file = write(tmp_path / "p.jsonl", [{**row, "split": sides.get(row["vessel"])} for row in ROWS])
    with pytest.raises(DataError, match="trained on 1 of 3 vessels"):
        evaluate_classifier.run(ClassifyEvalJob(predictions=[file], out=str(tmp_path / "eval")))
    evaluate_classifier.run(ClassifyEvalJob(predictions=[file], out=str(tmp_path / "eval"), seen="skip", figures=False))
    found = json.loads((tmp_path / "eval/eval.json").read_text())["parts"]
    assert {name: part["vessel"]["rows"] for name, part in found.items()} == {"new vessels": 1, "validation vessels": 1}


def test_a_region_may_lie_across_the_date_line():
    places = np.array([[0.0, 179.0], [0.0, -179.0], [0.0, 0.0], [np.nan, np.nan]])
    assert classification.is_inside_box(places, parse_bounds("pacific", "-10,10,170,-170")).tolist() == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("box", ["1,2,3", "10,0,0,5", "a,b,c,d", "0,91,0,5", "0,5,7,7"])
def test_a_region_that_is_none_is_refused(box):
    with pytest.raises(ConfigError, match="regions.x"):
        ClassifyEvalJob(predictions=["p"], regions={"x": box})


def test_an_empty_region_and_rows_without_places_are_errors(tmp_path):
    rows = predictions.read_predictions([write(tmp_path / "p.jsonl", ROWS)])
    with pytest.raises(DataError, match="no row is in region x"):
        evaluate_classifier.split_predictions(
            rows, None, ClassifyEvalJob(predictions=["p"], regions={"x": "-80,-70,0,5"})
        )
    bare = predictions.read_predictions([write(tmp_path / "q.jsonl", [{**one, "place": None} for one in ROWS])])
    with pytest.raises(DataError, match="do not say where"):
        evaluate_classifier.split_predictions(
            bare, None, ClassifyEvalJob(predictions=["p"], regions={"x": "0,20,0,30"})
        )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "either a model or predictions"),
        ({"model": "m", "predictions": ["p"]}, "either a model or predictions"),
        ({"model": "m"}, "data is not given"),
        ({"predictions": ["p"], "baseline": ["b"]}, "baseline needs"),
        ({"predictions": ["p"], "bootstrap": 5}, "bootstrap is 5"),
    ],
)
def test_a_job_that_cannot_be_done_says_so(given, told):
    with pytest.raises(ConfigError, match=told):
        ClassifyEvalJob(**given)
