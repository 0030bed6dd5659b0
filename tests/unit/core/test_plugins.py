"""Plug-ins of another package: callbacks, trackers, rewards, readers and tasks, found as installed ones are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.config.sections.common import Data, LogSettings
from anabatic.core import plugins
from anabatic.core.callbacks import CallbackList, StopTraining, use_callbacks
from anabatic.core.errors import ConfigError, DataError, Failure
from anabatic.core.paths import RunFolder
from anabatic.data.readers.sources import parse_source, read_documents
from anabatic.evals.tasks.registry import read_task
from anabatic.rl.reward_worker import RewardWorker
from anabatic.train.metrics.recorder import MetricsRecorder
from unit.plugin_package import install_package, write_entry_points


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    install_package(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    plugins._read_entry_points.cache_clear()
    yield folder
    plugins._read_entry_points.cache_clear()
    sys.modules.pop("made_plugin", None)


def told() -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = sys.modules["made_plugin"].told
    return found


def test_callbacks_and_trackers_are_told(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    with MetricsRecorder(folder, LogSettings(sinks=["made"], callbacks=["recorder"], name="mine"), {}) as metrics:
        metrics.log_train_step(3, {"loss": 1.5})
        metrics.log_checkpoint(3, folder.root / "checkpoint-3", seconds=0.1)
    assert told() == [
        ("open", "mine"),
        ("numbers", 3, {"train/loss": 1.5}),
        ("step", 3, 1.5),
        ("save", 3, "checkpoint-3"),
        ("close",),
    ]


def test_a_callback_of_a_file_of_a_module_and_an_object(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "seen = []\nclass Mine:\n    def on_eval(self, step, metrics): seen.append(step)\nmade = Mine()\n"
    )
    seen: list[int] = []

    class Own:
        def on_eval(self, step: int, metrics: dict[str, object]) -> None:
            seen.append(step)

    with use_callbacks([Own()]):
        callbacks = CallbackList([f"{tmp_path}/mine.py:Mine", f"{tmp_path}/mine.py:made", "made_plugin:Recorder"])
    callbacks.call_method("on_eval", 7, 7, {})
    assert seen == [7] and len(callbacks) == 4 and sys.modules["anabatic_callbacks_mine"].seen == [7]
    assert len(CallbackList([])) == 0


def test_a_callback_stops_the_training_or_fails() -> None:
    class Stops:
        def on_step(self, step: int, metrics: object) -> None:
            raise StopTraining("the loss is low enough")

    class Fails:
        def on_step(self, step: int, metrics: object) -> None:
            raise KeyError("lost")

    with use_callbacks([Stops()]):
        callbacks = CallbackList([])
    callbacks.call_method("on_step", 5, 5, {})
    assert callbacks.stop_reason == "Stops: the loss is low enough"
    with use_callbacks([Fails()]):
        callbacks = CallbackList([])
    with pytest.raises(Failure, match="callback Fails failed in on_step after step 5: KeyError"):
        callbacks.call_method("on_step", 5, 5, {})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("recoder", 'Did you mean "?recorder'),
        ("absent", "cannot be imported"),
        ("nothing", "is no callback"),
        ("nowhere.py:Mine", "no such file"),
        ("made_plugin:Recordr", "Did you mean"),
        ("no_such_module:Mine", "cannot be loaded"),
        ("", "no callback"),
    ],
)
def test_callbacks_that_cannot_be_loaded(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CallbackList([spec])


@pytest.mark.parametrize(
    "code",
    ["syntax error here", "raise SystemError('no')", "class Mine:\n    def __init__(self, a): ...\n    on_step = 3"],
)
def test_files_of_callbacks_that_are_broken(code: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match="mine.py"):
        CallbackList([f"{tmp_path}/mine.py:Mine"])


def test_trackers_that_nobody_has() -> None:
    with pytest.raises(ConfigError, match="Did you mean") as caught:
        LogSettings(sinks=["mad"])
    assert "made" in caught.value.hint


@pytest.mark.process
def test_a_reward_of_a_package() -> None:
    point = plugins.find_plugin("anabatic.rewards", "vowels")
    assert point is not None
    with RewardWorker(point.module, 10) as worker:
        worker.require_function(point.attr)
        assert worker.call_function(point.attr, "a word", {}) == 2


def test_a_reader_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "a.LINES").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("one\ntwo\n")
    documents = list(read_documents(parse_source(str(tmp_path / "a.LINES")), Data()))
    assert [[turn["content"] for turn in one.messages or []] for one in documents] == [["one", "ONE"], ["two", "TWO"]]
    assert documents[1].location.endswith("a.LINES: row 2") and documents[0].row_format.name == "query and response"
    (text,) = read_documents(parse_source(str(tmp_path / "b.txt")), Data())
    assert text.text == "one\ntwo\n"  # built-in extensions stay as they are
    (tmp_path / "c.lines").write_text("one\nbroken\n")
    with pytest.raises(DataError, match=r"row 2: the reader of .lines files failed: ValueError: a broken line"):
        list(read_documents(parse_source(str(tmp_path / "c.lines")), Data()))
    (tmp_path / "d.line").write_text("one")
    with pytest.raises(DataError) as caught:
        list(read_documents(parse_source(str(tmp_path / "d.line")), Data()))
    assert 'Did you mean ".lines"' in caught.value.hint


def test_a_task_of_a_package(packages: Path) -> None:
    task, folder = read_task("made")
    assert (task.name, folder) == ("made", packages)
    with pytest.raises(ConfigError, match="gives no path"):
        read_task("none")
    with pytest.raises(ConfigError, match="made"):
        read_task("mad")


def test_two_packages_with_one_name(packages: Path) -> None:
    write_entry_points(packages, "other-plugin", "[anabatic.rewards]\nvowels = other_plugin:vowels\n")
    plugins._read_entry_points.cache_clear()
    with pytest.raises(ConfigError, match="made-plugin.*other-plugin|other-plugin.*made-plugin"):
        plugins.find_plugin("anabatic.rewards", "vowels")
