"""How much does it cost that many machines meet?

Every machine is a process, forked from one that has imported torch, with its own connection to
machine 0. It joins, stays for a while as the agent does, fails once, so that all meet again, and ends. What counts is
the CPU time of all processes together, beside torch's own rendezvous (c10d) where that comes through; and, of ours, the
CPU time of machine 0 and the bytes of another machine's connection.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from anabatic.launch.machine_rendezvous import MachineRendezvous
from option_types import names_among, positive_number

SIDES = ("anabatic", "c10d")
STAY_SECONDS = 3.0
"""Between two rounds."""
FACTS = {"recipe": {f"setting.{number}": number for number in range(200)}, "versions": {"torch": "2.13"}}


def ours(port: int, number: int, size: int, seconds: float) -> Any:
    """Return machine `number`'s handler."""
    return MachineRendezvous(
        host="127.0.0.1",
        port=port,
        job="job",
        nodes=(size, size),
        node_rank=number,
        address="127.0.0.1",
        nproc=1,
        facts=FACTS,
        join_seconds=seconds,
        is_host=number == 0,
        on_refused=lambda lines: sys.exit(2),
        on_replaced=lambda address: sys.exit(3),
    )


def theirs(port: int, number: int, size: int, seconds: float) -> Any:
    """Return the handler of torch's rendezvous."""
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "job", size, size, "127.0.0.1",
        is_host=int(number == 0), join_timeout=int(seconds), read_timeout=int(seconds),
    )  # fmt: skip
    return rendezvous_handler_registry.create_handler(parameters)


def cpu_seconds(who: int) -> float:
    """In user and system mode."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def connection_bytes(connection: socket.socket) -> tuple[int, int]:
    """Return the bytes sent and acknowledged, and received (`struct tcp_info` of linux/tcp.h)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
    return struct.unpack_from("=QQ", info, 120)


def take_part(side: str, port: int, number: int, size: int, seconds: float, folder: Path) -> None:
    """Meet twice, as an agent whose workers fail once."""
    spent = cpu_seconds(resource.RUSAGE_SELF)
    handler = (ours if side == "anabatic" else theirs)(port, number, size, seconds)
    for round_number in range(2):
        info = handler.next_rendezvous()
        assert info.world_size == size
        until = time.monotonic() + STAY_SECONDS
        is_first = number == 1 and round_number == 0
        while time.monotonic() < until or (round_number == 0 and not is_first):
            if handler.num_nodes_waiting() and round_number == 0:
                break
            time.sleep(0.1)
    if side == "anabatic":
        assert handler.wait_for_all(seconds)
        if number == 1:
            sent, received = connection_bytes(handler._client._socket)
            (folder / "bytes").write_text(f"{sent:,} bytes sent and {received:,} received by machine 1")
        handler.leave()
        if not number:
            spent = cpu_seconds(resource.RUSAGE_SELF) - spent
            (folder / "first").write_text(f"{spent:.2f} s of CPU of machine 0")
        return
    info.store.add("done", 1)
    while number == 0 and info.store.add("done", 0) < size:
        time.sleep(0.2)
    if number == 0:
        time.sleep(1.0)


def measure(side: str, size: int, seconds: float, folder: Path) -> tuple[float, float] | None:
    """Return CPU and wall seconds of all machines; None: they did not come through in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before, began = cpu_seconds(resource.RUSAGE_CHILDREN), time.monotonic()
    pids = []
    for number in range(size):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
                take_part(side, port, number, size, seconds, folder)
                code = 0
            except Exception as error:
                sys.stderr.write(f"machine {number}: {type(error).__name__}: {error}\n")
            os._exit(code)
        pids.append(pid)
    failed, deadline = 0, began + seconds
    for pid in pids:
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                done = os.waitpid(pid, 0)
                break
            time.sleep(0.05)
        failed += bool(done[1])
    return None if failed else (cpu_seconds(resource.RUSAGE_CHILDREN) - before, time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="32,128,512,1024")
    parser.add_argument("--sides", type=names_among(SIDES), default=list(SIDES), help=f"of {','.join(SIDES)}")
    parser.add_argument("--seconds", type=positive_number, default=120.0, help="what a side may take for the meeting")
    options = parser.parse_args()
    for size in map(int, options.machines.split(",")):
        spent: dict[str, float] = {}
        for side in options.sides:
            with TemporaryDirectory() as folder:
                found = measure(side, size, options.seconds, Path(folder))
                more = [path.read_text() for path in sorted(Path(folder).iterdir())]
            if found is not None:
                spent[side] = found[0]
            told = "not through" if found is None else f"{found[0]:7.1f} s of CPU, {found[1]:6.1f} s"
            print(f"{size:6,} machines, {side:10} {'; '.join([told, *more])}", flush=True)
        if len(spent) == len(SIDES):
            print(
                f"{size:6,} machines, c10d takes {spent['c10d'] / spent['anabatic']:.1f} times as much CPU", flush=True
            )


if __name__ == "__main__":
    main()
