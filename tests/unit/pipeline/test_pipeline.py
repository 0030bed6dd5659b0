"""Pipelines: plans are checked whole, finished stages skipped, interrupted ones continued.

The stages run a small program in place of `anabatic`: it takes the same arguments, notes that it ran, and behaves as
the file `behave` beside it says.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anabatic.config.loading import settings
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.stop_signals import SECOND_SIGINT_SECONDS
from unit.pipeline.bench import ALL, Bench


@pytest.mark.process
def test_all_stages_run_in_order_and_then_none(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run() == 0
    assert bench.ran() == ALL
    assert bench.read("tok")["data"]["train"] == ["books"]
    base = bench.read("base")
    assert base["tokenizer"] == str(bench.out / "tok") and base["out"] == str(bench.out / "base")
    assert base["data"]["train"] == ["books/a.txt"] and base["schedule"]["max_steps"] == 5
    assert bench.read("talk")["prompt"] == ["costs $5"]
    assert (bench.out / "report.html").is_file()
    assert "report: " in capsys.readouterr().err

    assert bench.run() == 0
    assert bench.ran() == []
    assert capsys.readouterr().err.count("skipped, done and unchanged") == 4


@pytest.mark.process
def test_events_and_seconds(bench: Bench) -> None:
    bench.run()
    rows = [row for row in json_reader.read_json_lines(bench.out / "pipeline.jsonl") if row["event"] == "stage"]
    assert [(row["stage"], row["state"]) for row in rows[:4]] == [
        ("tok", "run"),
        ("tok", "done"),
        ("base", "run"),
        ("base", "done"),
    ]
    assert rows[1]["seconds"] > 0 and rows[1]["code"] == 0
    assert json.loads((bench.out / "tok" / "stage.json").read_text())["state"] == "done"


@pytest.mark.process
def test_a_changed_stage_and_its_dependents_run_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run()
    bench.ran()
    bench.tree["stages"]["sft"]["job"]["optim"] = {"lr": 1e-5}
    capsys.readouterr()
    assert bench.run(dry_run=True) == 0
    err = capsys.readouterr().err
    assert "run   sft: " in err and "(changed: optim.lr)" in err
    assert "run   talk: " in err and "(changed: stage sft)" in err
    assert "skip  base: " in err
    assert bench.ran() == []
    assert bench.run() == 0
    assert bench.ran() == ["sft", "talk"]
    assert (bench.out / "sft.old" / "checkpoint").is_file()  # what was saved before is not lost


@pytest.mark.process
def test_a_variable_changes_only_its_users(bench: Bench) -> None:
    bench.run()
    bench.ran()
    assert bench.run(vars={"steps": "6"}) == 0
    assert bench.ran() == ["base", "sft", "talk"]
    assert bench.read("base")["schedule"]["max_steps"] == 6


@pytest.mark.process
def test_titles_change_nothing(bench: Bench) -> None:
    bench.run()
    bench.ran()
    bench.tree["stages"]["sft"]["title"] = "Another heading"
    assert bench.run() == 0
    assert bench.ran() == []


@pytest.mark.process
def test_a_failing_stage_stops_and_the_rest_goes_on_later(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.behave(base="fail")
    assert bench.run() == 3
    assert bench.ran() == ["tok", "base"]
    assert "stage base failed with exit code 3" in capsys.readouterr().err
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]


@pytest.mark.process
def test_a_training_stage_is_done_only_when_it_says_so(bench: Bench) -> None:
    bench.behave(base="stop")
    assert bench.run() == 1
    assert bench.ran() == ["tok", "base"]
    (bench.out / "base" / "mine").touch()
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]
    assert (bench.out / "base" / "mine").exists()  # it went on in its folder
    assert not (bench.out / "base.old").exists()


@pytest.mark.process
def test_an_explicit_out_is_what_a_reference_means(bench: Bench, tmp_path: Path) -> None:
    bench.tree["stages"]["base"]["job"]["out"] = str(tmp_path / "elsewhere")
    assert bench.run() == 0
    assert bench.read("sft")["model"] == str(tmp_path / "elsewhere")
    assert bench.run() == 0
    assert bench.ran() == ALL


@pytest.mark.parametrize(
    ("stage", "key", "value", "message"),
    [
        ("base", "tokenizer", "${sft}", "refers to ${sft}, a stage that runs later"),
        ("base", "tokenizer", "${base}", "refers to its own stage"),
        ("base", "tokenizer", "${tik}", 'nothing is called ${tik}. Did you mean "tok"?'),
        ("base", "tokenizer", "${tok", "without `}`"),
        ("base", "tokenizer", "${empty}", "vars.empty is empty, and stages.base.job.tokenizer needs it"),
        ("base", "seed", "${corpus}", 'stages.base.job: seed is "books", expected a whole number'),
        ("base", "sed", 1, 'stages.base.job: sed is not a known setting. Did you mean "seed"?'),
        ("talk", "device", {"nproc": 0}, "stages.talk.job: device.nproc is 0"),
    ],
)
def test_wrong_settings_stop_before_the_first_stage(
    bench: Bench, stage: str, key: str, value: Any, message: str
) -> None:
    bench.tree["vars"]["empty"] = ""
    bench.tree["stages"][stage]["job"][key] = value
    with pytest.raises(ConfigError) as caught:
        bench.run()
    assert message in str(caught.value) and caught.value.hint
    assert bench.ran() == [] and not bench.out.exists()


def test_wrong_pipelines(bench: Bench) -> None:
    with pytest.raises(ConfigError, match='no variable "step". Did you mean "steps"'):
        bench.run(vars={"step": "1"})
    bench.tree["vars"]["tok"] = "x"
    with pytest.raises(ConfigError, match='"tok" is both a variable and a stage'):
        bench.run()
    del bench.tree["vars"]["tok"]
    bench.tree["stages"]["../x"] = bench.tree["stages"]["tok"]
    with pytest.raises(ConfigError, match="cannot be a folder"):
        bench.run()
    del bench.tree["stages"]["../x"]
    bench.tree["stages"]["talk"]["command"] = "chta"
    with pytest.raises(ConfigError, match='no command "chta". Did you mean "chat"'):
        bench.run()
    bench.tree["stages"]["talk"]["command"] = "run"
    with pytest.raises(ConfigError, match='no command "run"'):
        bench.run()


def test_an_unused_empty_variable_is_no_mistake(bench: Bench) -> None:
    bench.tree["vars"]["later"] = ""
    assert bench.run(dry_run=True) == 0


def test_folders_that_cannot_be_used(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bench.tree["out"] = str(tmp_path / "file" / "out")
    with pytest.raises(Failure, match="cannot write"):
        bench.run()
    assert bench.ran() == []


def start(bench: Bench) -> subprocess.Popen[str]:
    """Run the bench's pipeline in its own process and wait until a stage is busy."""
    recipe = bench.root / "recipe.yaml"
    recipe.write_text(settings.dump_job(bench.job()))
    code = (
        "import sys; from anabatic.config.loading import settings; from anabatic.core import log; "
        "from anabatic.recipes.pipeline import runner; log.setup_logging(); "
        f"sys.exit(runner.run(settings.load_job('run', [{str(recipe)!r}]), "
        f"program=[sys.executable, {str(bench.root / 'program.py')!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    for _ in range(2400):
        if (bench.root / "waiting").exists():
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no stage became busy: {process.communicate()[1]}")


@pytest.mark.process
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_lets_the_stage_save(bench: Bench, number: signal.Signals, code: int) -> None:
    bench.behave(base="slow")
    process = start(bench)
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.05)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "to continue, run the same command again" in err
    handed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert (bench.root / "signals").read_text() == str([int(handed_on)])  # once, not twice
    assert (bench.out / "base" / "checkpoint").is_file()
    assert bench.ran() == ["tok", "base"]
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]


@pytest.mark.process
def test_a_second_interrupt_kills(bench: Bench) -> None:
    bench.behave(base="stubborn")
    process = start(bench)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while "a second Ctrl-C kills it" not in (line := process.stderr.readline()):
        assert line, "it has ended"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):  # copies of the first, and what never kills
        process.send_signal(number)
        time.sleep(0.1)
    assert process.poll() is None
    time.sleep(SECOND_SIGINT_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130


@pytest.mark.process
def test_two_runs_in_one_folder(bench: Bench) -> None:
    bench.behave(base="slow")
    process = start(bench)
    try:
        with pytest.raises(Failure, match="another `anabatic run` works in"):
            bench.run()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert os.path.exists(bench.out / ".lock")
