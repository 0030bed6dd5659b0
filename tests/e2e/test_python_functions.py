"""`anabatic.sft(...)`: what the command does, bit for bit; again in one process, in a thread, in two processes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import anabatic
from anabatic.api import job_functions
from anabatic.config.loading import command_table
from anabatic.config.sections.common import DeviceSettings
from anabatic.core import log
from anabatic.core.errors import ConfigError, MultipleErrors, UserError
from e2e import command, warm
from e2e.small_training import make_place, train_small

SETTINGS: dict[str, Any] = {
    "tuner": "lora",
    "schedule": {"max_steps": 4},
    "batch": {"seq_len": 64, "micro_batch_tokens": 128, "global_batch_tokens": 256},
    "device": {"type": "cpu", "threads": 1},
}
LONG = {"schedule": {"max_steps": 60}}
OPTIONS = (
    "--tuner lora --schedule.max-steps 4 --batch.seq-len 64 --batch.micro-batch-tokens 128 "
    "--batch.global-batch-tokens 256 --device.type cpu --device.threads 1"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("python"))


def train(place: Path, out: str, **more: Any) -> anabatic.Run:
    return train_small(place, out, **{**SETTINGS, **more})


PROGRAM = """
import anabatic, signal, sys
try:
    run = anabatic.sft(model={model!r}, data={data!r}, out={out!r}, **{settings!r})
except anabatic.core.errors.Failure as error:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "the program's own handlers are not back"
    sys.exit(f"goes on: {{error}}")
