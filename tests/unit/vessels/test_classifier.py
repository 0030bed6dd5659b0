"""Vessel classifiers from their settings to their answers: learned, continued, asked, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 - its plugin would import it at the end, after a training has frozen the collector
import numpy as np
import pytest
from safetensors.torch import load_file

from anabatic.config.loading import command_table, settings
from anabatic.config.sections.common import DeviceSettings
from anabatic.core import json_reader
from anabatic.core.errors import UserError
from anabatic.data.tokenizer import hf_folder as tokenizers
from anabatic.models.pretrained import save_model
from anabatic.recipes.prechecks import jobs
from anabatic_testing.tiny_models import build_tiny_model, train_tiny_tokenizer, write_tiny_text
from anabatic_vessels.config.tracks import TrackSettings
from anabatic_vessels.model.trajectory_classifier import TrajectoryClassifier

CLASSES = ("Ferry", "Trawler", "Yacht")
SPEEDS = (("SPD_100", "SPD_105"), ("SPD_20", "SPD_25"), ("SPD_50", "SPD_55"))
STEPS = 12


def vessel_rows(vessels: int = 30, classes: tuple[str, ...] = CLASSES) -> list[dict[str, Any]]:
    """Segments of vessels whose class shows in most of their speeds."""
    draw, rows = random.Random(1), []
    for vessel in range(vessels):
        label = vessel % 3
        for segment in range(4):
            points = []
            for _ in range(draw.randint(3, 6)):
                speed = draw.choice(SPEEDS[label if draw.random() < 0.8 else draw.randrange(3)])
                points.append(f"DT_60 {speed} TURN_0 MOVE_NONE")
            rows.append(
                {
                    "text": " ".join(points),
                    "label": label,
                    "class": classes[label],
                    "vessel": f"v{vessel}",
                    "source_file": f"v{vessel}.csv",
                    "start": 1000 * segment,
                    "words": "motion-v1-r10",
                    "window": 6,
                }
            )
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(verb: str, out: Path, source: Path, /, **more: Any) -> Path:
    """Train with sizes for a second or two; `head={...}` and the like add to a section."""
    tree: dict[str, Any] = {
        "out": str(out),
        "data": {"train": [str(source)]},
        "model": {"depth": 1},
        "batch": {"seq_len": 64, "micro_batch_tokens": 128, "global_batch_tokens": 256},
        "optim": {"lr": 0.01},
        "schedule": {"max_steps": STEPS},
        "device": {"type": "cpu", "threads": 1},
        "log": {"every": 1},
        "save": {"every": 5, "keep_last": 9},
        "eval": {"every": 4},
    }
    if verb == "train":
        tree |= {"head": {"dropout": 0.0}}
        tree["eval"] = {"every": 4, "metric": "vessel_macro_f1"}
    for section, values in more.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    job = settings.build_job(f"classify {verb}", tree, "test")
    jobs.require_valid_job(f"classify {verb}", job)
    assert command_table.COMMANDS.find_row(f"classify {verb}").import_recipe_function()(job) == 0
    return out


def logged(folder: Path, kind: str, key: str) -> dict[int, float]:
    return {
        row["step"]: row[key] for row in json_reader.read_json_lines(folder / "metrics.jsonl") if row["kind"] == kind
    }


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", vessel_rows())


@pytest.fixture(scope="module")
def trained(rows: Path) -> Path:
    return run("train", rows.parent / "trained", rows)


@pytest.fixture(scope="module")
def pretrained(rows: Path) -> Path:
    return run("pretrain", rows.parent / "pretrained", rows)


def test_it_learns(trained: Path) -> None:
    losses = list(logged(trained, "train", "loss").values())
    assert len(losses) == STEPS and losses[-1] < 0.7 * losses[0]
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["finished"] and summary["valid_vessel_accuracy"] > 0.7
    assert {path.name for path in (trained / "best_model").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "classifier.json",
        "classifier.safetensors",
        "words.json",
        "split.json",
    }
    split = json.loads((trained / "best_model" / "split.json").read_text())
    assert not set(split["train"]) & set(split["valid"]) and len(split["valid"]) >= 3


def test_files_are_cut_as_the_training_data_were(trained: Path) -> None:
    classifier = TrajectoryClassifier(trained, DeviceSettings(type="cpu", threads=1))
    assert classifier.description.points == (6,)
    own = TrackSettings().with_window_lengths(classifier.description.points)
    assert (own.window_lengths, own.min_points) == ((6,), 6)
    assert TrackSettings(points=[30, 60]).with_window_lengths(classifier.description.points).window_lengths == (60, 30)


REGULARISED = {"dropout": 0.3, "block_dropout": 0.1, "crop": 0.5, "backbone_lr": 0.5}


@pytest.mark.process
@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("train", {"head": REGULARISED}),
        ("train", {"head": {"freeze_epochs": 1}, "optim": {"name": "muon", "matrix_lr": 0.01}}),
        ("pretrain", {}),
    ],
    ids=["regularised", "frozen at first", "pretrain"],
)
def test_continued_it_ends_the_same(rows: Path, tmp_path: Path, verb: str, more: dict[str, Any]) -> None:
    whole = run(verb, tmp_path / "whole", rows, **more)
    part = tmp_path / "part"
    part.mkdir()
    shutil.copytree(whole / "checkpoint-5", part / "checkpoint-5")
    run(verb, part, rows, **more)
    for kind, key in (("train", "loss"), ("eval", "valid_loss")):
        one, two = logged(whole, kind, key), logged(part, kind, key)
        assert two == {step: value for step, value in one.items() if step > 5}
    for file in ("model.safetensors", *(["classifier.safetensors"] if verb == "train" else [])):
        one, two = (load_file(folder / "final_model" / file) for folder in (whole, part))
        assert one.keys() == two.keys() and all(one[key].equal(two[key]) for key in one)


def test_a_frozen_model_stays_as_it_is(rows: Path, pretrained: Path, tmp_path: Path) -> None:
    head = {"freeze_epochs": 100}
    run("train", tmp_path / "run", rows, model={"path": str(pretrained)}, head=head)
    before, after = (load_file(one / "final_model" / "model.safetensors") for one in (pretrained, tmp_path / "run"))
    assert all(before[key].equal(after[key]) for key in before)
    head_now = load_file(tmp_path / "run" / "final_model" / "classifier.safetensors")
    assert head_now["out.bias"].abs().max() > 1e-4  # it began at zero


@pytest.mark.process
def test_pretraining_learns_and_hands_on_its_split(rows: Path, pretrained: Path, tmp_path: Path) -> None:
    losses = list(logged(pretrained, "train", "loss").values())
    assert losses[-1] < 0.9 * losses[0]
    for objective in ("next", "source"):
        losses = list(
            logged(run("pretrain", tmp_path / objective, rows, objective=objective), "train", "loss").values()
        )
        assert losses[-1] < 0.9 * losses[0]
    out = run("train", tmp_path / "train", rows, model={"path": str(pretrained)}, optim={"lr": 0.005}, seed=5)
    splits = [json.loads((one / "best_model" / "split.json").read_text()) for one in (pretrained, out)]
    assert splits[0] == splits[1]
    other = {**splits[0], "train": splits[0]["valid"], "valid": splits[0]["train"]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="was trained on 24 of the vessels that are held out now"):
        run(
            "train",
            tmp_path / "2",
            rows,
            model={"path": str(pretrained)},
            data={"train": [str(rows)], "split": str(tmp_path / "other.json")},
        )


def test_early_stopping_leaves_both_models(rows: Path, tmp_path: Path) -> None:
    out = run(
        "train", tmp_path / "run", rows, schedule={"max_steps": 60}, eval={"every": 2, "patience": 2, "min_delta": 0.5}
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stopped_early"] and summary["steps"] == 6 and summary["finished"]
    assert all((out / name / "classifier.json").is_file() for name in ("best_model", "final_model"))


def test_a_model_of_text_learns_words(rows: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tokenizer = tokenizers.load_tokenizer(train_tiny_tokenizer(tmp_path, write_tiny_text(tmp_path)))
    save_model(build_tiny_model(320, seq_len=64), base, tokenizer)
    head = {"attention": "causal", "pooling": "last"}
    out = run("train", tmp_path / "run", rows, model={"path": str(base)}, optim={"lr": 0.003}, head=head)
    before, after = (load_file(one / "model.safetensors") for one in (base, out / "final_model"))
    name = "model.embed_tokens.weight"
    assert before[name].shape[0] == 320 and after[name].shape[0] == 320 + 2 + 141
    assert (before[name] - after[name][:320]).abs().max() < 0.1
    fresh = after[name][320:]
    assert fresh.std() / before[name].std() == pytest.approx(1, abs=0.3)
    assert logged(out, "train", "loss")[STEPS] < 0.9 * logged(out, "train", "loss")[1]


def test_asked_again_it_says_the_same(rows: Path, trained: Path, tmp_path: Path) -> None:
    said = predict(trained, [rows], tmp_path / "said.jsonl")
    assert [row["id"] for row in said] == list(range(120))
    keys = {"id", "original_text", "true_label", "predicted_class", "class_name", "confidence", "probabilities"}
    assert keys <= said[0].keys() and said[5]["vessel"] == "v1"
    assert all(row["true_class"] == CLASSES[row["true_label"]] for row in said)
    held_out = json.loads((trained / "best_model" / "split.json").read_text())["valid"]
    accuracy = np.mean([row["predicted_class"] == row["true_label"] for row in said if row["vessel"] in held_out])
    assert accuracy == pytest.approx(json.loads((trained / "summary.json").read_text())["valid_accuracy"])

    classifier = TrajectoryClassifier(trained, DeviceSettings(type="cpu", threads=1), batch_tokens=64)
    texts = [str(row["original_text"]) for row in said[:9]]
    together = [answer["probabilities"] for answer in classifier.predict_batch(texts)]
    np.testing.assert_allclose([classifier.predict(text)["probabilities"] for text in texts], together, atol=2e-6)
    np.testing.assert_allclose([row["probabilities"] for row in said[:9]], together, atol=2e-6)
    assert classifier.predict(texts[0], abstain=1.0)["class_name"] == "ABSTAIN"

    leaky = " ".join(f"{word} Trawler" for word in texts[0].split())
    assert classifier.predict(leaky) == classifier.predict(texts[0])

    ships = predict(trained, [rows], tmp_path / "ships", level="vessel", abstain=0.999999)
    assert len(ships) == 30 and ships[0]["segments"] == 4 and ships[0]["predicted_class"] is None
    product = np.prod([row["probabilities"] for row in said[:4]], axis=0) ** 0.25
    np.testing.assert_allclose(ships[0]["probabilities"], product / product.sum(), atol=4e-6)
    sides = {row["split"] for row in said}
    assert sides == {"train", "valid"} == {ship["split"] for ship in ships}


def predict(model: Path, inputs: list[Path], out: Path, **more: Any) -> list[dict[str, Any]]:
    tree = {"model": str(model), "inputs": list(map(str, inputs)), "out": str(out), "device": {"threads": 1}, **more}
    command_table.COMMANDS.find_row("classify predict").import_recipe_function()(
        settings.build_job("classify predict", tree, "test")
    )
    return list(json_reader.read_json_lines(out if out.suffix else out / "predictions.jsonl"))


def numbered_rows() -> list[dict[str, Any]]:
    """Segments whose class shows in their numbers alone."""
    from anabatic_vessels.words.kinematic_features import FEATURE_GROUPS, FEATURE_NAMES

    draw = np.random.default_rng(0)
    found = vessel_rows()
    for row in found:
        row["text"] = "DT_60 SPD_50 TURN_0 MOVE_NONE"
        row["features"] = [
            float(row["label"]) + draw.normal(0, 0.2) if FEATURE_GROUPS[name] == "motion" else None
            for name in FEATURE_NAMES
        ]
    return found


def test_numbers_beside_words(trained: Path, tmp_path: Path) -> None:
    told = numbered_rows()
    numbers = write(tmp_path / "rows.jsonl", told)
    out = run("train", tmp_path / "run", numbers, head={"features": ["motion", "heading"]}, schedule={"max_steps": 20})
    said = predict(out, [numbers], tmp_path / "said.jsonl")
    assert np.mean([row["predicted_class"] == row["true_label"] for row in said]) > 0.9
    classifier = TrajectoryClassifier(out, DeviceSettings(type="cpu", threads=1))
    assert sum(classifier.predict(told[0]["text"])["probabilities"]) == pytest.approx(1, abs=1e-5)  # words alone
    with pytest.raises(UserError, match="numbers of shape"):
        classifier.predict(told[0]["text"], features=[1.0, 2.0])


BAD: list[tuple[str, str, Any, dict[str, Any], str]] = [
    ("no text", "train", [{"label": 1, "vessel": "a"}], {}, "rows.jsonl.*line 1|rows.jsonl:1"),
    ("label outside", "train", {"label": 14, "class": None}, {}, "14"),
    ("unknown words", "train", {"text": "DT_60 FOO BAR BAZ"}, {}, "are not in the vocabulary: "),
    ("other classes", "train", vessel_rows(6, ("Tug", "Tanker", "Dredger")), {"model": {"path": "TRAINED"}}, "lass"),
    ("other words", "train", {"words": "cell-v1-r10"}, {"model": {"path": "TRAINED"}}, "motion-v1-r10"),
    ("both sides", "train", {}, {"data": {"valid": ["SAME"]}}, "are in data.train and in data.valid"),
    ("no numbers", "train", {}, {"head": {"features": ["motion"]}}, "no `features`"),
    ("vessel trees alone", "train", {}, {"head": {"vessel_trees": 9}}, "head.vessel_trees is 9, head.trees is 0"),
    ("heads divided", "train", {}, {"parallel": {"tensor": 2}}, "parallel.tensor is 2, and a model of words"),
    ("no such file", "pretrain", {}, {"data": {"train": ["nowhere.jsonl"]}}, "nowhere.jsonl"),
]


@pytest.mark.parametrize(("verb", "wrong", "more", "told"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_bad_input(trained: Path, tmp_path: Path, verb: str, wrong: Any, more: dict[str, Any], told: str) -> None:
    changed = wrong if isinstance(wrong, list) else [{**row, **wrong} for row in vessel_rows(6)]
    path = write(tmp_path / "rows.jsonl", changed)
    text = json.dumps(more).replace("TRAINED", str(trained)).replace("SAME", str(path))
    tree = json.loads(text)
    if "data" in tree:
        tree["data"] = {"train": [str(path)], **tree["data"]}
    with pytest.raises(UserError, match=told) as caught:
        run(verb, tmp_path / "run", path, **tree)
    assert caught.value.hint and not list(tmp_path.glob("run/*_model"))


def test_bad_questions(trained: Path, tmp_path: Path) -> None:
    cell = write(tmp_path / "cell.jsonl", [{**row, "words": "cell-v1-r10"} for row in vessel_rows(3)])
    other = write(tmp_path / "other.jsonl", vessel_rows(3, ("Tug", "Tanker", "Dredger")))
    for file, told in ((cell, "motion-v1-r10"), (other, "classes")):
        with pytest.raises(UserError, match=told):
            predict(trained, [file], tmp_path / "said.jsonl")
    later = tmp_path / "later"
    shutil.copytree(trained / "best_model", later)
    about = (later / "classifier.json").read_text()
    (later / "classifier.json").write_text(about.replace("motion-v1", "motion-v9"))
    with pytest.raises(UserError, match="later was trained on other words: words of motion-v9-r10") as caught:
        predict(later, [write(tmp_path / "rows.jsonl", vessel_rows(3))], tmp_path / "said.jsonl")
    assert "train it again" in caught.value.hint
    with pytest.raises(UserError, match="no config.json"):
        predict(tmp_path, [cell], tmp_path / "said.jsonl")
    assert not (tmp_path / "said.jsonl").exists()


def test_the_answer_is_the_mean_of_network_and_trees(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from anabatic_vessels.model import forest
    from anabatic_vessels.words.kinematic_features import FEATURE_NAMES

    told = vessel_rows(36)
    for at, row in enumerate(told):
        row["features"] = [row["label"] + at % 4 / 8] * len(FEATURE_NAMES)
    source = write(tmp_path / "rows.jsonl", told)
    head = {"features": ["motion"], "trees": 5, "trees_share": 0.25, "vessel_trees": 3, "vessel_share": 0.4}
    out = run("train", tmp_path / "run", source, head=head, schedule={"max_steps": 4})
    folder = out / "best_model"
    about = json.loads((folder / "classifier.json").read_text())

    def said(**shares: float) -> np.ndarray:
        (folder / "classifier.json").write_text(json.dumps({**about, **shares}))
        return np.array([row["probabilities"] for row in predict(folder, [source], tmp_path / "said.jsonl")])

    numbers = np.array([row["features"] for row in told], dtype=np.float32)[:, : len(about["features"])]
    mean = 0.75 * said(trees_share=0.0, vessel_share=0.0) + 0.25 * forest.load_forest(folder).predict_probabilities(
        numbers
    )
    assert said(vessel_share=0.0) == pytest.approx(mean, abs=2e-6)
    days = numbers.reshape(36, 4, -1)
    own = np.concatenate([days.mean(1), days.min(1), days.max(1)], axis=1)
    vessels = forest.load_forest(folder, forest.VESSEL_FOREST_FILE).predict_probabilities(own).repeat(4, axis=0)
    both = mean**0.6 * vessels**0.4
    assert said() == pytest.approx(both / both.sum(1, keepdims=True), abs=4e-6)
    scored = json.loads((out / "summary.json").read_text())
    assert 0.3 < scored["valid_vessel_accuracy"] <= 1


def test_a_model_is_scored_on_vessels_it_does_not_know(rows: Path, trained: Path, tmp_path: Path, capsys: Any) -> None:
    def score(**more: Any) -> dict[str, Any]:
        tree = {
            "model": str(trained),
            "data": [str(rows)],
            "out": str(tmp_path / "eval"),
            "figures": False,
            "device": {"type": "cpu", "threads": 1},
            **more,
        }
        command_table.COMMANDS.find_row("classify eval").import_recipe_function()(
            settings.build_job("classify eval", tree, "test")
        )
        found: dict[str, Any] = json.loads((tmp_path / "eval" / "eval.json").read_text())
        return found

    with pytest.raises(UserError, match="was trained on"):
        score()
    assert not (tmp_path / "eval").exists()
    split = json.loads((trained / "best_model" / "split.json").read_text())
    assert list(score(seen="skip")["parts"]) == ["validation vessels"]
    marked = score(seen="mark")["parts"]
    assert marked["TRAINED ON"]["vessel"]["rows"] == len(split["train"])
    assert marked["validation vessels"]["vessel"]["rows"] == len(split["valid"])
    others = [{**row, "vessel": f"new {row['vessel']}"} for row in vessel_rows()]
    write(tmp_path / "others.jsonl", others)
    new = score(data=[str(tmp_path / "others.jsonl")])
    said = predict(trained, [tmp_path / "others.jsonl"], tmp_path / "said.jsonl")
    right = np.mean([row["predicted_class"] == row["true_label"] for row in said])
    assert new["parts"]["new vessels"]["segment"]["accuracy"] == pytest.approx(right, abs=1e-4)
    assert "majority class" in capsys.readouterr().out


def few_rows() -> list[dict[str, Any]]:
    """Three vessels of three classes, as in the source project's demo file."""
    return [row for row in vessel_rows() if row["vessel"] in ("v0", "v1", "v2")]


