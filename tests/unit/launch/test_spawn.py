"""`--device.nproc 2` with the real agent of torch; the recipe is replaced in the workers by a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from anabatic_testing.tiny_corpora import write_byte_tokenizer

pytestmark = pytest.mark.process


# Imported by every interpreter at its start, because its folder is on PYTHONPATH.
CUSTOMIZE = """
import sys, types

def run(job):
    import os, pathlib, signal, time
    from anabatic.core.errors import DataError
    rank = int(os.environ["RANK"])
    here = pathlib.Path(__file__).parent
    how = os.environ["HOW"]
    if how == "same":
        raise DataError("no corpus", "give one")
    if how == "one" and rank == 1:
        raise DataError("rank one is unhappy", "cheer it up")
    if how == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    (here / f"rank-{rank}").write_text(f"{os.environ['WORLD_SIZE']} {os.environ['LOCAL_RANK']} {job.seed}")
    (here / f"cores-{rank}").write_text(str(os.sched_getaffinity(0)))
    if how == "good":
        return
    stop = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    (here / f"waiting-{rank}").touch()
    while not stop:
        time.sleep(0.02)
    time.sleep(0.3)
    (here / f"saved-{rank}").touch()

module = types.ModuleType("anabatic.recipes.training.pretrain")
module.run = run
sys.modules["anabatic.recipes.training.pretrain"] = module
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "HOW": how, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    text = folder / "a.txt"
    text.write_text("the wind moves upward\n")
    words = ["pretrain", "--tokenizer", write_byte_tokenizer(folder / "t"), "--data.train", text]
    words += ["--device.nproc", "2", "--seed", "7"]
    return subprocess.Popen(
        [sys.executable, "-m", "anabatic", *map(str, words)], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_every_rank_gets_the_resolved_job_and_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0)) * 2
    monkeypatch.setenv("ANABATIC_CORES", f"{first};{last}")
    process = start(tmp_path, "good")
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "starting 2 processes\n")
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2 0 7", "2 1 7"]
    assert [(tmp_path / f"cores-{rank}").read_text() for rank in (0, 1)] == [str({first}), str({last})]


def test_one_message_when_all_ranks_say_the_same(tmp_path: Path) -> None:
    process = start(tmp_path, "same")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.count("no corpus") == 1 and "Traceback" not in err


def test_the_failing_rank_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "one")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "[rank 1] error: rank one is unhappy\nhint: cheer it up\n" in err and "Traceback" not in err


def test_a_killed_rank_is_reported(tmp_path: Path) -> None:
    process = start(tmp_path, "kill")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "error: rank 1 of 2 ended without a message (killed by SIGKILL)" in err and "Traceback" not in err


def wait_for(*paths: Path) -> None:
    for _ in range(2400):
        if all(path.exists() for path in paths):
            return
        time.sleep(0.05)
    raise AssertionError(f"never came: {paths}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_lets_every_rank_save(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "wait")
    wait_for(tmp_path / "waiting-0", tmp_path / "waiting-1")
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_workers_leave_when_the_launcher_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "wait")
    wait_for(tmp_path / "waiting-0", tmp_path / "waiting-1")
    agent = psutil.Process(process.pid).children()
    everybody = [*agent, *agent[0].children(recursive=True)]
    process.kill()
    wait_for(tmp_path / "saved-0", tmp_path / "saved-1")
    process.communicate(timeout=120)
    gone, alive = psutil.wait_procs(everybody, timeout=120)
    assert len(gone) >= 3 and not alive


def test_workers_end_with_the_agent_that_watches_them(tmp_path: Path) -> None:
    """Nobody would collect them, and on a device they would hold its memory."""
    process = start(tmp_path, "wait")
    wait_for(tmp_path / "waiting-0", tmp_path / "waiting-1")
    (agent,) = psutil.Process(process.pid).children()
    workers = agent.children(recursive=True)
    agent.kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "rank 0, 1 of 2 ended without a message (killed by SIGKILL)" in err
    gone, alive = psutil.wait_procs(workers, timeout=120)
    assert len(gone) >= 2 and not alive  # with the process that has forked them
    assert not (tmp_path / "saved-0").exists()
