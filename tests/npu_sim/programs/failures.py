"""Ranks that go wrong. A case returns what the ranks that are left are told, and how long they waited for it."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from anabatic_sim import shared_memory


def _told(launch: Callable[[], object]) -> dict[str, object]:
    start = time.monotonic()
    try:
        launch()
        torch.npu.synchronize()
        text = "nothing"
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"text": text, "seconds": time.monotonic() - start}


def _end(result: dict[str, object], rank: int, survivors: int = 0) -> None:
    """The process group is not usable any more: end without it, the way a crashing trainer does.

    `survivors` find out the same by themselves, and wait for each other, or the first one's end would be what the
    last one is told; without the number nobody waits for long.
    """
    case = sys._getframe(1).f_code.co_name
    os.write(1, (json.dumps({"case": case, "rank": rank, "result": result}) + "\n").encode())
    if not survivors:
        time.sleep(1.0)
    Path(f"told-{case}-{rank}").touch()
    deadline = time.monotonic() + 60
    while len(list(Path().glob(f"told-{case}-*"))) < survivors and time.monotonic() < deadline:
        time.sleep(0.05)
    os._exit(0)


def _begin() -> torch.Tensor:
    tensor = torch.ones(4, device="npu")
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    return tensor


def killed(rank: int, world: int) -> None:
    tensor = _begin()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _end(_told(lambda: dist.all_reduce(tensor)), rank, world - 1)


def killed_while_waiting(rank: int, world: int) -> None:
    tensor = _begin()
    if rank == world - 1:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)
    _end(_told(lambda: dist.all_reduce(tensor)), rank, world - 1)


def late(rank: int, world: int) -> None:
    os.environ["HCCL_EXEC_TIMEOUT"] = "2"
    tensor = _begin()
    if rank == world - 1:
        time.sleep(8.0)
    _end(_told(lambda: dist.all_reduce(tensor)), rank)


def patient(rank: int, world: int) -> dict[str, float]:
    """How much of a core a rank burns while it waits for another."""
    tensor = _begin()
    if rank == world - 1:
        time.sleep(4.0)
    start, burnt = time.monotonic(), time.process_time()
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    return {"seconds": time.monotonic() - start, "burnt": time.process_time() - burnt}


def missing(rank: int, world: int) -> None:
    """The communicator itself never comes about: the last rank does not take part."""
    os.environ["HCCL_CONNECT_TIMEOUT"] = "4"
    if rank == world - 1:
        time.sleep(10.0)
        os._exit(0)
    _end(_told(lambda: dist.all_reduce(torch.ones(4, device="npu"))), rank, world - 1)


def one_device(rank: int, world: int) -> None:
    torch.npu.set_device(0)
    _end(_told(lambda: dist.all_reduce(torch.ones(4, device="npu:0"))), rank, world)


def other_size(rank: int, world: int) -> None:
    _begin()
    _end(_told(lambda: dist.all_reduce(torch.ones(4 + rank, device="npu"))), rank, world)


def both_send(rank: int, world: int) -> None:
    tensor = _begin()
    _end(_told(lambda: dist.send(tensor, 1 - rank)), rank, world)


def _strike(rank: int, kind: int) -> dict[str, object]:
    """A fault for the second collective from now of device 0 (csrc/segment.h, SimFaultKind)."""
    tensor = _begin()
    if rank == 0:
        with shared_memory.attach_segment(os.environ["ANABATIC_SIM_SEGMENT"]) as machine:
            row = machine.fault[0]
            row.device, row.after, row.value, row.kind = 0, 2, 0, kind
    return _told(lambda: [dist.all_reduce(tensor) for _ in range(2)])


def timeout_on_demand(rank: int, world: int) -> None:
    _end(_strike(rank, 4), rank)


def link_down_on_demand(rank: int, world: int) -> None:
    _end(_strike(rank, 5), rank)


def watchdog(rank: int, world: int) -> None:
    """Nobody synchronises: torch_npu's own watchdog must end the process."""
    tensor = _begin()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(tensor)
    time.sleep(60)
    _end({"text": "the watchdog did not see it"}, rank)
