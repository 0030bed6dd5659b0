"""Pipelines: plans are checked whole, finished stages skipped, interrupted ones continued.

The stages run a small program in place of `anabatic`: it takes the same arguments, notes that it ran, and behaves as
the file `behave` beside it says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from anabatic.config import load, yaml_file
from anabatic.config.pipeline import PipelineJob
from anabatic.core import jsonl, log
from anabatic.core.errors import ConfigError, Failure
from anabatic.recipes import pipeline

PROGRAM = """
import json, pathlib, signal, sys, time
import yaml
here = pathlib.Path(__file__).parent
file = pathlib.Path(sys.argv[-1])
job = yaml.safe_load(file.read_text())
name = file.parent.name
with open(here / "ran", "a") as ran:
    ran.write(name + "\\n")
behaviour = dict(line.split() for line in (here / "behave").read_text().splitlines())
how = behaviour.get(name, "good")
out = pathlib.Path(job.get("out") or file.parent)
out.mkdir(parents=True, exist_ok=True)
if how == "fail":
    sys.exit(3)
if how == "slow":
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    (here / "waiting").touch()
    while not stop:
        time.sleep(0.02)
    time.sleep(0.5)
    (here / "signals").write_text(str([int(number) for number in stop]))
    how = "stop"
if how == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (here / "waiting").touch()
    time.sleep(60)
(out / "checkpoint").write_text("saved")
for made in ("tokenizer.json", "tokenizer_config.json", "eval.json"):
    (out / made).touch()
if sys.argv[1] in ("pretrain", "sft"):
    for model in ("best_model", "final_model"):
        (out / model).mkdir(exist_ok=True)
        (out / model / "config.json").touch()
        (out / model / "tokenizer.json").touch()
    (out / "summary.json").write_text(json.dumps({"finished": how == "good"}))
"""


class Bench:
    """A pipeline in a folder, with the stand-in program."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.out = root / "out"
        (root / "program.py").write_text(PROGRAM)
        self.behave()
        self.tree: dict[str, Any] = {
            "out": str(self.out),
            "title": "Bench",
            "vars": {"corpus": "books", "steps": "5"},
            "stages": {
                "tok": {"command": "tokenizer train", "job": {"data": {"train": ["${corpus}"]}}},
                "base": {
                    "command": "pretrain",
                    "job": {
                        "tokenizer": "${tok}",
                        "data": {"train": ["${corpus}/a.txt"]},
                        "schedule": {"max_steps": "${steps}"},
                    },
                },
                "sft": {"command": "sft", "job": {"model": "${base}", "data": {"train": ["c.jsonl"]}}},
                "talk": {"command": "chat", "job": {"model": "${sft}", "prompt": ["costs $$5"]}},
            },
        }

    def job(self) -> PipelineJob:
        built = load.build("run", self.tree, "bench")
        assert isinstance(built, PipelineJob)
        return built

    def behave(self, **stages: str) -> None:
        (self.root / "behave").write_text("".join(f"{name} {how}\n" for name, how in stages.items()))

    def run(self, **options: Any) -> int:
        program = [sys.executable, str(self.root / "program.py")]
        return pipeline.run(self.job(), program=program, **options)

    def ran(self) -> list[str]:
        """Stages that ran since the last question."""
        path = self.root / "ran"
        names = path.read_text().split() if path.exists() else []
        path.unlink(missing_ok=True)
        return names

    def read(self, stage: str) -> dict[str, Any]:
        return yaml_file.read(self.out / stage / "stage.yaml").tree


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    log.setup()
    return Bench(tmp_path)


ALL = ["tok", "base", "sft", "talk"]


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


def test_events_and_seconds(bench: Bench) -> None:
    bench.run()
    rows = [row for row in jsonl.read(bench.out / "pipeline.jsonl") if row["event"] == "stage"]
    assert [(row["stage"], row["state"]) for row in rows[:4]] == [
        ("tok", "run"),
        ("tok", "done"),
        ("base", "run"),
        ("base", "done"),
    ]
    assert rows[1]["seconds"] > 0 and rows[1]["code"] == 0
    assert json.loads((bench.out / "tok" / "stage.json").read_text())["state"] == "done"


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


def test_a_variable_changes_only_its_users(bench: Bench) -> None:
    bench.run()
    bench.ran()
    assert bench.run(vars={"steps": "6"}) == 0
    assert bench.ran() == ["base", "sft", "talk"]
    assert bench.read("base")["schedule"]["max_steps"] == 6


def test_titles_change_nothing(bench: Bench) -> None:
    bench.run()
    bench.ran()
    bench.tree["stages"]["sft"]["title"] = "Another heading"
    assert bench.run() == 0
    assert bench.ran() == []


