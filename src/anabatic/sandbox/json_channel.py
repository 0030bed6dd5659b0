"""Messages between the sandbox runner and its zygotes: JSON behind its length."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

_LENGTH_HEADER = struct.Struct("=Q")


def send_message(channel: socket.socket, message: dict[str, Any]) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    channel.sendall(_LENGTH_HEADER.pack(len(data)) + data)


def receive_message(channel: socket.socket) -> dict[str, Any] | None:
    """Read a message; None: the other end is closed."""
    head = _read_bytes(channel, _LENGTH_HEADER.size)
    data = None if head is None else _read_bytes(channel, _LENGTH_HEADER.unpack(head)[0])
    return None if data is None else dict(json.loads(data))


def _read_bytes(channel: socket.socket, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        with contextlib.suppress(ConnectionResetError):
            parts.append(channel.recv(min(size, 1 << 20)))
        if not parts or not parts[-1]:
            return None
        size -= len(parts[-1])
    return b"".join(parts)
