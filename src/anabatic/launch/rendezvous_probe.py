"""Probe machine 0 with plain sockets: whether its name leads to it, and whether its port answers.

torch's store prints a stack of C++ frames for every failed attempt (torch 2.13, TCPStore.cpp).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from anabatic.core.errors import ConfigError

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