def test_from_and_only(bench: Bench) -> None:
    bench.run()
    bench.ran()
    assert bench.run(start="sft") == 0
    assert bench.ran() == ["sft", "talk"]
    assert bench.run(only=["base"]) == 0
    assert bench.ran() == ["base"]
    assert bench.run() == 0
    assert bench.ran() == ["sft", "talk"]  # made from an older base
    with pytest.raises(ConfigError, match='no stage "bas". Did you mean "base"'):
        bench.run(start="bas")
    with pytest.raises(ConfigError, match="both --from and --only"):
        bench.run(start="base", only=["base"])


def test_from_starts_over_where_the_plain_command_goes_on(bench: Bench) -> None:
    bench.behave(base="stop")
    assert bench.run() == 1
    (bench.out / "base" / "mine").touch()
    assert bench.run() == 1
    assert (bench.out / "base" / "mine").exists()
    bench.behave()
    assert bench.run(start="base") == 0
    assert not (bench.out / "base" / "mine").exists()
    assert (bench.out / "base.old" / "mine").exists()


def test_from_that_fails_half_way_is_finished_by_the_plain_command(bench: Bench) -> None:
    bench.run()
    bench.ran()
    bench.behave(sft="fail")
    assert bench.run(start="base") == 3
    assert bench.ran() == ["base", "sft"]
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["sft", "talk"]


def test_a_failing_stage_stops_and_the_rest_goes_on_later(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.behave(base="fail")
    assert bench.run() == 3
    assert bench.ran() == ["tok", "base"]
    assert "stage base failed with exit code 3" in capsys.readouterr().err
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]


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


def test_a_broken_stage_json_means_run_again(bench: Bench) -> None:
    bench.run()
    bench.ran()
    (bench.out / "tok" / "stage.json").write_text('{"state": "do')
    assert bench.run() == 0
    assert bench.ran() == ALL  # what was made from it may not fit the new one


@pytest.mark.parametrize("lost", ["tok/tokenizer.json", "base/best_model", "base/final_model/tokenizer.json"])
def test_what_a_stage_made_is_gone(bench: Bench, capsys: pytest.CaptureFixture[str], lost: str) -> None:
    bench.run()
    bench.ran()
    path = bench.out / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    capsys.readouterr()
    assert bench.run(dry_run=True) == 0
    first, _, file = lost.partition("/")
    assert re.search(rf"run   {first}: .*\({file}.* is missing\)", capsys.readouterr().err)
    assert bench.run() == 0
    assert bench.ran() == ALL[ALL.index(first) :] and path.exists()


def test_a_lost_model_with_checkpoints_is_made_from_them(bench: Bench) -> None:
    bench.run()
    bench.ran()
    (bench.out / "base" / "checkpoint-5").mkdir()
    shutil.rmtree(bench.out / "base" / "final_model")
    assert bench.run() == 0
    assert (bench.out / "base" / "checkpoint-5").is_dir() and not (bench.out / "base.old").exists()


def test_interrupted_after_a_change_and_back(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run()
    bench.ran()
    changed = {"max_steps": 7}
    before = bench.tree["stages"]["base"]["job"]["schedule"]
    bench.tree["stages"]["base"]["job"]["schedule"] = changed
    bench.behave(base="stop")
    assert bench.run() == 1
    assert bench.ran() == ["base"]
    page = (bench.out / "report.html").read_text()
    assert page.count("</i>out of date<") == 2 and page.count("</i>up to date<") == 1
    capsys.readouterr()
    bench.run(dry_run=True)
    assert "run   sft: " in capsys.readouterr().err

    bench.tree["stages"]["base"]["job"]["schedule"] = before
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]
    err = capsys.readouterr().err
    assert "not asked for" not in err and "asked for" not in err


def start(bench: Bench) -> subprocess.Popen[str]:
    """Run the bench's pipeline in a process of its own and wait until a stage is busy."""
    recipe = bench.root / "recipe.yaml"
    recipe.write_text(load.dump(bench.job()))
    code = (
        "import sys; from anabatic.config import load; from anabatic.core import log; "
        "from anabatic.recipes import pipeline; log.setup(); "
        f"sys.exit(pipeline.run(load.load('run', [{str(recipe)!r}]), "
        f"program=[sys.executable, {str(bench.root / 'program.py')!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if (bench.root / "waiting").exists():
            return process
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no stage became busy: {process.communicate()[1]}")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_lets_the_stage_save(bench: Bench, number: signal.Signals, code: int) -> None:
    bench.behave(base="slow")
    process = start(bench)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "to continue, run the same command again" in err
    handed_on = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
    assert (bench.root / "signals").read_text() == str([int(handed_on)])  # once, not twice
    assert (bench.out / "base" / "checkpoint").is_file()
    assert bench.ran() == ["tok", "base"]
    bench.behave()
    assert bench.run() == 0
    assert bench.ran() == ["base", "sft", "talk"]


def test_a_second_interrupt_kills(bench: Bench) -> None:
    bench.behave(base="stubborn")
    process = start(bench)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_two_runs_in_one_folder(bench: Bench) -> None:
    bench.behave(base="slow")
    process = start(bench)
    try:
        with pytest.raises(Failure, match="another `anabatic run` works in"):
            bench.run()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert os.path.exists(bench.out / ".lock")
