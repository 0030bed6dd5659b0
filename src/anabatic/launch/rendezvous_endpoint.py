"""Rendezvous parameters of this machine (agent arguments, address, network interface), and a probe of machine 0."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.errors import ConfigError

BACKEND = "anabatic"
"""Name of our rendezvous (`machine_rendezvous.py`) among those of torch's agent."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that select the network interface of the collective libraries."""


def build_agent_command(launch: LaunchSettings, restarts: int) -> list[str]:
    """Return the command line of the agent, up to the program it runs.

    Args:
        restarts: how often the agent may restart the workers.

    Raises:
        ConfigError: the rendezvous endpoint has no address, or cannot be reached from here.
    """
    command = [sys.executable, "-m", "anabatic.launch.local.elastic_agent", f"--nproc-per-node={launch.nproc}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command += [f"--nnodes={launch.min_nodes}:{launch.max_nodes}", f"--rdzv-backend={BACKEND}"]
    if not launch.is_multi_node:
        return [*command, f"--rdzv-conf=nproc={launch.nproc}", "--local-addr=127.0.0.1"]
    address = prepare_rendezvous(launch)
    endpoint = f"{launch.master_addr}:{launch.master_port}"
    return [*command, f"--rdzv-id={launch.job_id}", f"--rdzv-endpoint={endpoint}", f"--local-addr={address}"]


def prepare_rendezvous(launch: LaunchSettings) -> str:
    """Return this machine's address towards machine 0; on machine 0 also check that the port is usable.

    Raises:
        ConfigError: the address is unreachable or that of another machine, or the port is in use.
    """
    address = local_address(launch)
    if is_rendezvous_host(launch):
        _require_port_free(launch)
        if not is_local_address(str(launch.master_addr)):
            require_reachable_address(str(launch.master_addr), launch.master_port)
    return address


def is_rendezvous_host(launch: LaunchSettings) -> bool:
    """Return whether this machine hosts the rendezvous."""
    return launch.node_rank == 0 if launch.node_rank is not None else is_local_address(str(launch.master_addr))


def _require_port_free(launch: LaunchSettings) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier agent may linger
        try:
            probe.bind(("", launch.master_port))
        except OSError as error:
            raise ConfigError(
                f"port {launch.master_port} cannot be opened here: {error.strerror}",
                "another job may run here: end it, or choose another --master-port, the same on every machine",
            ) from error


def local_address(launch: LaunchSettings) -> str:
    """Return the address of this machine on the route to machine 0."""
    try:
        family, _, _, _, target = socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"--master-addr {launch.master_addr} has no address: {error.strerror}",
            "use the address itself, for example 192.168.1.10, or add the name to /etc/hosts on every machine",
        ) from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket connects without sending
        try:
            probe.connect(target)
        except OSError as error:
            raise ConfigError(
                f"--master-addr {launch.master_addr} cannot be reached from here: {error.strerror}",
                "check the network, and that the address is the one of machine 0 on the network between the machines",
            ) from error
        return str(probe.getsockname()[0])


def is_local_address(name: str) -> bool:
    """Return whether a name or address belongs to this machine."""
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except socket.gaierror:
        return False
    return any(entry.address in addresses for entries in psutil.net_if_addrs().values() for entry in entries)


def find_interface(address: str) -> str | None:
    """Return the network interface with `address`, for example `eth0`."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def interface_variables(launch: LaunchSettings) -> dict[str, str]:
    """Return the variables that select the network interface for collectives; on one machine gloo needs no other."""
    if not launch.is_multi_node:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    name = find_interface(local_address(launch))
    return dict.fromkeys(INTERFACE_VARIABLES, name) if name else {}


REMINDER_SECONDS = 15.0
"""Seconds between two lines about missing machines."""
_ATTEMPT_SECONDS = 3.0
"""Timeout of one connection."""
_PAUSE_SECONDS = 0.5


def await_port(host: str, port: int, seconds: float, now: Callable[[], float] = time.monotonic) -> str:
    """Wait until machine 0 answers; return the problem after a timeout, empty when it answers."""
    started_at = reminded_at = now()
    while problem := try_connect(host, port):
        if now() - started_at > seconds:
            return f"machine 0 does not answer at {host}:{port}: {problem}"
        if now() - reminded_at > REMINDER_SECONDS:
            reminded_at = now()
            sys.stderr.write(f"waiting for machine 0 at {host}:{port}: {problem}\n")
        time.sleep(_PAUSE_SECONDS)
    return ""


def try_connect(host: str, port: int) -> str:
    """Connect once; return the problem, empty on success."""
    try:
        with socket.create_connection((host, port), timeout=_ATTEMPT_SECONDS):
            return ""
    except TimeoutError:
        return "no answer, not even a refusal: a firewall, or the wrong address"
    except ConnectionRefusedError:
        return "connection refused: it has not begun, or uses another port"
    except OSError as error:
        return str(error.strerror or error).lower()


def require_reachable_address(host: str, port: int) -> None:
    """Check, on machine 0, that its address leads to it, for addresses that it does not own, as behind a service.

    Raises:
        ConfigError: the address does not lead to this machine.
    """
    token = os.urandom(16)
    received = b""
    with socket.create_server(("", port)) as server, suppress(OSError):
        server.settimeout(_ATTEMPT_SECONDS)
        with socket.create_connection((host, port), timeout=_ATTEMPT_SECONDS) as sender:
            sender.sendall(token)
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(_ATTEMPT_SECONDS)
                received = receiver.recv(len(token))
    if received != token:
        raise ConfigError(
            f"--master-addr {host} does not lead to this machine, which is machine 0 (--node-rank 0)",
            "give the address of machine 0, the same on every machine, and another --node-rank on each",
        )
