"""Callbacks of real trainings: told in order, in one process and in two; they stop a training, and may fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import anabatic
from anabatic.core.errors import ConfigError, Failure
from e2e.small_training import make_place, train_small

SETTINGS: dict[str, Any] = {
    "tuner": "lora",
    "schedule": {"max_steps": 6},
    "batch": {"seq_len": 64, "micro_batch_tokens": 128, "global_batch_tokens": 256},
    "device": {"type": "cpu", "threads": 1},
    "log": {"every": 1, "samples": 0},
    "eval": {"every": 3},
    "save": {"every": 2, "background": "off"},
}
FILE = '''
import json
from pathlib import Path

from anabatic import StopTraining


class Notes:
    """Writes what it is told beside itself."""

    def write(self, *words):
        with open(Path(__file__).with_name("notes.jsonl"), "a") as notes:
            notes.write(json.dumps(words) + "\\n")

    def on_start(self, folder, config):
        self.write("start", Path(folder).name, config["tuner"])

    def on_eval(self, step, metrics):
        self.write("eval", step, metrics["valid_loss"] > 0)
        raise StopTraining("enough")

    def on_end(self, step):
        self.write("end", step)
'''


class Told(anabatic.Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_start(self, folder: Path, config: dict[str, Any]) -> None:
        self.told.append(("start", folder.name, config["tuner"]))

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        assert metrics["step"] == step and metrics["loss"] > 0
        self.told.append(("step", step))

    def on_eval(self, step: int, metrics: dict[str, Any]) -> None:
        assert metrics["valid_loss"] > 0
        self.told.append(("eval", step))

    def on_save(self, step: int, path: Path) -> None:
        assert (path / "manifest.json").is_file()
        self.told.append(("save", step))

    def on_end(self, step: int) -> None:
        self.told.append(("end", step))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("callbacks"))


def train(place: Path, out: str, **more: Any) -> anabatic.Run:
    return train_small(place, out, **{**SETTINGS, **more})


def test_callbacks_are_told_in_order(place: Path) -> None:
    told = Told()
    run = train(place, "told", callbacks=[told])
    steps = [("step", step) for step in range(1, 7)]
    assert [one for one in told.told if one[0] == "step"] == steps and run.is_finished
    assert told.told[0] == ("start", "told", "lora") and told.told[-1] == ("end", 6)
    assert [one for one in told.told if one[0] in ("eval", "save")] == [
        ("save", 2),
        ("eval", 3),
        ("save", 4),
        ("save", 6),
        ("eval", 6),
    ]
    plain = train(place, "plain")
    weights = [next((one.folder / "final_model").glob("*.safetensors")).read_bytes() for one in (run, plain)]
    assert weights[0] == weights[1], "being told changes nothing"


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_callback_of_a_file_stops_every_process(place: Path, nproc: int) -> None:
    folder = place / f"stop-{nproc}"
    folder.mkdir()
    (folder / "mine.py").write_text(FILE)
    log = {**SETTINGS["log"], "callbacks": [f"{folder}/mine.py:Notes"]}
    run = train(place, f"stop-{nproc}/run", log=log, nproc=nproc)
    notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    assert notes == [["start", "run", "lora"], ["eval", 3, True], ["end", 3]]
    assert run.is_finished and run.summary["steps"] == 3 and run.summary["stopped_early"]
    assert (run.folder / "final_model" / "adapter_model.safetensors").is_file()
    assert "early stopping after step 3: callback" in (run.folder / "rank-0.log").read_text()


def test_a_callback_that_fails_loses_nothing(place: Path) -> None:
    class Fails:
        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            if step == 5:
                raise OSError("the disk of the notes is full")

    with pytest.raises(Failure, match="callback Fails failed in on_step after step 5: OSError: the disk"):
        train(place, "fails", callbacks=[Fails()])
    assert anabatic.open_run(place / "fails").checkpoints[-1]["step"] == 4
    told = Told()
    run = train(place, "fails", callbacks=[told])
    assert run.is_finished and [one[1] for one in told.told if one[0] == "step"] == [5, 6]
    assert [row["step"] for row in run.read_metrics("train")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"callbacks": [Told()], "nproc": 2}, "device.nproc is 2"),
        ({"callbacks": ["mine.py:Notes"]}, "the text"),
        ({"callbacks": [object()]}, "is no callback"),
        ({"callbacks": 3}, "is no callback"),
        ({"log": {"callbacks": ["nowhere.py:Notes"]}}, "no such file"),
        ({"log": {"callbacks": ["nothing"]}}, "there is no callback"),
    ],
)
def test_mistakes(place: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(place, "mistakes", **more)
    assert not (place / "mistakes" / "metrics.jsonl").is_file()