@pytest.mark.parametrize("verb", ["pretrain", "train"])
def test_vessels_that_cannot_be_held_out_are_trained_on(
    verb: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metric = {} if verb == "train" else {"eval": {"every": 4}}
    head = {"head": {"features": [], "dropout": 0.0}} if verb == "train" else {}
    out = run(verb, tmp_path / "run", write(tmp_path / "few.jsonl", few_rows()), **metric, **head)
    assert "of no class are there two vessels: the model gets no score" in caplog.text
    assert logged(out, "train", "loss")[STEPS] < logged(out, "train", "loss")[1]
    assert not logged(out, "eval", "valid_loss")
    assert (out / "final_model" / "split.json").is_file()


def test_nobody_is_held_out_when_asked(rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = run("train", tmp_path / "run", rows, data={"valid": ["none"]}, schedule={"max_steps": 2})
    assert "data.valid is none: the model gets no score" in caplog.text
    kept = json.loads((out / "final_model" / "split.json").read_text())
    assert (len(kept["train"]), kept["valid"]) == (30, [])
    numbers = write(tmp_path / "numbers.jsonl", numbered_rows())
    head = {"features": ["motion"], "trees": 3, "dropout": 0.0}
    out = run("train", tmp_path / "trees", numbers, data={"valid": ["none"]}, head=head, schedule={"max_steps": 2})
    assert predict(out, [numbers], tmp_path / "said.jsonl")
    with pytest.raises(UserError, match="data.valid is"):
        run("train", tmp_path / "other", rows, data={"valid": ["none", str(rows)]})


def test_the_guide_s_own_file_trains(shared_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """65 segments of 660 words of three vessels, with the names and the words of the source project."""
    source = shared_data / "ais" / "source_demo" / "train_dataset_demo.jsonl"
    sizes = {"seq_len": 1024, "micro_batch_tokens": 2048, "global_batch_tokens": 2048}
    words = run("pretrain", tmp_path / "words", source, batch=sizes, schedule={"max_steps": 2})
    out = run("train", tmp_path / "run", source, batch=sizes, schedule={"max_steps": 2}, model={"path": str(words)})
    assert caplog.text.count("of no class are there two vessels") == 2
    told = TrajectoryClassifier(str(out), DeviceSettings(type="cpu")).predict(
        json.loads(source.read_text().split("\n")[0])["text"]
    )
    assert sum(told["probabilities"]) == pytest.approx(1, abs=1e-3)
