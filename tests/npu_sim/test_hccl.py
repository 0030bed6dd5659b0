"""Simulated HCCL: every collective against gloo, order, refusals, ranks that go wrong, two machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabatic_sim import shared_memory
from npu_sim import ranks
from npu_sim.conftest import Sim


def leftovers() -> list[str]:
    """Shared memory of communicators; other simulations of this computer have theirs for a while only."""
    for _ in range(600):
        found = [path.name for path in Path("/dev/shm").glob(f"{shared_memory.SHM_PREFIX}*-hccl-*")]
        if not found:
            break
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_gives_what_gloo_gives(sim: Sim, world: int) -> None:
    cases = "compare,own_sums,other_order,storm"
    results = ranks.run_all(sim, world, "collectives", cases)
    everywhere = range(world)
    assert results["compare"] == dict.fromkeys(everywhere, {"wrong": [], "count": 63})
    assert results["own_sums"] == dict.fromkeys(everywhere, {"wrong": []})
    assert results["storm"] == dict.fromkeys(everywhere, 0)
    total = {2: [[4.0, 4.0], [20.0, 20.0]], 4: [[16.0, 16.0], [40.0, 40.0]]}[world]
    assert results["other_order"] == dict.fromkeys(everywhere, total)


def test_refusals_counters_and_graphs(sim: Sim) -> None:
    results = ranks.run_all(sim, 2, "collectives", "count,refusals,graph")
    replayed = [[7.0, 1.0, 2.0, 2.0], [11.0, 2.0, 3.0, 2.0], [19.0, 4.0, 5.0, 2.0]]
    assert results["graph"] == dict.fromkeys(range(2), [[0.0] * 8, *replayed])
    assert results["count"] == dict.fromkeys(range(2), {"collectives": 3, "bytes": 12000, "busy": True})
    said = results["refusals"][0]
    assert "error code is 5" in said["prod of bfloat16"] and "EI0003" in said["prod of bfloat16"]
    assert "Unsupported data type at::kDouble" in said["sum of float64"]
    assert "Cannot use ReduceOp.BAND with HCCL" in said["bitwise"]
    assert "Tensors must be contiguous" in said["not contiguous"]
    assert "does not support recv" in said["any source"]


def test_a_rank_that_dies_or_never_joins(sim: Sim) -> None:
    # With the default timeout of half an hour, but for the rank that is waited for.
    results = ranks.run_all(sim, 3, "failures", "killed,killed_while_waiting,missing")
    for case in ("killed", "killed_while_waiting"):
        assert sorted(results[case]) == [0, 1]
        for told in results[case].values():
            assert "error code is 507048" in told["text"]
            assert "EI0002" in told["text"] and "remote rank: [2]" in told["text"] and "Heartbeat Lost" in told["text"]
            assert told["seconds"] < 900
    assert sorted(results["missing"]) == [0, 1]
    for told in results["missing"].values():
        assert "error code is 9" in told["text"] and "EI0015" in told["text"]
        assert "missing rank(s): [2]" in told["text"]
        assert told["seconds"] < 900
    assert leftovers() == []


@pytest.fixture(scope="module")
def pair(_built: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Any]]:
    """What two ranks are told when one of them goes wrong, case by case."""
    cases = "late,one_device,other_size,both_send,patient,timeout_on_demand,link_down_on_demand"
    return ranks.run_all(Sim(tmp_path_factory.mktemp("pair")), 2, "failures", cases)


def test_a_rank_that_is_late(pair: dict[str, dict[int, Any]]) -> None:
    told = pair["late"][0]
    assert "error code is 507048" in told["text"] and "EI0002" in told["text"] and "Stuck Occurred" in told["text"]
    assert 1.9 < told["seconds"] < 900


def test_two_ranks_on_one_device(pair: dict[str, dict[int, Any]]) -> None:
    for told in pair["one_device"].values():
        assert "EI0015" in told["text"] and "same physical device ID0" in told["text"] and "set_device" in told["text"]


def test_ranks_that_do_not_agree(pair: dict[str, dict[int, Any]]) -> None:
    told = pair["other_size"][0]
    assert "EI0005" in told["text"] and "parameter count, local end 4, remote end 5" in told["text"]


def test_two_ranks_that_both_send(pair: dict[str, dict[int, Any]]) -> None:
    for told in pair["both_send"].values():
        assert "EI0002" in told["text"] and "both ranks send first" in told["text"]


def test_waiting_burns_no_core(pair: dict[str, dict[int, Any]]) -> None:
    waited = pair["patient"][0]
    assert waited["seconds"] > 1.5
    assert waited["burnt"] < waited["seconds"] / 2


def test_faults_on_demand(pair: dict[str, dict[int, Any]]) -> None:
    for told in pair["timeout_on_demand"].values():
        assert "error code is 507048" in told["text"] and "EI0002" in told["text"]
    results = pair["link_down_on_demand"]
    assert "error code is 507056" in results[0]["text"] and "EI0013" in results[0]["text"]
    assert "error code is 507048" in results[1]["text"]


def test_the_buffers_of_a_communicator_take_memory(sim: Sim) -> None:
    code = """
        import os, torch, torch.distributed as dist
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
        torch.npu.set_device(0)
        dist.init_process_group("hccl")
        before = torch.npu.mem_get_info()[0]
        dist.all_reduce(torch.ones(1, device="npu"))
        torch.npu.synchronize()
        print((before - torch.npu.mem_get_info()[0]) >> 20)
        try:
            dist.all_reduce(torch.ones(1, device="npu"), group=dist.new_group())
        except torch.OutOfMemoryError as error:
            print("EI0007" in str(error), "HCCL_BUFFSIZE" in str(error), flush=True)
        os._exit(0)  # at an ordinary end, torch_npu's watchdog of the groups may ask for functions that are gone
        """
    lines = sim.python(code, flags=["--hbm", "512MiB"]).splitlines()
    assert 400 <= int(lines[0]) < 440  # two of 200 MB, and torch's own first block
    assert lines[1] == "True True"


def test_the_c_interface_in_one_process(sim: Sim) -> None:
    done = sim.program("interface.py", flags=["--npus", "3"])
    assert done.splitlines() == [
        "all [3.0, 6.0] [3.0, 6.0]",
        "sub 2 [12.0, 24.0] [12.0, 24.0]",
        "name part",
        "error cqe",
    ]


def test_the_watchdog_ends_a_process_that_waits_for_a_dead_rank(sim: Sim) -> None:
    done = sim.command("python", str(ranks.PROGRAMS / "ranks.py"), "2", "failures", "watchdog", flags=["--npus", "2"])
    assert done.returncode != 0
    assert "HCCL watchdog thread terminated with exception" in done.stderr and "EI0002" in done.stderr
    assert ranks.read(done.stdout) == {}


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


def across(sim: Sim, spaces: list[tuple[str, str]], world: int, case: str, module: str) -> dict[int, Any]:
    """Run a case on two machines with `world` devices each."""
    started = [
        ranks.start(
            sim,
            space,
            world,
            world * number,
            2 * world,
            module,
            case,
            MASTER="10.213.7.1",
            PORT="29777",
            GLOO_SOCKET_IFNAME=cable,
        )
        for number, (space, cable) in enumerate(spaces)
    ]
    results: dict[int, Any] = {}
    for process in started:
        printed, errors = process.communicate(timeout=600)
        results |= ranks.read(printed).get(case, {})
    assert results, errors[-3000:]
    return results


def test_two_machines_over_the_network(sim: Sim, spaces: list[tuple[str, str]]) -> None:
    results = across(sim, spaces, 2, "compare", "collectives")
    assert results == dict.fromkeys(range(4), {"wrong": [], "count": 63})


def test_a_rank_of_another_machine_dies(sim: Sim, spaces: list[tuple[str, str]]) -> None:
    told = across(sim, spaces, 1, "killed_while_waiting", "failures")[0]
    assert "EI0002" in told["text"] and "Heartbeat Lost" in told["text"]
    assert told["seconds"] < 900
