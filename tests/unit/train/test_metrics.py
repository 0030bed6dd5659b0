"""What a run writes while it trains."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.config.sections.common import LogSettings
from anabatic.core import json_reader, log
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.paths import RunFolder
from anabatic.train.metrics import recorder
from anabatic.train.metrics.recorder import MetricsRecorder

ROW = {
    "loss": 3.21456,
    "lr": 0.02,
    "grad_norm": 0.8125,
    "tokens": 983_040,
    "tokens_per_s": 12_345.0,
    "mfu": 0.312,
    "memory_bytes": 3 * 2**30,
    "data_wait": 0.001,
    "eta_s": 185.0,
    "skipped": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create_folder()
    return run


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    log.setup_logging()
    return stream.getvalue


class Recorder:
    """A tracker of the test's own."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any], resumed_step: int) -> None:
        self.opened = (folder, name, config, resumed_step)
        self.seen: list[Any] = []
        Recorder.last = self

    last: Recorder

    def log_numbers(self, step: int, values: dict[str, float]) -> None:
        self.seen.append((step, values))

    def log_text(self, step: int, name: str, text: str) -> None:
        self.seen.append((step, name, text))

    def close(self) -> None:
        self.seen.append("closed")


class Broken(Recorder):
    """A tracker whose server has gone."""

    def log_numbers(self, step: int, values: dict[str, float]) -> None:
        raise TimeoutError("server gone\nfor good")


def test_a_step_is_recorded_and_printed(folder: RunFolder, printed: Callable[[], str]) -> None:
    with MetricsRecorder(folder, LogSettings(), {}, max_steps=2000) as metrics:
        metrics.log_train_step(120, ROW)
        metrics.log_evaluation(120, {"valid_loss": 3.3, "valid_bpb": 1.29871, "tokens": 200_000})
    train, evaluation = json_reader.read_json_lines(folder.metrics)
    assert train == {"step": 120, "time": train["time"], "kind": "train", **ROW}
    assert evaluation["kind"] == "eval" and evaluation["valid_bpb"] == 1.29871
    assert printed().splitlines() == [
        "step  120/2000 | loss 3.2146 | lr 2.00e-02 | grad 0.812 | 12.3K tok/s | MFU 31.2 % | mem 3.0 GiB "
        "| wait 0.1 % | ETA 3m05s | skipped 2",
        "step  120/2000 | valid loss 3.3000 | 1.2987 bits per byte | over 200.0K tokens",
    ]


def test_hardly_any_padding_is_not_worth_a_word(folder: RunFolder, printed: Callable[[], str]) -> None:
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        metrics.log_train_step(7, {"loss": 1.0, "padding": 0.009})
        metrics.log_train_step(8, {"loss": 1.0, "padding": 0.25})
    assert printed() == "step 7 | loss 1.0000\nstep 8 | loss 1.0000 | pad 25.0 %\n"
    assert [row["padding"] for row in json_reader.read_json_lines(folder.metrics)] == [0.009, 0.25]


def test_unknown_values_are_left_out_of_the_line(folder: RunFolder, printed: Callable[[], str]) -> None:
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        metrics.log_train_step(7, {"loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    assert printed() == "step 7 | loss nan | grad inf\n"
    (row,) = json_reader.read_json_lines(folder.metrics)
    assert (row["loss"], row["grad_norm"], row["mfu"]) == (None, None, None)
    assert "NaN" not in folder.metrics.read_text()


def test_samples_keep_every_character(folder: RunFolder, printed: Callable[[], str]) -> None:
    text = "half \ud83d, bell \x07, 中文\nnext" + "x" * 300
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        metrics.log_sample(5, "<|im_start|>", text)
    (row,) = json_reader.read_json_lines(folder.metrics)
    assert (row["kind"], row["prompt"], row["text"]) == ("sample", "<|im_start|>", text)
    line = printed()
    assert line.startswith("sample: <|im_start|>half ?, bell \\u0007, 中文\\nnext") and line.endswith("x…\n")
    assert line.count("\n") == 1 and "\x07" not in line


def test_events_and_summary(folder: RunFolder) -> None:
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        metrics.log_event("device", name="cpu", threads=2)
        metrics.write_summary({"steps": 3, "valid_loss": float("nan"), "nested": [float("inf"), 1.5]})
    (event,) = json_reader.read_json_lines(folder.events)
    assert event == {"time": event["time"], "event": "device", "name": "cpu", "threads": 2}
    assert json.loads(folder.summary.read_text()) == {"steps": 3, "valid_loss": None, "nested": [None, 1.5]}


def test_a_summary_that_cannot_be_written_leaves_the_older_one(folder: RunFolder) -> None:
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        metrics.write_summary({"steps": 1})
        with pytest.raises((Failure, TypeError)):
            metrics.write_summary({"steps": object()})
    assert json.loads(folder.summary.read_text()) == {"steps": 1}


def test_silent_does_nothing(tmp_path: Path, printed: Callable[[], str]) -> None:
    with MetricsRecorder.make_silent() as metrics:
        metrics.log_train_step(1, ROW)
        metrics.log_evaluation(1, {})
        metrics.log_sample(1, "a", "b")
        metrics.log_event("start")
        metrics.write_summary({})
    assert printed() == "" and not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_resuming_cuts_off_what_is_trained_again(folder: RunFolder) -> None:
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        for step in range(1, 8):
            metrics.log_train_step(step, {"loss": 1 / step})
        metrics.log_sample(4, "p", "\ud800")
        metrics.log_event("start")
    before = folder.metrics.read_bytes().splitlines(keepends=True)
    with open(folder.metrics, "ab") as file:
        file.write(b'{"step": 3, "kind": "tra')  # killed while writing
    with MetricsRecorder(folder, LogSettings(), {}, resumed_step=4) as metrics:
        metrics.log_train_step(5, {"loss": 0.5})
    after = folder.metrics.read_bytes().splitlines(keepends=True)
    assert after[:-1] == [*before[:4], before[7]]
    assert [row["step"] for row in json_reader.read_json_lines(folder.metrics)] == [1, 2, 3, 4, 4, 5]
    assert len(list(json_reader.read_json_lines(folder.events))) == 1
    MetricsRecorder(folder, LogSettings(), {}).close()
    assert folder.metrics.read_bytes() == b""


def test_an_evaluation_that_the_checkpoint_does_not_know_is_made_again(folder: RunFolder) -> None:
    with MetricsRecorder(folder, LogSettings(), {}) as metrics:
        for step in (2, 4):
            metrics.log_train_step(step, {"loss": 1 / step})
            metrics.log_evaluation(step, {"valid_loss": 1 / step})
    with MetricsRecorder(folder, LogSettings(), {}, resumed_step=4, evaluated_step=2) as metrics:
        metrics.log_evaluation(4, {"valid_loss": 0.25})
    rows = [(row["kind"], row["step"]) for row in json_reader.read_json_lines(folder.metrics)]
    assert rows == [("train", 2), ("eval", 2), ("train", 4), ("eval", 4)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 20)), st.integers(1, 20))
