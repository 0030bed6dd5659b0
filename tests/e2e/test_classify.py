"""Vessel classifiers through the commands: learned, killed and continued, in one process and in two, asked again."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from anabatic.core import jsonl
from e2e import command
from e2e.home import Home, Options

pytestmark = pytest.mark.slow

CLASSES = ["Ferry", "Trawler", "Yacht"]
SPEEDS = {0: ("SPD_100", "SPD_105"), 1: ("SPD_20", "SPD_25"), 2: ("SPD_50", "SPD_55")}
STEPS = 12


def vessel_rows(vessels: int = 30, classes: list[str] = CLASSES) -> list[dict[str, object]]:
    """Segments of vessels whose class shows in their speeds, now and then."""
    draw, rows = random.Random(1), []
    for vessel in range(vessels):
        label = vessel % 3
        for segment in range(4):
            points = []
            for _ in range(draw.randint(3, 6)):
                speed = draw.choice(SPEEDS[label if draw.random() < 0.8 else draw.randrange(3)])
                points.append(f"DT_60 {speed} TURN_0 MOVE_NONE")
            rows.append({
                "text": " ".join(points), "label": label, "class": classes[label], "vessel": f"v{vessel}",
                "source_file": f"v{vessel}.csv", "start": 1000 * segment, "words": "motion-v1-r10",
            })  # fmt: skip
    return rows


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rows") / "rows.jsonl", vessel_rows())


def words(verb: str, out: Path, data: object, processes: int = 1, more: Options | None = None) -> list[object]:
    given: Options = {
        "out": out, "data": data, "depth": 1, "batch.seq-len": 64, "batch.micro-batch-tokens": 128,
        "batch.global-batch-tokens": 256, "optim.lr": 0.01, "schedule.max-steps": STEPS, "device.type": "cpu",
        "device.threads": 1, "device.nproc": processes, "log.every": 1, "save.every": 5, "eval.every": 4,
    }  # fmt: skip
    if verb == "train":
        given |= {"head.dropout": 0, "eval.metric": "vessel_macro_f1"}
    told = [word for name, value in (given | (more or {})).items() for word in (f"--{name}", value)]
    return ["classify", verb, *told]


@pytest.fixture(scope="module")
def trained(home: Home, rows: Path) -> tuple[Path, Path]:
    """The same training in one process and in two."""
    one, two = home.root / "classify", home.root / "classify2"
    home.together(words("train", one, rows), words("train", two, rows, 2))
    return one, two


def test_it_learns_and_two_processes_equal_one(trained: tuple[Path, Path]) -> None:
    for folder in trained:
        losses = command.losses(folder)
        assert len(losses) == STEPS and losses[STEPS] < 0.7 * losses[1]
        summary = command.summary(folder)
        assert summary["finished"] and summary["valid_vessel_accuracy"] > 0.7
        assert {path.name for path in (folder / "best_model").iterdir()} == {
            "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
            "classifier.json", "classifier.safetensors", "words.json", "split.json",
        }  # fmt: skip
    one, two = (list(command.losses(folder).values()) for folder in trained)
    assert two == pytest.approx(one, rel=5e-3, abs=1e-4)
    held_out = [[loss for _, loss in command.evaluations(folder)] for folder in trained]
    assert held_out[1] == pytest.approx(held_out[0], rel=5e-3, abs=1e-4)
    split = json.loads((trained[0] / "best_model" / "split.json").read_text())
    assert not set(split["train"]) & set(split["valid"]) and len(split["valid"]) >= 3


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("train", {"head.dropout": 0.3, "head.block-dropout": 0.1, "head.crop": 0.5, "head.backbone-lr": 0.5}),
        ("train", {"head.freeze-epochs": 1, "optim.name": "muon", "optim.matrix-lr": 0.01}),
        ("pretrain", {}),
    ],
    ids=["train", "frozen at first", "pretrain"],
)
def test_killed_and_continued(home: Home, rows: Path, tmp_path: Path, verb: str, more: Options) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = home.start(*words(verb, whole, rows, more=more))
    command.interrupt(home.start(*words(verb, killed, rows, more=more)), killed, 6, signal.SIGKILL, -9)
    home.anabatic(*words(verb, killed, rows, more=more))
    command.end(process)
    assert command.losses(killed) == command.losses(whole)
    assert command.evaluations(killed) == command.evaluations(whole)
    files = ["model.safetensors"] + (["classifier.safetensors"] if verb == "train" else [])
    for file in files:
        one, two = (load_file(folder / "final_model" / file) for folder in (whole, killed))
        assert one.keys() == two.keys() and all(one[key].equal(two[key]) for key in one)


def test_pretraining_carries_over(home: Home, rows: Path, tmp_path: Path) -> None:
    runs = [words("pretrain", tmp_path / way, rows, more={"objective": way}) for way in ("masked", "next", "source")]
    for ended, folder in zip(home.together(*runs), tmp_path.iterdir(), strict=False):
        del ended
        losses = list(command.losses(folder).values())
        assert losses[-1] < 0.9 * losses[0]
    base = tmp_path / "masked"
    out = tmp_path / "train"
    told = home.anabatic(*words("train", out, rows, more={"model.path": base, "optim.lr": 0.005})).err
    assert "vessels are held out as" in told
    splits = [json.loads((folder / "best_model" / "split.json").read_text()) for folder in (base, out)]
    assert splits[0] == splits[1]
    before, after = (load_file(folder / "final_model" / "model.safetensors") for folder in (base, out))
    assert before.keys() == after.keys() and before["model.embed_tokens.weight"].shape[0] > 100
    assert command.summary(out)["valid_vessel_accuracy"] > 0.7


def test_a_model_of_text_learns_words(home: Home, base: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more: Options = {"model.path": base, "optim.lr": 0.003, "head.attention": "causal", "head.pooling": "last"}
    told = home.anabatic(*words("train", out, rows, more=more)).err
    assert "words are new to the tokenizer of" in told
    before, after = (load_file(folder / "final_model" / "model.safetensors") for folder in (base, out))
    name = "model.embed_tokens.weight"
    assert before[name].shape[0] == 320 and after[name].shape[0] > 440
    assert (before[name] - after[name][:320]).abs().max() < 0.1 * before[name].abs().max()
    fresh = after[name][322:]
    assert 0.3 < fresh.std() / before[name].std() < 3 and len(set(map(tuple, fresh.tolist()))) == len(fresh)
    assert command.losses(out)[STEPS] < 0.8 * command.losses(out)[1]


def test_asked_again_it_says_the_same(home: Home, rows: Path, trained: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "said.jsonl"
    home.anabatic("classify", "predict", rows, "-m", trained[0], "-o", out, "--device.type", "cpu")
    said = list(jsonl.read(out))
    assert [row["id"] for row in said] == list(range(120))
    keys = {"id", "original_text", "true_label", "predicted_class", "class_name", "confidence", "probabilities"}
    assert keys <= said[0].keys() and said[5]["vessel"] == "v1"
    assert np.mean([row["predicted_class"] == row["true_label"] for row in said]) > 0.6
    held_out = json.loads((trained[0] / "best_model" / "split.json").read_text())["valid"]
    mine = [row for row in said if row["vessel"] in held_out]
    accuracy = np.mean([row["predicted_class"] == row["true_label"] for row in mine])
    assert accuracy == pytest.approx(command.summary(trained[0])["valid_accuracy"])

    from anabatic.config.shared import Device
    from anabatic.infer.classify import TrajectoryClassifier

    classifier = TrajectoryClassifier(trained[0], Device(type="cpu"), batch_tokens=64)
    texts = [str(row["original_text"]) for row in said[:9]]
    alone = [classifier.predict(text)["probabilities"] for text in texts]
    together = [answer["probabilities"] for answer in classifier.predict_batch(texts)]
    np.testing.assert_allclose(alone, together, atol=2e-6)
    np.testing.assert_allclose([row["probabilities"] for row in said[:9]], together, atol=2e-6)
    assert classifier.predict(texts[0], abstain=1.0)["class_name"] == "ABSTAIN"

    options = ("--level", "vessel", "--abstain", 0.999999, "--device.type", "cpu")
    ships = [json.loads(line) for line in home.anabatic(
        "classify", "predict", rows, "-m", trained[0], *options).out.splitlines()]  # fmt: skip
    assert len(ships) == 30 and ships[0]["segments"] == 4 and ships[0]["predicted_class"] is None
    mean = np.mean([row["probabilities"] for row in said[:4]], axis=0)
    np.testing.assert_allclose(ships[0]["probabilities"], mean, atol=2e-6)


def test_bad_input(home: Home, rows: Path, trained: tuple[Path, Path], tmp_path: Path) -> None:
    good = vessel_rows(6)
    no_text = write(tmp_path / "no_text.jsonl", [{"label": 1, "vessel": "a"}])
    outside = write(tmp_path / "outside.jsonl", [{**row, "label": 14, "class": None} for row in good])
    strange = write(tmp_path / "strange.jsonl", [{**row, "text": "DT_60 FOO BAR BAZ"} for row in good])
    other = write(tmp_path / "other.jsonl", vessel_rows(6, ["Tug", "Tanker", "Dredger"]))
    cell = write(tmp_path / "cell.jsonl", [{**row, "words": "cell-v1-r10"} for row in good])
    run = trained[0]
    cases: list[tuple[list[object], str]] = [
        (words("train", tmp_path / "1", no_text), "no_text.jsonl"),
        (words("train", tmp_path / "2", outside), "outside.jsonl"),
        (words("train", tmp_path / "3", strange), "are not in the vocabulary: "),
        (words("train", tmp_path / "4", other, more={"model.path": run}), "classes"),
        (words("train", tmp_path / "5", cell, more={"model.path": run}), "motion-v1-r10"),
        (["classify", "predict", cell, "-m", run], "motion-v1-r10"),
        (["classify", "predict", other, "-m", run], "classes"),
        (["classify", "predict", "-m", run, "--text", ""], "no words"),
        (["classify", "predict", "-m", home.root / "base", rows], "does not exist"),
        (words("train", tmp_path / "6", rows, more={"data.valid": rows}), "are in data.train and in data.valid"),
        (words("train", tmp_path / "7", rows, more={"head.features": "motion"}), "the row has no `features`"),
        (words("train", tmp_path / "8", rows, more={"head.dropout": 1.0}), "--head.dropout is 1"),
    ]
    for start in range(0, len(cases), 4):
        some = cases[start : start + 4]
        for ended, (_, told) in zip(home.together(*(one for one, _ in some), code=2), some, strict=True):
            assert told in ended.err and "hint:" in ended.err, ended.err
    assert not list(tmp_path.glob("*/best_model"))
