"""Standstills are seen, told and ended; what workers leave is read; machines are ordered and compared."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import heartbeat, relaunch
from anabatic.core.errors import ConfigError
from anabatic.launch import rendezvous, rendezvous_endpoint
from anabatic.launch.local import worker_reports
from anabatic.launch.local.watchdog import HangWatchdog, find_innermost_frame

WORKER = """
import os, time
from anabatic.core.heartbeat import HEARTBEAT
HEARTBEAT.open()
HEARTBEAT.record_beat(int(os.environ["STEP"]))
def stands_here():
    time.sleep(600)
stands_here()
"""


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def worker(folder: Path, rank: int, step: int = 7) -> subprocess.Popen[bytes]:
    environment = {**os.environ, relaunch.REPORTS_VARIABLE: str(folder), "RANK": str(rank), "STEP": str(step)}
    process = subprocess.Popen([sys.executable, "-c", WORKER], env=environment)
    beat = folder / f"rank-{rank}.beat"
    deadline = time.monotonic() + 60
    while not (beat.exists() and (found := heartbeat.read_heartbeat(beat)) and found[1] == step):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    while psutil.Process(process.pid).status() != psutil.STATUS_SLEEPING:  # it is on its way from the beat to the sleep
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def test_nothing_counts_before_the_first_beat(tmp_path: Path) -> None:
    clock = Clock()
    watch = HangWatchdog(tmp_path, 5.0, clock=clock)
    clock.time = 1000.0
    assert not watch.is_hung()


def test_a_beat_begins_the_wait_anew(tmp_path: Path) -> None:
    clock = Clock()
    beat = tmp_path / "rank-0.beat"
    beat.touch()
    watch = HangWatchdog(tmp_path, 5.0, clock=clock)
    for moment in range(4):
        clock.time = 4.0 * moment
        os.utime(beat, (moment, moment))
        assert not watch.is_hung()
    clock.time += 5.1
    assert watch.is_hung()
    assert not HangWatchdog(tmp_path, 0.0, clock=clock).is_hung()


def test_who_has_ended_does_not_count(tmp_path: Path) -> None:
    clock = Clock()
    for name in ("rank-0.beat", "rank-0.code"):
        (tmp_path / name).touch()
    watch = HangWatchdog(tmp_path, 5.0, clock=clock)
    assert not watch.is_hung()
    clock.time = 100.0
    assert not watch.is_hung()


@pytest.mark.process
def test_stacks_are_told_and_all_are_ended(tmp_path: Path) -> None:
    workers = [worker(tmp_path, rank) for rank in (0, 1)]
    workers[1].send_signal(signal.SIGSTOP)
    watch = HangWatchdog(tmp_path, 5.0)
    stands = watch.dump_stacks_and_kill()
    assert [stand.rank for stand in stands] == [1, 0], "the stopped one comes first"
    assert "rank 1 stands after step 7: the process is stopped (SIGSTOP)" in stands[0].describe_position()
    assert "stands_here" in stands[1].describe_position() and "stands_here" in stands[1].stack
    assert [process.wait(60) for process in workers] == [-signal.SIGKILL, -signal.SIGKILL]
    assert not watch.is_hung(), "it is told once"


@pytest.mark.process
def test_a_process_that_does_not_train_yet_moves_by_its_cpu_time(tmp_path: Path) -> None:
    clock = Clock()
    process = worker(tmp_path, 0, heartbeat.STEP_NOT_TRAINING)
    watch = HangWatchdog(tmp_path, 5.0, clock=clock)
    assert not watch.is_hung()
    clock.time = 6.0
    assert watch.is_hung(), "it sleeps"
    assert "before the first step" in watch.dump_stacks_and_kill()[0].describe_position()
    process.wait(60)
    (tmp_path / "rank-0.beat").write_text(f"{os.getpid():>12}{heartbeat.STEP_NOT_TRAINING:>12}")
    watch = HangWatchdog(tmp_path, 5.0, clock=clock)
    assert not watch.is_hung()
    clock.time = 12.0
    start = time.process_time()
    while time.process_time() - start < 1.1:
        sum(range(1000))
    assert not watch.is_hung(), "this test has worked meanwhile"


@pytest.mark.process
def test_waiting_for_other_machines_is_no_hang(tmp_path: Path) -> None:
    """A lost machine has the seconds that --join-seconds grants it, however soon a hang counts."""
    clock = Clock()
    process = worker(tmp_path, 0, heartbeat.STEP_JOINING)
    (tmp_path / "rank-1.beat").write_text(f"{process.pid:>12}{heartbeat.STEP_JOINING:>12}")
    watch = HangWatchdog(tmp_path, 5.0, 60.0, clock)
    assert not watch.is_hung()
    clock.time = 59.0
    assert not watch.is_hung()
    clock.time = 61.0
    assert watch.is_hung() and watch.limit_seconds == 60.0
    (tmp_path / "rank-1.beat").write_text(f"{process.pid:>12}{heartbeat.STEP_NOT_TRAINING:>12}")
    assert not watch.is_hung(), "it has moved"
    clock.time = 67.0
    assert watch.is_hung() and watch.limit_seconds == 5.0, "one of the two has met the others, and stands still"
    assert "rank 0 stands where the processes meet" in "\n".join(
        stand.describe_position() for stand in watch.dump_stacks_and_kill()
    )
    process.wait(60)


def test_a_stack_is_read_from_its_innermost_frame() -> None:
    stack = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in other\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "b c.py", line 22 in wait\n  File "d.py", line 3 in main\n'
    )
    assert find_innermost_frame(stack) == "b c.py:22 wait"
    assert find_innermost_frame("") == ""


def test_a_beat_half_written_is_no_beat(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.beat"
    path.write_text("         123")
    assert heartbeat.read_heartbeat(path) is None


def test_a_start_that_wished_for_another_costs_no_restart(tmp_path: Path) -> None:
    first = worker_reports.create_attempt_folder(tmp_path, [0, 1])
    assert worker_reports.read_restart_reason(first) == ""
    (first / relaunch.RESTART_FILE).write_text("rank 1, out of memory: now half")
    assert worker_reports.read_restart_reason(first) == "rank 1, out of memory: now half"


def test_what_a_start_has_left(tmp_path: Path) -> None:
    first, second = (
        worker_reports.create_attempt_folder(tmp_path, [2, 3]),
        worker_reports.create_attempt_folder(tmp_path, [2, 3]),
    )
    assert worker_reports.list_attempt_folders(tmp_path) == [first, second]
    (first / "rank-2.error").write_text("error: connection lost\nhint: see the others")
    (first / "rank-2.code").write_text("1")
    (first / relaunch.FAILED_RANKS_FILE).write_text(json.dumps({"3": -9}))
    told = worker_reports.read_worker_report(first)
    assert told.silent_ranks == {3: -9}
    assert told.summarize_failure() == "rank 3 ended without a message (killed by SIGKILL)"
    (first / "rank-3.error").write_text("error: out of memory")
    told = worker_reports.read_worker_report(first)
    assert told.summarize_failure() == "[rank 3] out of memory"
    assert [line.splitlines()[0] for line in told.format_messages()] == [
        "[rank 3] error: out of memory",
        "[rank 2] error: connection lost",
    ]
    (second / relaunch.FAILED_RANKS_FILE).write_text(json.dumps({"2": -15, "3": 1}))
    assert worker_reports.read_worker_report(second).failed == {3: 1}, "the agent has ended rank 2 because of it"
    (second / relaunch.FAILED_RANKS_FILE).write_text(json.dumps({"2": -15}))
    assert worker_reports.read_worker_report(second).failed == {2: -15}
    (second / relaunch.FAILED_RANKS_FILE).unlink()
    assert worker_reports.read_worker_report(second).summarize_failure() == "a process on another machine failed"


def test_what_differs_between_machines_is_named() -> None:
    first = rendezvous.collect_job_facts({"optim.lr": 1e-4, "seed": 1})
    others = {"machine 1": rendezvous.collect_job_facts({"optim.lr": 2e-4, "seed": 1, "extra": True})}
    assert rendezvous.describe_differences(first, others, "recipe") == [
        "extra is missing on machine 0 and True on machine 1",
        "optim.lr is 0.0001 on machine 0 and 0.0002 on machine 1",
    ]
    assert rendezvous.describe_differences(first, others, "versions") == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nproc": 0}, "nproc is 0"),
        ({"max_nodes": 2}, "where do the machines meet"),
        ({"min_nodes": 3, "max_nodes": 2, "master_addr": "a"}, "3 to 2 machines"),
        ({"min_nodes": 2, "max_nodes": 2, "master_addr": "a", "node_rank": 2}, "--node-rank is 2 of 2"),
        ({"master_port": 70000}, "--master-port is 70000"),
        ({"hang_seconds": -1}, "--hang-seconds"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LaunchSettings(**given)  # type: ignore[arg-type]


def test_the_meeting_point_is_checked_first() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = LaunchSettings(min_nodes=2, max_nodes=2, node_rank=0, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ConfigError, match=f"port {port} cannot be opened here"):
            rendezvous_endpoint.build_agent_command(launch, 0)
        other = LaunchSettings(min_nodes=2, max_nodes=2, node_rank=1, master_addr="127.0.0.1", master_port=port)
        assert not rendezvous_endpoint.is_rendezvous_host(other)
        assert f"--rdzv-endpoint=127.0.0.1:{port}" in rendezvous_endpoint.build_agent_command(other, 0)
    with pytest.raises(ConfigError, match="nowhere.invalid has no address"):
        rendezvous_endpoint.build_agent_command(
            LaunchSettings(min_nodes=2, max_nodes=2, node_rank=1, master_addr="nowhere.invalid"), 0
        )
    assert rendezvous_endpoint.interface_variables(other)["GLOO_SOCKET_IFNAME"] == "lo"
    assert rendezvous_endpoint.is_local_address("127.0.0.1") and not rendezvous_endpoint.is_local_address("192.0.2.1")


@pytest.mark.process
def test_a_process_that_is_gone_does_not_hang(tmp_path: Path) -> None:
    """Its agent may be gone with it, and another one on its way."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    (tmp_path / "rank-0.beat").write_text(f"{process.pid:>12}{7:>12}")
    clock = Clock()
    watch = HangWatchdog(tmp_path, 5.0, clock=clock)
    assert not watch.is_hung()
    clock.time = 6.0
    assert not watch.is_hung()


