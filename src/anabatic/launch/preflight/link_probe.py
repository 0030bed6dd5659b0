"""The program of the pre-flight, one process a machine: meets the others, compares clocks, measures every link.

It reads its task from a file (JSON) and writes what was found beside it. torch is imported in functions: the module
is run by name. Clocks are compared as NTP does (RFC 5905, section 8): the answer to the quickest of several questions.
A link's figure is bytes over time of an all-reduce between its two machines; for two ranks that is the bandwidth of
the wire (`algbw = busbw` for n = 2 in PERFORMANCE.md of NVIDIA/nccl-tests).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from anabatic.core import relaunch
from anabatic.launch import rendezvous_probe
from anabatic.launch.preflight import machine_info
from anabatic.launch.rendezvous import MachineRendezvous, describe_store_error

_ALL_REDUCE_BYTES = 32 << 20
"""In one all-reduce."""
_LINK_SECONDS = 0.5
"""To measure one link for, about."""
_MAX_REPEATS = 20
_CLOCK_QUERIES = 10
_TIMEOUT = timedelta(seconds=120)
_MARK_PREFIX = ".anabatic-check-"
_DESTROYED_GROUPS: list[Any] = []
"""Groups that are destroyed but referenced: gloo's destructor of torch 2.7 joins its threads while it holds the GIL,
which one of them may be waiting for."""


def main(file: Path) -> None:
    """Work off the task in `file`; what is found goes to `file` with the suffix `.out`, a failure as `why`."""
    relaunch.die_with_parent()
    task = json.loads(file.read_text(encoding="utf-8"))
    result = _meet_and_measure(**task)
    file.with_suffix(".out").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # stores and groups whose other ends are gone have nothing to say any more


def _meet_and_measure(
    host: str,
    port: int,
    job_id: str,
    number: int,
    size: int,
    seconds: float,
    address: str,
    interface: str,
    job: dict[str, Any],
) -> dict[str, Any]:
    own = {**machine_info.collect_machine_facts(**job), "address": address, "interface": interface}
    if size == 1:
        return {"found": {"0": own}, "clocks": {}, "links": [], "shared": []}
    from torch.distributed import DistError, TCPStore

    if number and (why := rendezvous_probe.await_port(host, port, seconds)):
        return {"why": why}
    try:
        server = TCPStore(host, port, is_master=True, wait_for_workers=False) if number == 0 else None
        roll = MachineRendezvous(host, port, job_id, number, size, own, refuse=None)
        found = roll.gather_facts(seconds)
        if not found:
            return {"why": roll.describe_missing()}
        store = server or TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        result = _measure_machines(store, number, size, found, job["out"])
        _leave_store(store, number, size)
    except (DistError, RuntimeError) as error:
        return {"why": describe_store_error(error)}
    return result


def _measure_machines(
    store: Any, number: int, size: int, found: dict[int, dict[str, Any]], out: str | None
) -> dict[str, Any]:
    import torch.distributed as dist

    meeting = dist.PrefixStore("gloo", store)
    dist.init_process_group("gloo", store=meeting, rank=number, world_size=size, timeout=_TIMEOUT)
    parts: list[Any] = [None] * size
    mine = {
        "clocks": _compare_clocks(number, size),
        "shared": _sees_run_folder(store, number, out),
        "links": _measure_links(number, size, found),
    }
    dist.all_gather_object(parts, mine)
    return {
        "found": found,
        "clocks": parts[0]["clocks"],
        "shared": [part["shared"] for part in parts],
        "links": [link for part in parts for link in part["links"]],
    }


def _compare_clocks(number: int, size: int) -> dict[int, list[float]]:
    """Machine -> seconds by which its clock is ahead of machine 0's, and half of the way there and back."""
    import torch
    import torch.distributed as dist

    result = {}
    for other in range(1, size):
        best = float("inf")
        for _ in range(_CLOCK_QUERIES):
            told = torch.zeros(1, dtype=torch.float64)
            if number == other:
                dist.recv(told, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
            elif number == 0:
                asked = time.time()
                dist.send(told, other)
                dist.recv(told, other)
                took = time.time() - asked
                if took < best:
                    best = took
                    result[other] = [float(told) - (asked + took / 2), took / 2]
    return result


def _sees_run_folder(store: Any, number: int, out: str | None) -> bool:
    """Whether a file that machine 0 writes beside the run folder is seen here."""
    import torch.distributed as dist

    if out is None:
        return True
    folder = next(iter(machine_info.nearest_existing_folders(out)))
    if number == 0:
        name = f"{_MARK_PREFIX}{os.urandom(8).hex()}"
        if os.access(folder, os.W_OK):
            Path(folder, name).touch()
        store.set("mark", name)
    mark = os.path.join(folder, store.get("mark").decode())
    deadline = time.monotonic() + 3.0  # network file systems take their time
    while not (seen := os.path.exists(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    dist.barrier()
    if number == 0 and seen:
        os.unlink(mark)
    return seen


def schedule_pairs(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs; each two of `size` meet once, nobody is in two pairs of a round (the circle method)."""
    places = list(range(size + size % 2))
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < size]
        places = [places[0], places[-1], *places[1:-1]]


def _measure_links(number: int, size: int, found: dict[int, dict[str, Any]]) -> list[list[Any]]:
    """Measure the links of this machine; return [machine, machine, backend, bytes a second] of those it is first in."""
    import torch.distributed as dist

    from anabatic.device.table import DEVICES

    kinds = {facts["devices"]["kind"] if facts["devices"]["count"] else "" for facts in found.values()}
    ways = [("gloo", "cpu")]
    if len(kinds) == 1 and (kind := kinds.pop()) in ("npu", "cuda"):
        ways.append((DEVICES[kind].collective, kind))
    result = []
    for backend, device in ways:
        for pairs in schedule_pairs(size):
            pair = next((pair for pair in pairs if number in pair), None)
            if pair is not None:
                rate = _measure_rate(list(pair), backend, device)
                result += [[*pair, backend, rate]] if number == pair[0] else []
            dist.barrier()
    return result


def _measure_rate(pair: list[int], backend: str, device: str) -> float:
    """Return bytes a second of an all-reduce between two machines."""
    import torch
    import torch.distributed as dist

    from anabatic.parallel import collective_timing

    group = dist.new_group(pair, timeout=_TIMEOUT, backend=backend, use_local_synchronization=True)
    values, where = torch.ones(_ALL_REDUCE_BYTES // 4, device=device), torch.device(device)

    def all_reduce_values() -> None:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)

    times = collective_timing.count_calls(all_reduce_values, where, _LINK_SECONDS, _MAX_REPEATS, group)
    rate = _ALL_REDUCE_BYTES * times / collective_timing.time_slowest_rank(all_reduce_values, times, where, group)
    dist.destroy_process_group(group)
    _DESTROYED_GROUPS.append(group)
    return rate


def _leave_store(store: Any, number: int, size: int) -> None:
    """Leave machine 0, which holds the store, last; the others when its port is closed: the job's comes next."""
    from torch.distributed import DistError

    store.set(f"bye/{number}", "")
    if number == 0:
        deadline = time.monotonic() + rendezvous_probe.REMINDER_SECONDS
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
