"""The way to machine 0: whether its name leads to it, and whether its port answers. Plain sockets.

torch's store says the same with a stack of C++ frames for every attempt (torch 2.13, TCPStore.cpp).
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
"""Seconds between two lines about who is missing."""
_ATTEMPT_SECONDS = 3.0
"""Seconds for one connection."""
_PAUSE_SECONDS = 0.5


def await_port(host: str, port: int, seconds: float, now: Callable[[], float] = time.monotonic) -> str:
    """Wait until machine 0 answers; return why it does not after all that time, empty when it does."""
    begun = asked = now()
    while why := try_connect(host, port):
        if now() - begun > seconds:
            return f"machine 0 does not answer at {host}:{port}: {why}"
        if now() - asked > REMINDER_SECONDS:
            asked = now()
            sys.stderr.write(f"waiting for machine 0 at {host}:{port}: {why}\n")
        time.sleep(_PAUSE_SECONDS)
    return ""


def try_connect(host: str, port: int) -> str:
    """Connect once; return what hinders, empty when nothing does."""
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
    """Prove, on machine 0, that what is sent to its address arrives here; behind a service it is none of its own.

    Raises:
        ConfigError: it does not.
    """
    word = os.urandom(16)
    arrived = b""
    with socket.create_server(("", port)) as server, suppress(OSError):
        server.settimeout(_ATTEMPT_SECONDS)
        with socket.create_connection((host, port), timeout=_ATTEMPT_SECONDS) as sender:
            sender.sendall(word)
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(_ATTEMPT_SECONDS)
                arrived = receiver.recv(len(word))
    if arrived != word:
        raise ConfigError(
            f"--master-addr {host} does not lead to this machine, which is machine 0 (--node-rank 0)",
            "give the address of machine 0, the same on every machine, and another --node-rank on each",
        )
