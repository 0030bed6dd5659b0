"""The preflight program, one process per machine: joins the rendezvous, compares clocks, measures every link.

It reads its task from a JSON file and writes the result next to it. torch is imported inside functions, because the
module is run as a program. Clocks are compared as in NTP (RFC 5905, section 8): by the query with the shortest round
trip. The rate of a link is bytes over time of an all-reduce between its two machines; for two ranks that is the
bandwidth of the wire (`algbw = busbw` for n = 2 in PERFORMANCE.md of NVIDIA/nccl-tests).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from anabatic.core import relaunch
from anabatic.launch import job_secret, rendezvous_endpoint
from anabatic.launch.preflight import machine_report
from anabatic.launch.rendezvous import describe_store_error

_ALL_REDUCE_BYTES = 32 << 20
"""Bytes of one all-reduce."""
_LINK_SECONDS = 0.5
"""Approximate time to measure one link."""
_MAX_REPEATS = 20
_CLOCK_QUERIES = 10
_TIMEOUT = timedelta(seconds=120)
_MARK_PREFIX = ".anabatic-check-"
_DESTROYED_GROUPS: list[Any] = []
"""Destroyed groups, kept referenced: gloo's destructor in torch 2.7 joins its threads while it holds the GIL, for which
one of them may wait."""


def main(task_path: Path) -> None:
    """Run the task in `task_path`; write the result to `task_path` with the suffix `.out`, a failure as `why`."""
    relaunch.die_with_parent()
    task = json.loads(task_path.read_text(encoding="utf-8"))
    result = _meet_and_measure(**task)
    task_path.with_suffix(".out").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # skips destructors of stores and groups whose peers are gone


def _meet_and_measure(
    host: str,
    port: int,
    job_id: str,
    node_rank: int,
    size: int,
    seconds: float,
    address: str,
    interface: str,
    job: dict[str, Any],
) -> dict[str, Any]:
    facts = {**machine_report.collect_machine_facts(**job), "address": address, "interface": interface}
    if size == 1:
        return {"found": {"0": facts}, "clocks": {}, "links": [], "shared": []}
    from torch.distributed import DistError, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

    from anabatic.launch.machine_rendezvous import MachineRendezvous

    if node_rank and (reason := rendezvous_endpoint.await_port(host, port, seconds)):
        return {"why": reason}
    rendezvous = MachineRendezvous(
        host=host,
        port=port,
        job=job_id,
        nodes=(size, size),
        node_rank=node_rank,
        address=address,
        nproc=1,
        facts={"recipe": {}, "versions": {}},  # compared below, with all that differs
        join_seconds=seconds,
        is_host=node_rank == 0,
        on_refused=_leave_check,
        on_replaced=_leave_check,
        secret=job_secret.take_secret(os.environ),
    )
    try:
        info = rendezvous.next_rendezvous().bootstrap_store_info
        assert info is not None
        store = TCPStore(info.master_addr, info.master_port, size, is_master=node_rank == 0, timeout=_TIMEOUT)
        result = _measure_machines(store, node_rank, size, facts, job["out"])
        _leave_store(store, node_rank, size)
    except RendezvousTimeoutError as error:
        return {"why": str(error)}
    except (DistError, RendezvousError, RuntimeError) as error:
        return {"why": describe_store_error(error)}
    return result


def _leave_check(reason: Any) -> NoReturn:
    raise RuntimeError(f"another check with this --node-rank has come: {reason}")


def _measure_machines(store: Any, node_rank: int, size: int, facts: dict[str, Any], out: str | None) -> dict[str, Any]:
    import torch.distributed as dist

    from anabatic.parallel import group_objects

    group_objects.refuse_code()
    group_store = dist.PrefixStore("gloo", store)
    dist.init_process_group("gloo", store=group_store, rank=node_rank, world_size=size, timeout=_TIMEOUT)
    results: list[Any] = [None] * size
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, facts)
    facts_by_machine: dict[int, dict[str, Any]] = dict(enumerate(gathered))
    local_result = {
        "clocks": _compare_clocks(node_rank, size),
        "shared": _sees_run_folder(store, node_rank, out),
        "links": _measure_links(node_rank, size, facts_by_machine),
    }
    dist.all_gather_object(results, local_result)
    return {
        "found": facts_by_machine,
        "clocks": results[0]["clocks"],
        "shared": [result["shared"] for result in results],
        "links": [link for result in results for link in result["links"]],
    }


def _compare_clocks(node_rank: int, size: int) -> dict[int, list[float]]:
    """Return machine -> seconds by which its clock is ahead of machine 0's, and half of the round trip."""
    import torch
    import torch.distributed as dist

    result = {}
    for other in range(1, size):
        best_round_trip = float("inf")
        for _ in range(_CLOCK_QUERIES):
            remote_time = torch.zeros(1, dtype=torch.float64)
            if node_rank == other:
                dist.recv(remote_time, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
            elif node_rank == 0:
                sent_at = time.time()
                dist.send(remote_time, other)
                dist.recv(remote_time, other)
                round_trip = time.time() - sent_at
                if round_trip < best_round_trip:
                    best_round_trip = round_trip
                    result[other] = [float(remote_time) - (sent_at + round_trip / 2), round_trip / 2]
    return result


def _sees_run_folder(store: Any, node_rank: int, out: str | None) -> bool:
    """Check that a file that machine 0 writes next to the run folder is visible here."""
    import torch.distributed as dist

    if out is None:
        return True
    folder = next(iter(machine_report.nearest_existing_folders(out)))
    if node_rank == 0:
        name = f"{_MARK_PREFIX}{os.urandom(8).hex()}"
        if os.access(folder, os.W_OK):
            Path(folder, name).touch()
        store.set("mark", name)
    mark = os.path.join(folder, store.get("mark").decode())
    deadline = time.monotonic() + 3.0  # network file systems show it late
    while not (seen := os.path.exists(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    dist.barrier()
    if node_rank == 0 and seen:
        os.unlink(mark)
    return seen


def schedule_pairs(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs in which every pair of `size` machines occurs once (the circle method)."""
    machines = list(range(size + size % 2))
    for _ in range(len(machines) - 1):
        pairs = zip(machines[: len(machines) // 2], reversed(machines[len(machines) // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < size]
        machines = [machines[0], machines[-1], *machines[1:-1]]


def _measure_links(node_rank: int, size: int, facts_by_machine: dict[int, dict[str, Any]]) -> list[list[Any]]:
    """Measure this machine's links; return [machine, machine, backend, bytes per second] where it is the first."""
    import torch.distributed as dist

    from anabatic.device.table import DEVICES

    kinds = {facts["devices"]["kind"] if facts["devices"]["count"] else "" for facts in facts_by_machine.values()}
    backends = [("gloo", "cpu")]
    if len(kinds) == 1 and (kind := kinds.pop()) in ("npu", "cuda"):
        backends.append((DEVICES[kind].collective, kind))
    result = []
    for backend, device in backends:
        for pairs in schedule_pairs(size):
            pair = next((pair for pair in pairs if node_rank in pair), None)
            if pair is not None:
                rate = _measure_rate(list(pair), backend, device)
                result += [[*pair, backend, rate]] if node_rank == pair[0] else []
            dist.barrier()
    return result


def _measure_rate(pair: list[int], backend: str, device: str) -> float:
    """Return bytes per second of an all-reduce between two machines."""
    import torch
    import torch.distributed as dist

    from anabatic.parallel.collectives import count_calls, time_slowest_rank

    group = dist.new_group(pair, timeout=_TIMEOUT, backend=backend, use_local_synchronization=True)
    values, torch_device = torch.ones(_ALL_REDUCE_BYTES // 4, device=device), torch.device(device)

    def all_reduce_values() -> None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)

    repeats = count_calls(all_reduce_values, torch_device, _LINK_SECONDS, _MAX_REPEATS, group)
    rate = _ALL_REDUCE_BYTES * repeats / time_slowest_rank(all_reduce_values, repeats, torch_device, group)
    dist.destroy_process_group(group)
    _DESTROYED_GROUPS.append(group)
    return rate


def _leave_store(store: Any, node_rank: int, size: int) -> None:
    """Leave the store: machine 0, its host, last; the others once its port is closed, which the job opens again."""
    from torch.distributed import DistError

    store.set(f"bye/{node_rank}", "")
    if node_rank == 0:
        deadline = time.monotonic() + rendezvous_endpoint.REMINDER_SECONDS
        while not store.check([f"bye/{other}" for other in range(size)]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    while True:
        try:
            store.check(["bye/0"])
        except (DistError, RuntimeError):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
