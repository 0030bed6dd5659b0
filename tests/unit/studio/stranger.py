"""What another user of the machine tries against a server: a program that gives up root and prints what came of it.

`python stranger.py JSON` with an object of `port`, `pid` (of the server), `folder` (of its state) and `asked`: requests
as [method, path, body]. It prints an object: `answers` to all requests, as [way, path, status], and `seen`: everything
of the server's process and folder that could be read. It runs with the standard library alone: all is imported before
root is given up, since the interpreter may lie in a folder of root.
"""

from __future__ import annotations

import codecs
import contextlib
import http.client
import json
import os
import pwd
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 30
NUM_HANG_UPS = 20


def become_nobody() -> None:
    """Give up root for good."""
    user = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)


def read_sockets() -> list[tuple[str, int]]:
    """Return the addresses of all ends of all connections that the kernel lists."""
    found: dict[tuple[str, int], None] = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:]:
                for end in line.split()[1:3]:
                    words, _, port = end.partition(":")
                    parts = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
                    address = socket.inet_ntop(family, struct.pack(f"={len(parts)}I", *parts))
                    found[address.removeprefix("::ffff:"), int(port, 16)] = None
    return list(found)


def list_claims(port: int, sockets: list[tuple[str, int]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield headers that claim to be somebody else, each with its name."""
    yield "no claim", {}
    for host in ("localhost", f"localhost:{port}", f"[::1]:{port}", "[::1]", "127.0.0.1", f"127.0.0.1:{port}", "other"):
        yield f"Host {host}", {"Host": host}
    for secret in ("", "null", "undefined"):
        yield f"a token {secret}", {"Authorization": f"Bearer {secret}", "Cookie": f"anabatic-studio-{port}={secret}"}
    texts = {address: None for address, _ in [("127.0.0.1", 0), ("::1", 0), *sockets]}
    texts |= {f"[{address}]:{number}" if ":" in address else f"{address}:{number}": None for address, number in sockets}
    for text in texts:
        yield f"forwarded for {text}", {"X-Forwarded-For": text}
        yield f"real {text}", {"X-Real-IP": text, "Forwarded": f'for="{text}"', "X-Client-IP": text}


def ask(connection: http.client.HTTPConnection, request: list[Any], headers: dict[str, str]) -> int:
    """Return the status of an answer; 0: there was none."""
    method, path, body = request
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, http.client.HTTPException):
        connection.close()  # the next request opens it anew
        return 0


def ask_from(source: int, where: tuple[str, int], request: list[Any]) -> int:
    """Return the status of an answer to a request from a port of ours; 0: it cannot be had."""
    connection = http.client.HTTPConnection(*where, timeout=TIMEOUT_SECONDS)
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        plain.settimeout(TIMEOUT_SECONDS)
        plain.bind((where[0], source))
        plain.connect(where)
        connection.sock = plain
        return ask(connection, request, {})
    return 0


def hang_up(where: tuple[str, int], request: list[Any]) -> None:
    """Send a whole request and close: the kernel then lists the socket as one of root."""
    method, path, body = request
    head = f"{method} {path} HTTP/1.1\r\nHost: {where[0]}\r\nContent-Type: application/json\r\n"
    with contextlib.suppress(OSError), socket.create_connection(where, TIMEOUT_SECONDS) as plain:
        plain.sendall(f"{head}Content-Length: {len(body or '')}\r\n\r\n{body or ''}".encode())


def read_everything(pid: int, folder: Path) -> str:
    """Return all that can be read of a process and a folder."""
    texts = []
    files = [Path("/proc", str(pid), name) for name in ("cmdline", "environ", "mem", "maps")]
    for place, _, names in os.walk(folder):
        files += [Path(place, name) for name in names]
    for file in files:
        with contextlib.suppress(OSError):
            texts.append(file.read_bytes().decode("utf-8", "replace"))
    return "\n".join(texts)


def main(text: str) -> None:
    """Try everything."""
    task = json.loads(text)
    where = ("127.0.0.1", task["port"])
    for encoding in ("ascii", "latin-1", "idna"):
        codecs.lookup(encoding)
    socket.getaddrinfo("127.0.0.1", 0)
    become_nobody()
    answers = []
    sockets = read_sockets()  # before there are a thousand of our own
    connection = http.client.HTTPConnection(*where, timeout=TIMEOUT_SECONDS)
    for way, headers in list_claims(task["port"], sockets):
        answers += [[way, request[1], ask(connection, request, headers)] for request in task["asked"]]
    for number in sorted({number for _, number in sockets if number >= 1024}):
        answers += [[f"from port {number}", task["asked"][0][1], ask_from(number, where, task["asked"][0])]]
    for request in task["asked"] * NUM_HANG_UPS:
        hang_up(where, request)
    seen = read_everything(task["pid"], Path(task["folder"]))
    print(json.dumps({"user": os.getuid(), "answers": answers, "seen": seen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