def test_only_steps_up_to_the_checkpoint_survive(steps: list[int], resumed: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(root)
        rows = [json.dumps({"step": step, "row": i}) + "\n" for i, step in enumerate(steps)]
        folder.metrics.write_text("".join(rows))
        MetricsRecorder(folder, LogSettings(), {}, resumed_step=resumed).close()
        kept = [row for row, step in zip(rows, steps, strict=True) if step <= resumed]
        assert folder.metrics.read_text() == "".join(kept)


def test_trackers_receive_finite_numbers(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recorder.TRACKERS, "wandb", Recorder)
    with MetricsRecorder(folder, LogSettings(sinks=["wandb"]), {"seed": 3}, resumed_step=2) as metrics:
        metrics.log_train_step(3, {"loss": 1.5, "lr": float("nan"), "mfu": None, "note": "x"})
        metrics.log_evaluation(3, {"valid_loss": 1.25, "tokens": 7})
        metrics.log_sample(3, "p", "q")
    assert Recorder.last.opened == (folder.root, "run", {"seed": 3}, 2)
    assert Recorder.last.seen == [
        (3, {"train/loss": 1.5}),
        (3, {"valid/loss": 1.25, "valid/tokens": 7.0}),
        (3, "sample/p", "pq"),
        "closed",
    ]


def test_a_broken_tracker_is_switched_off(
    folder: RunFolder, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(recorder.TRACKERS, "wandb", Broken)
    monkeypatch.setitem(recorder.TRACKERS, "swanlab", Recorder)
    with MetricsRecorder(folder, LogSettings(sinks=["wandb", "swanlab"]), {}) as metrics:
        metrics.log_train_step(1, {"loss": 1.0})
        metrics.log_train_step(2, {"loss": 0.5})
    warnings = [line for line in printed().splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: wandb is switched off for this run: TimeoutError: server gone for good; metrics.jsonl continues"
    ]
    assert len(list(json_reader.read_json_lines(folder.metrics))) == 2
    assert Recorder.last.seen[-1] == "closed" and len(Recorder.last.seen) == 3


@pytest.mark.parametrize("kind", ["swanlab", "wandb", "tensorboard"])
def test_a_missing_package_is_named(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setitem(sys.modules, kind, None)  # as Python itself marks what cannot be imported
    with pytest.raises(ConfigError, match=f"^log.sinks {kind} needs {kind}, which is not installed$") as caught:
        MetricsRecorder(folder, LogSettings(sinks=[kind]), {})
    assert caught.value.hint == "pip install 'anabatic[track]'"


def test_a_tracker_keeps_its_run_when_resuming(tmp_path: Path) -> None:
    first = recorder._load_run_id(tmp_path / "id", 0)
    assert len(first) == 21 and first.isalnum() and first == first.lower()
    assert recorder._load_run_id(tmp_path / "id", 10) == first
    assert recorder._load_run_id(tmp_path / "id", 0) != first


@pytest.mark.process
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    code = """
import sys
from anabatic.config.sections.common import LogSettings
from anabatic.core.paths import RunFolder
from anabatic.train.metrics.recorder import MetricsRecorder
folder = RunFolder(sys.argv[1])
for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):
    with MetricsRecorder(folder, LogSettings(sinks=["tensorboard"]), {}, resumed_step=resumed) as metrics:
        for step in steps:
            metrics.log_train_step(step, {"loss": 1 / step})
        metrics.log_sample(steps[-1], "p", "<b>q</b>")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(str(folder.root / "tensorboard"))
events.Reload()
print([event.step for event in events.Scalars("train/loss")], events.Tags()["tensors"])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1, 2, 3, 4] ['sample/p/text_summary']"


@pytest.mark.process
def test_neither_metrics_nor_report_load_torch() -> None:
    code = (
        "import sys, anabatic.train.metrics.recorder, anabatic.train.report.page\n"
        "heavy = {'torch', 'numpy', 'transformers', 'wandb', 'swanlab', 'tensorboard'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