"""


def start_program(place: Path, out: str, settings: dict[str, Any]) -> command.Running:
    """Start a program that calls `anabatic.sft`, forked as commands are."""
    program = place / f"{out}.py"
    paths = {"model": str(place / "model"), "data": str(place / "rows.jsonl"), "out": str(place / out)}
    program.write_text(PROGRAM.format(**paths, settings=settings))
    started = warm.plain().start([sys.executable, str(program)], {**os.environ, "GOMP_SPINCOUNT": "1000"}, Path.cwd())
    assert started is not None
    return started


def weights(folder: Path) -> str:
    (file,) = (folder / "final_model").glob("*.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_function_trains_what_the_command_trains(place: Path) -> None:
    first, second = train(place, "first"), train(place, "second")
    found: list[anabatic.Run] = []
    thread = threading.Thread(target=lambda: found.append(train(place, "thread")))
    thread.start()
    thread.join()
    args = f"sft --model {place}/model --data {place}/rows.jsonl --out {place}/command {OPTIONS}"
    subprocess.run([sys.executable, "-m", "anabatic", *args.split()], check=True, capture_output=True)
    assert {weights(run.folder) for run in (first, second, *found)} == {weights(place / "command")}
    assert len(found) == 1 and first.is_finished
    assert [row["step"] for row in first.read_metrics("train")] == [1, 4] and len(first.metrics) > 2
    assert first.config["lora"]["r"] == 16 and first.checkpoints[-1]["step"] == 4 and first.report.is_file()
    assert "finished" in repr(first) and "<table>" in first._repr_html_()
    lines = (first.folder / "rank-0.log").read_text().splitlines()
    assert not [line for line in lines if "second" in line], "the log of a run ends with the run"
    assert log.LOGGER.handlers, "messages of the next run are shown"


def test_two_processes(place: Path) -> None:
    run = train(place, "two", nproc=2)
    assert run.is_finished and (run.folder / "rank-1.log").is_file()


def test_a_pretraining_shows_its_samples(place: Path) -> None:
    run = anabatic.pretrain(
        tokenizer=place / "tokenizer",
        data=place / "text.jsonl",
        out=place / "base",
        model={"depth": 1, "width": 64},
        eval={"every": 2, "sample_prompts": ["the wind"]},
        **{name: value for name, value in SETTINGS.items() if name != "tuner"},
    )
    assert isinstance(run, anabatic.Run) and run.samples
    assert all(row["prompt"] == "the wind" and isinstance(row["text"], str) for row in run.samples)
    assert {row["kind"] for row in run.metrics} == {"train", "eval", "sample"}


def test_a_run_answers_and_is_opened_again(place: Path) -> None:
    train(place, "answers")
    greedy = {"temperature": 0, "max_new_tokens": 4}
    with anabatic.open_run(place / "answers") as run:
        first = run.chat("the wind", sampling=greedy, device={"type": "cpu"})
        assert isinstance(first, str) and run._dialogue is not None and len(run._dialogue.messages) == 2
        run.chat("and then?")
        assert len(run._dialogue.messages) == 4
        assert run.chat("the wind", sampling=greedy, device=DeviceSettings(type="cpu")) == first
    again = anabatic.open_run(place / "answers").resume()  # finished: nothing is left to do
    assert again.is_finished and again.command == "sft"
    (place / "other").mkdir()
    (place / "other" / "config.yaml").write_text("a: 1\n")
    with pytest.raises(ConfigError, match="not have the settings of any command"):
        anabatic.open_run(place / "other").resume()
    with pytest.raises(ConfigError, match="holds no run"):
        anabatic.open_run(place)


@pytest.mark.parametrize(("nproc", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_saves_and_the_next_call_continues(place: Path, nproc: int, number: signal.Signals) -> None:
    name, settings = f"stopped-{nproc}-{number.name}", {**SETTINGS, **LONG, "log": {"every": 1}, "nproc": nproc}
    process = start_program(place, name, settings)
    said = command.interrupt(process, place / name, 3, number, 1).err
    assert "goes on: anabatic sft ended with exit code" in said
    assert f"{number.name}: saving at the end of this step" in said and "Logging error" not in said
    stopped = anabatic.open_run(place / name)
    assert not stopped.is_finished and stopped.checkpoints[-1]["step"] < 60
    whole = f"whole-{nproc}-{number.name}"
    for process in [start_program(place, out, settings) for out in (name, whole)]:
        command.end(process)
    assert anabatic.open_run(place / name).is_finished and weights(place / name) == weights(place / whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "m"}, 'modle is not a known setting. Did you mean "model"?'),
        ({"optim": {"lrr": 1}}, "optim.lrr is not a known setting"),
        ({"optim.lr": -1}, "optim.lr is -1"),
        ({"optim": 1}, "optim is 1, expected a section"),
        ({"optim": 1, "optim.lr": 2}, "optim is given as a value and as a section"),
        ({"data": "a", "data.train": "b"}, "data.train is given twice"),
        ({"seed": object()}, "seed is"),
        ({"model": "/nowhere/model", "data": "/nowhere.jsonl"}, "/nowhere"),
    ],
)
def test_mistakes_are_exceptions_with_a_hint(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        anabatic.sft(**options)
    errors = caught.value.errors if isinstance(caught.value, MultipleErrors) else [caught.value]
    assert message in str(caught.value) and all(error.hint for error in errors)
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [f"hint: {error.hint}" for error in errors]


def test_the_package_offers_the_commands() -> None:
    assert {"sft", "pretrain", "tokenizer_train", "classify_train", "open_run", "run_command"} <= set(dir(anabatic))
    assert anabatic.sft is anabatic.sft and anabatic.sft.__name__ == "sft"
    assert "schedule" in str(__import__("inspect").signature(anabatic.sft)) and "LoRA" in (anabatic.sft.__doc__ or "")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = anabatic.nonsense
    with pytest.raises(ConfigError, match="unknown command"):
        anabatic.run_command("nonsense")
    for name, row in job_functions.list_functions().items():
        assert callable(getattr(anabatic, name)) and row in command_table.COMMANDS


def test_importing_the_package_imports_next_to_nothing() -> None:
    code = (
        "import sys, anabatic\n"
        "heavy = {'torch', 'numpy', 'yaml', 'dataclasses', 'transformers'} & set(sys.modules)\n"
        "print(sorted(heavy | {name for name in sys.modules if name.startswith('anabatic')}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout == "['anabatic']\n", done.stderr