def test_the_last_lines_are_those_of_this_start(tmp_path: Path) -> None:
    log = tmp_path / "rank-2.log"
    log.write_text("INFO before\n")
    os.utime(log, (1.0, 1.0))
    folder = worker_reports.create_attempt_folder(tmp_path, [2])
    assert worker_reports.read_last_log_lines(folder, log, 3) == []
    log.write_text("INFO before\nINFO one\n\nINFO two\n")
    assert worker_reports.read_last_log_lines(folder, log, 2) == ["INFO one", "INFO two"]
    assert worker_reports.read_last_log_lines(folder, tmp_path / "nowhere", 3) == []


def test_the_rank_that_failed_first_is_told_with_the_reason(tmp_path: Path) -> None:
    """Not the one with the lowest number; a long message is cut, its explanation is not."""
    folder = worker_reports.create_attempt_folder(tmp_path, [0, 1])
    for rank, text, moment in ((0, "connection lost", 2.0), (1, "x" * 500, 1.0)):
        path = folder / f"rank-{rank}.error"
        path.write_text(f"error: {text}\nhint: add --debug for the traceback\nhint: 50{rank}: look there")
        os.utime(path, (moment, moment))
    (folder / relaunch.FAILED_RANKS_FILE).write_text(json.dumps({"0": 1, "1": 1}))
    told = worker_reports.read_worker_report(folder)
    assert told.summarize_failure().startswith("[rank 1] xxx") and len(told.summarize_failure()) < 300
    assert told.failure_hint() == "hint: 501: look there"
