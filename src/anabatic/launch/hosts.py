"""A file of hosts: one machine a line, as MPI, DeepSpeed and ssh write them.

`user@host`, `host slots=8` (Open MPI, DeepSpeed), `host:8` (MPICH's machine file), `ssh://user@host:2222` (ssh(1)),
`[::1]:8` and `::1` for IPv6, `#` begins a comment. Open MPI: docs.open-mpi.org, "Scheduling processes across hosts";
MPICH: "Using the Hydra Process Manager"; DeepSpeed: deepspeed.ai, "Resource Configuration (multi-node)".
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anabatic.core.errors import ConfigError

_MOST = 256
"""Processes on one machine, as everywhere in the launcher."""
_LONGEST = 1 << 20
"""Characters of a file."""
_MACHINES = 512
"""ssh is started for all of them at once, from one machine."""
_LETTERS = 253
"""Of a name (RFC 1035)."""
_SLOTS = ("slots", "max_slots", "max-slots", "sockets", "max_sockets")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]*[$]?")
_SHOWN = "node1 slots=8, user@10.0.0.2, node3 port=2222, ssh://node4:2222, [fe80::1]"


@dataclass(frozen=True)
class Host:
    """A machine of the file.

    Attributes:
        name: name or address, an IPv6 address without brackets.
        user: to log in as; empty: ssh's own choice.
        port: of its sshd; None: ssh's own choice.
        slots: processes that may run there; None: the file does not say.
        line: of the file, from 1.
    """

    name: str
    user: str = ""
    port: int | None = None
    slots: int | None = None
    line: int = 0

    @property
    def login(self) -> str:
        """What a user types after `ssh` to get there."""
        port = f"-p {self.port} " if self.port is not None else ""
        return port + (f"{self.user}@{self.name}" if self.user else self.name)


def read(path: Path) -> list[Host]:
    """Return the hosts of a file in the order of its lines.

    Raises:
        ConfigError: the file cannot be read, a line cannot be understood, a host stands there twice, or there is none.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_LONGEST + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"--hosts {path} cannot be read: {why}", f"a file with one host a line: {_SHOWN}") from error
    if len(text) > _LONGEST:
        raise ConfigError(
            f"--hosts {path} has more than {_LONGEST >> 20} MiB", f"a file with one host a line: {_SHOWN}"
        )
    return parse(text, str(path))


def parse(text: str, source: str) -> list[Host]:
    """Return the hosts that a text names; see `read`.

    Args:
        source: what the text is called in messages.
    """
    found: dict[tuple[str, int | None], Host] = {}
    for number, raw in enumerate(text.splitlines(), 1):
        words = raw.partition("#")[0].split()
        if not words:
            continue
        host = _Line(source, number).host(words)
        first = found.setdefault((host.name.lower(), host.port), host)
        if first is not host:
            raise ConfigError(
                f"{source}:{number}: {host.name} stands in line {first.line} already",
                "one line for each machine; say how many processes it takes with slots=8",
            )
    if not found:
        raise ConfigError(f"{source} names no host", f"one a line: {_SHOWN}")
    if len(found) > _MACHINES:
        raise ConfigError(
            f"{source} names {len(found)} hosts, and ssh reaches {_MACHINES} at once",
            "use a scheduler for so many: anabatic launch slurm, or k8s",
        )
    return list(found.values())


@dataclass(frozen=True)
class _Line:
    source: str
    number: int

    def host(self, words: list[str]) -> Host:
        user, name, port, slots = self._place(words[0])
        given = dict(self._settings(words[1:]))
        if "port" in given and port is not None:
            raise self._wrong(f"{words[0]} names a port, and port= another")
        port = given.get("port", port)
        if port is not None and not 0 < port < 65536:
            raise self._wrong(f"port {port}", "ports are 1 to 65535")
        counts = [given[key] for key in _SLOTS if key in given]
        slots = min([*counts, *([slots] if slots is not None else [])], default=None)
        if slots is not None and not 1 <= slots <= _MOST:
            hint = f"a port of ssh is written {name} port={slots}" if slots > _MOST else "leave the line out"
            raise self._wrong(f"{slots} processes on {name}, which takes 1 to {_MOST}", hint)
        return Host(name, user, port, slots, self.number)

    def _place(self, word: str) -> tuple[str, str, int | None, int | None]:
        """Return user, name, port and slots of `[ssh://][user@]host[:number]`."""
        url = word.startswith("ssh://")
        user, at, place = word.removeprefix("ssh://").removesuffix("/" if url else "").rpartition("@")
        if at and not _USER.fullmatch(user):
            raise self._wrong(f'"{user}" is no name of a user')
        name, number = self._number(place)
        if (len(name) > _LETTERS or not _NAME.fullmatch(name)) and not _is_address(name):
            raise self._wrong(f'"{name[:_LETTERS]}" is no name and no address of a host')
        return user, name, number if url else None, None if url else number

    def _number(self, place: str) -> tuple[str, int | None]:
        """Split `host:8`, `[::1]:8` and `::1`."""
        if place.startswith("["):
            name, closed, rest = place[1:].partition("]")
            if not closed or not _is_address(name) or (rest and not rest.startswith(":")):
                raise self._wrong(f'"{place}" is no address in brackets')
            return name, self._whole(rest[1:], place) if rest else None
        if place.count(":") > 1:
            return place, None
        name, colon, number = place.partition(":")
        return name, self._whole(number, place) if colon else None

    def _settings(self, words: list[str]) -> Iterator[tuple[str, int]]:
        for word in words:
            key, equals, value = word.partition("=")
            if not equals or key not in (*_SLOTS, "port"):
                raise self._wrong(f'"{word}" is not understood', f"after the host: slots=8 or port=2222; {_SHOWN}")
            yield key, self._whole(value, word)

    def _whole(self, text: str, word: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 9:
            raise self._wrong(f'"{text}" in "{word}" is no whole number')
        return int(text)

    def _wrong(self, what: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.source}:{self.number}: {what}", hint or f"one host a line: {_SHOWN}")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)  # an IPv6 address may name its interface: fe80::1%eth0
    except ValueError:
        return False
    return True
