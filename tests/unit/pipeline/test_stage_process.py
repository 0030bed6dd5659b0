"""The processes of a pipeline's stages: which are forked, and that a forked one is as good as one that was started."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from anabatic.core import relaunch
from anabatic.launch.local import forkserver
from anabatic.recipes.pipeline import stage_process
from anabatic.recipes.pipeline.stage_plan import StagePlan, plan_stages
from anabatic.recipes.pipeline.stage_process import StageProcess, can_be_forked
from unit.pipeline.bench import Bench


def plan(root: Path, **devices: object) -> list[StagePlan]:
    """The stages of the bench, with device settings by stage."""
    bench = Bench(root)
    for name, device in devices.items():
        bench.tree["stages"][name]["job"]["device"] = device
    return plan_stages(bench.job(), {})


def test_stages_that_compute_on_a_processor_are_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver, "_ACCELERATOR_FILES", ("null",))  # so that `auto` is no processor
    cpu = {"type": "cpu"}
    stages = plan(tmp_path, base=cpu, sft={"type": "cpu", "nproc": 2}, talk=cpu)
    assert [stage.name for stage in stages if can_be_forked(stage)] == ["base", "talk"]
    modules = stage_process.list_preload_modules(stages).split(",")
    assert modules == ["anabatic.recipes.training.pretrain", "anabatic.recipes.chat.session", "anabatic.cli.app"]
    assert stage_process.list_preload_modules(stages[:2]) == "", "one stage alone imports for itself"
    assert stage_process.list_preload_modules(plan(tmp_path, base={"type": "npu"}, talk=cpu)) == ""


def write_recipe(folder: Path, **more: object) -> Path:
    folder.mkdir()
    (folder / "a.txt").write_text("the wind moves upward and the birds follow\n" * 200)
    recipe = folder / "stage.yaml"
    recipe.write_text(f"out: {folder / 'out'}\nvocab_size: 300\ndata: {{train: [{folder / 'a.txt'}]}}\n")
    return recipe


@pytest.mark.process
def test_a_forked_stage_makes_what_a_started_one_makes(tmp_path: Path) -> None:
    made = []
    for name, preload in (("forked", "anabatic.cli.app"), ("started", "")):
        recipe = write_recipe(tmp_path / name)
        with StageProcess(relaunch.PROGRAM_COMMAND, preload) as process:
            assert process.run(["tokenizer", "train"], recipe, can_fork=True) == 0
            assert (process._forkserver is not None) == bool(preload)
            assert process.run(["tokenizer", "train"], tmp_path / "nowhere.yaml", can_fork=True) == 2
        made.append((recipe.parent / "out" / "tokenizer.json").read_bytes())
    assert made[0] == made[1]


@pytest.mark.process
def test_a_server_that_cannot_fork_is_said_and_the_stage_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "a")
    with StageProcess(relaunch.PROGRAM_COMMAND, "anabatic.nothing_of_that_name") as process:
        assert process.run(["tokenizer", "train"], recipe, can_fork=True) == 0
    assert "nothing_of_that_name" in capfd.readouterr().err
    assert (recipe.parent / "out" / "tokenizer.json").is_file()


def wait_for_worker() -> psutil.Process:
    """Wait until the forked stage runs; it reads a pipe in which nothing comes."""
    while True:
        for child in psutil.Process().children(recursive=True):
            if child.parent() != psutil.Process() and child.name() == "anabatic":
                return child
        time.sleep(0.01)


@pytest.mark.process
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("victim", "number", "code"), [("worker", signal.SIGKILL, 137), ("server", signal.SIGKILL, 137)]
)
def test_what_kills_a_forked_stage_is_its_code(tmp_path: Path, victim: str, number: int, code: int) -> None:
    pipe = tmp_path / "stage.yaml"
    os.mkfifo(pipe)
    killed: list[psutil.Process] = []

    def kill() -> None:
        worker = wait_for_worker()
        target = worker if victim == "worker" else worker.parent()
        assert target is not None
        killed.append(worker)
        target.send_signal(number)

    with StageProcess(relaunch.PROGRAM_COMMAND, "anabatic.cli.app") as process:
        thread = threading.Thread(target=kill)
        thread.start()
        assert process.run(["tokenizer", "train"], pipe, can_fork=True) == code
        thread.join()
    deadline = time.monotonic() + 60
    while killed[0].is_running() and killed[0].status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the stage has outlived its server"
        time.sleep(0.02)


@pytest.mark.process
@pytest.mark.timeout(240)
def test_a_signal_reaches_the_forked_stage_once_and_no_further_one_runs(tmp_path: Path) -> None:
    pipe = tmp_path / "stage.yaml"
    os.mkfifo(pipe)

    def interrupt() -> None:
        wait_for_worker()
        os.kill(os.getpid(), signal.SIGTERM)

    with StageProcess(relaunch.PROGRAM_COMMAND, "anabatic.cli.app") as process:
        thread = threading.Thread(target=interrupt)
        thread.start()
        assert process.run(["tokenizer", "train"], pipe, can_fork=True) == 143
        thread.join()
        assert process.run(["tokenizer", "train"], pipe, can_fork=True) == 143
