"""Two machines that are network namespaces of this one, with addresses of their own and a cable between them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from cluster.wire import Carrier, Wire


@dataclass(frozen=True)
class Nodes:
    """Names of the namespaces, and the addresses of the machines."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    interfaces: tuple[str, str]
    nowhere: str
    """An address of their network that nobody has."""

    def start(self, number: int, words: Sequence[object], **variables: str) -> subprocess.Popen[str]:
        """Start a program on a machine."""
        return subprocess.Popen(
            self.words(number, words),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def words(self, number: int, words: Sequence[object]) -> list[str]:
        """Return the command line that runs a program on a machine."""
        return ["ip", "netns", "exec", self.names[number], *map(str, words)]


@contextmanager
def two(wire: Wire | None = None) -> Iterator[Nodes]:
    """Two machines, joined by `wire` or by a cable without faults; skips, with the reason, where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"{os.getpid():x}"[-6:]
    names, interfaces = (f"anabatic-{tag}-0", f"anabatic-{tag}-1"), (f"ab{tag}-0", f"ab{tag}-1")
    part = os.getpid() % 250 + 1
    addresses = (f"10.213.{part}.1", f"10.213.{part}.2")
    carrier = None
    try:
        for name in names:
            ip("netns", "add", name)
        if wire is None:
            pair = ["type", "veth", "peer", "name", interfaces[1], "netns", names[1]]
            ip("link", "add", interfaces[0], "netns", names[0], *pair)
        else:
            carrier = _lay(wire, interfaces)
            for name, interface in zip(names, interfaces, strict=True):
                ip("link", "set", interface, "netns", name)
        for name, interface, address in zip(names, interfaces, addresses, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", name, "link", "set", interface, "up")
        yield Nodes(names, addresses, interfaces, f"10.213.{part}.77")
    finally:
        if carrier is not None:
            carrier.stop()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _lay(wire: Wire, interfaces: tuple[str, str]) -> Carrier:
    try:
        return Carrier(wire, interfaces)
    except OSError as error:
        pytest.skip(f"no TUN devices here: {error}")


def ip(*words: str) -> None:
    """Run `ip`; a machine that forbids it skips the test."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


SCRIPT = """#!/bin/bash
export NNODES=2
export NPROC_PER_NODE=2
export MASTER_PORT=29500
export HCCL_CONNECT_TIMEOUT=1800
exec {program} launch {options} -- {command}
"""
"""How a guide for two machines has it typed: the same script, with MASTER_ADDR and NODE_RANK changed."""


def launched(
    nodes: Nodes, script: str, variables: Mapping[str, str], code: int | None = 0, **own: Sequence[str]
) -> list[str]:
    """Run the script on both machines and return what they said; `own` are variables of each machine."""
    from e2e import command

    processes = []
    for number in (1, 0):  # the order in which they come does not matter
        mine = {name: values[number] for name, values in own.items()}
        given = {"MASTER_ADDR": nodes.addresses[0], "NODE_RANK": str(number), **variables, **mine}
        processes.append(nodes.start(number, ["bash", script], **given))
    return [command.end(process, code).err for process in reversed(processes)]
