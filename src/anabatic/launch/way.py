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

ASK = 15.0
"""Seconds between two lines about who is missing."""
_ATTEMPT = 3.0
"""Seconds for one connection."""
_PAUSE = 0.5


def await_port(host: str, port: int, seconds: float, now: Callable[[], float] = time.monotonic) -> str:
    """Wait until machine 0 answers; return why it does not after all that time, empty when it does."""
    begun = asked = now()
    while why := attempt(host, port):
        if now() - begun > seconds:
            return f"machine 0 does not answer at {host}:{port}: {why}"
        if now() - asked > ASK:
            asked = now()
            sys.stderr.write(f"waiting for machine 0 at {host}:{port}: {why}\n")
        time.sleep(_PAUSE)
    return ""


def attempt(host: str, port: int) -> str:
    """Connect once; return what hinders, empty when nothing does."""
    try:
        with socket.create_connection((host, port), timeout=_ATTEMPT):
            return ""
    except TimeoutError:
        return "no answer, not even a refusal: a firewall, or the wrong address"
    except ConnectionRefusedError:
        return "connection refused: it has not begun, or uses another port"
    except OSError as error:
        return str(error.strerror or error).lower()


def require_arrival(host: str, port: int) -> None:
    """Prove, on machine 0, that what is sent to its address arrives here; behind a service it is none of its own.

    Raises:
        ConfigError: it does not.
    """
    word = os.urandom(16)
    arrived = b""
    with socket.create_server(("", port)) as server, suppress(OSError):
        server.settimeout(_ATTEMPT)
        with socket.create_connection((host, port), timeout=_ATTEMPT) as sender:
            sender.sendall(word)
            receiver, _ = server.accept()
            with receiver:
                receiver.settimeout(_ATTEMPT)
                arrived = receiver.recv(len(word))
    if arrived != word:
        raise ConfigError(
            f"--master-addr {host} does not lead to this machine, which is machine 0 (--node-rank 0)",
            "give the address of machine 0, the same on every machine, and another --node-rank on each",
        )
