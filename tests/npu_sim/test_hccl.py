"""Simulated HCCL: every collective against gloo, order, refusals, ranks that go wrong, two machines."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabatic.sim import segment
from npu_sim import ranks
from npu_sim.conftest import Sim

SHORT = {"HCCL_EXEC_TIMEOUT": "3", "HCCL_CONNECT_TIMEOUT": "3"}
HCCL, LINK_DOWN = "4", "5"  # SimFaultKind


def leftovers() -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{segment.PREFIX}{os.getpid()}*")]


@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_gives_what_gloo_gives(sim: Sim, world: int) -> None:
    results = ranks.run(sim, world, "collectives", "compare")
    assert results == dict.fromkeys(range(world), {"wrong": [], "count": 63})
    assert leftovers() == []


def test_every_rank_gets_the_same_bits(sim: Sim) -> None:
    assert ranks.run(sim, 4, "collectives", "own_sums") == dict.fromkeys(range(4), {"wrong": []})


def test_ranks_may_launch_in_another_order(sim: Sim) -> None:
    results = ranks.run(sim, 4, "collectives", "other_order")
    assert results == dict.fromkeys(range(4), [[16.0, 16.0], [40.0, 40.0]])


def test_what_hardware_refuses(sim: Sim) -> None:
    said = ranks.run(sim, 2, "collectives", "refusals")[0]
    assert "error code is 5" in said["prod of bfloat16"] and "EI0003" in said["prod of bfloat16"]
    assert "Unsupported data type at::kDouble" in said["sum of float64"]
    assert "Cannot use ReduceOp.BAND with HCCL" in said["bitwise"]
    assert "Tensors must be contiguous" in said["not contiguous"]
    assert "does not support recv" in said["any source"]


def test_calls_and_bytes_are_counted(sim: Sim) -> None:
    results = ranks.run(sim, 2, "collectives", "count")
    assert results == dict.fromkeys(range(2), {"collectives": 3, "bytes": 12000, "busy": True})


@pytest.mark.parametrize("case", ["killed", "killed_while_waiting"])
def test_a_rank_that_dies_is_noticed_at_once(sim: Sim, case: str) -> None:
    results = ranks.run(sim, 3, "failures", case)  # with the default timeout of half an hour
    assert sorted(results) == [0, 1]
    for told in results.values():
        assert "error code is 507048" in told["text"]
        assert "EI0002" in told["text"] and "remote rank: [2]" in told["text"] and "Heartbeat Lost" in told["text"]
        assert told["seconds"] < 4
    assert leftovers() == []


def test_the_watchdog_ends_a_process_that_waits_for_a_dead_rank(sim: Sim) -> None:
    done = sim.command("python", str(ranks.PROGRAMS / "ranks.py"), "2", "failures", "watchdog", flags=["--npus", "2"])
    assert done.returncode != 0
    assert "HCCL watchdog thread terminated with exception" in done.stderr and "EI0002" in done.stderr
    assert ranks.read(done.stdout) == {}


def test_a_rank_that_is_late(sim: Sim) -> None:
    told = ranks.run(sim, 2, "failures", "late", **SHORT)[0]
    assert "error code is 507048" in told["text"] and "EI0002" in told["text"] and "Stuck Occurred" in told["text"]
    assert 2.9 < told["seconds"] < 4.5


def test_a_rank_that_never_joins(sim: Sim) -> None:
    results = ranks.run(sim, 3, "failures", "missing", **SHORT)
    assert sorted(results) == [0, 1]
    for told in results.values():
        assert "error code is 9" in told["text"] and "EI0015" in told["text"] and "missing rank(s): [2]" in told["text"]
        assert told["seconds"] < 5.5


def test_two_ranks_on_one_device(sim: Sim) -> None:
    for told in ranks.run(sim, 2, "failures", "one_device").values():
        assert "EI0015" in told["text"] and "same physical device ID0" in told["text"] and "set_device" in told["text"]


def test_ranks_that_do_not_agree(sim: Sim) -> None:
    told = ranks.run(sim, 2, "failures", "other_size")[0]
    assert "EI0005" in told["text"] and "parameter count, local end 4, remote end 5" in told["text"]


def test_two_ranks_that_both_send(sim: Sim) -> None:
    for told in ranks.run(sim, 2, "failures", "both_send").values():
        assert "EI0002" in told["text"] and "both ranks send first" in told["text"]


def test_waiting_burns_no_core(sim: Sim) -> None:
    waited = ranks.run(sim, 2, "failures", "patient")[0]
    assert waited["seconds"] > 1.5
    assert waited["burnt"] < 0.2


def test_faults_on_demand(sim: Sim) -> None:
    for told in ranks.run(sim, 2, "failures", "fault", HCCL, "2").values():
        assert "error code is 507048" in told["text"] and "EI0002" in told["text"]
    results = ranks.run(sim, 2, "failures", "fault", LINK_DOWN, "1")
    assert "error code is 507056" in results[0]["text"] and "EI0013" in results[0]["text"]
    assert "error code is 507048" in results[1]["text"]


@pytest.fixture
def spaces() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces with a cable between them: name and interface of each."""
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command here")
    ends = [(f"sim{os.getpid()}{side}", f"v{os.getpid()}{side}") for side in "ab"]
    commands = [f"ip netns add {space}" for space, _ in ends]
    commands.append(f"ip link add {ends[0][1]} type veth peer name {ends[1][1]}")
    for number, (space, cable) in enumerate(ends, 1):
        commands += [f"ip link set {cable} netns {space}", f"ip -n {space} addr add 10.213.7.{number}/24 dev {cable}"]
        commands += [f"ip -n {space} link set {cable} up", f"ip -n {space} link set lo up"]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: {command}: {done.stderr.strip()}")
        yield ends
    finally:
        for space, _ in ends:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


def test_two_machines_over_the_network(sim: Sim, spaces: list[tuple[str, str]]) -> None:
    started = [
        ranks.start(sim, space, 2, 2 * number, 4, "collectives", "compare", MASTER_ADDR="10.213.7.1",
                    MASTER_PORT="29777", GLOO_SOCKET_IFNAME=cable)
        for number, (space, cable) in enumerate(spaces)
    ]  # fmt: skip
    results = {}
    for process in started:
        printed, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors[-3000:]
        results |= ranks.read(printed)
    assert results == dict.fromkeys(range(4), {"wrong": [], "count": 63})


def test_a_rank_of_another_machine_dies(sim: Sim, spaces: list[tuple[str, str]]) -> None:
    started = [
        ranks.start(sim, space, 1, number, 2, "failures", "killed_while_waiting", MASTER_ADDR="10.213.7.1",
                    MASTER_PORT="29778", GLOO_SOCKET_IFNAME=cable)
        for number, (space, cable) in enumerate(spaces)
    ]  # fmt: skip
    told = ranks.read([process.communicate(timeout=200)[0] for process in started][0])[0]
    assert "EI0002" in told["text"] and "Heartbeat Lost" in told["text"]
    assert told["seconds"] < 4
