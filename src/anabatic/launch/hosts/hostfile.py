"""Parse a hostfile: one machine per line, as MPI, DeepSpeed and ssh write them.

`user@host`, `host slots=8` (Open MPI, DeepSpeed), `host:8` (MPICH's machine file), `ssh://user@host:2222` (ssh(1)),
`[::1]:8` and `::1` for IPv6, `#` starts a comment. Open MPI: docs.open-mpi.org, "Scheduling processes across hosts";
MPICH: "Using the Hydra Process Manager"; DeepSpeed: deepspeed.ai, "Resource Configuration (multi-node)".
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anabatic.config.sections.launch import MAX_NODES
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import parse_whole

_MAX_SLOTS = 256
"""Most processes on one machine, the same limit as everywhere in the launcher."""
_MAX_FILE_CHARS = 1 << 20
"""Most characters of a file."""
_MAX_NAME_CHARS = 253
"""Most characters of a name (RFC 1035)."""
_SLOT_KEYS = ("slots", "max_slots", "max-slots", "sockets", "max_sockets")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_USER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]*[$]?")
_EXAMPLE_LINES = "node1 slots=8, user@10.0.0.2, node3 port=2222, ssh://node4:2222, [fe80::1]"


@dataclass(frozen=True)
class HostEntry:
    """One machine of a hostfile.

    Attributes:
        name: host name or address; an IPv6 address has no brackets.
        user: user to log in as; empty: ssh's default.
        port: port of its sshd; None: ssh's default.
        slots: processes that may run on it; None: not in the file.
        line_number: line in the file, from 1.
    """

    name: str
    user: str = ""
    port: int | None = None
    slots: int | None = None
    line_number: int = 0

    @property
    def ssh_destination(self) -> str:
        """Return the arguments that a user types after `ssh` to log in."""
        port = f"-p {self.port} " if self.port is not None else ""
        return port + (f"{self.user}@{self.name}" if self.user else self.name)


def read_hostfile(path: Path) -> list[HostEntry]:
    """Return the hosts of a hostfile in the order of its lines.

    Raises:
        ConfigError: the file cannot be read, a line is not understood, a host appears twice, or there is none.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_MAX_FILE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"--hosts {path} cannot be read: {reason}", f"a file with one host a line: {_EXAMPLE_LINES}"
        ) from error
    if len(text) > _MAX_FILE_CHARS:
        raise ConfigError(
            f"--hosts {path} has more than {_MAX_FILE_CHARS >> 20} MiB",
            f"a file with one host a line: {_EXAMPLE_LINES}",
        )
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str) -> list[HostEntry]:
    """Return the hosts in the text of a hostfile; see `read_hostfile`.

    Args:
        source: name of the text in error messages.
    """
    hosts: dict[tuple[str, int | None], HostEntry] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        tokens = line.partition("#")[0].split()
        if not tokens:
            continue
        host = _HostLineParser(source, line_number).parse_host(tokens)
        first = hosts.setdefault((host.name.lower(), host.port), host)
        if first is not host:
            raise ConfigError(
                f"{source}:{line_number}: {host.name} stands in line {first.line_number} already",
                "one line for each machine; say how many processes it takes with slots=8",
            )
    if not hosts:
        raise ConfigError(f"{source} names no host", f"one a line: {_EXAMPLE_LINES}")
    if len(hosts) > MAX_NODES:
        raise ConfigError(
            f"{source} names {len(hosts)} hosts, and a job takes {MAX_NODES}",
            "use a scheduler for so many: anabatic launch slurm, or k8s",
        )
    return list(hosts.values())


@dataclass(frozen=True)
class _HostLineParser:
    source: str
    line_number: int

    def parse_host(self, tokens: list[str]) -> HostEntry:
        user, name, port, slots = self._parse_address(tokens[0])
        options = dict(self._parse_settings(tokens[1:]))
        if "port" in options and port is not None:
            raise self._line_error(f"{tokens[0]} names a port, and port= another")
        port = options.get("port", port)
        if port is not None and not 0 < port < 65536:
            raise self._line_error(f"port {port}", "ports are 1 to 65535")
        counts = [options[key] for key in _SLOT_KEYS if key in options]
        slots = min([*counts, *([slots] if slots is not None else [])], default=None)
        if slots is not None and not 1 <= slots <= _MAX_SLOTS:
            hint = f"a port of ssh is written {name} port={slots}" if slots > _MAX_SLOTS else "leave the line out"
            raise self._line_error(f"{slots} processes on {name}, which takes 1 to {_MAX_SLOTS}", hint)
        return HostEntry(name, user, port, slots, self.line_number)

    def _parse_address(self, token: str) -> tuple[str, str, int | None, int | None]:
        """Return user, name, port and slots of `[ssh://][user@]host[:number]`."""
        url = token.startswith("ssh://")
        user, at_sign, host_and_number = token.removeprefix("ssh://").removesuffix("/" if url else "").rpartition("@")
        if at_sign and not _USER_NAME.fullmatch(user):
            raise self._line_error(f'"{user}" is no name of a user')
        name, port_or_slots = self._split_port(host_and_number)
        if (len(name) > _MAX_NAME_CHARS or not _HOST_NAME.fullmatch(name)) and not _is_address(name):
            raise self._line_error(f'"{name[:_MAX_NAME_CHARS]}" is no name and no address of a host')
        return user, name, port_or_slots if url else None, None if url else port_or_slots

    def _split_port(self, text: str) -> tuple[str, int | None]:
        """Split `host:8`, `[::1]:8` and `::1`."""
        if text.startswith("["):
            name, bracket, rest = text[1:].partition("]")
            if not bracket or not _is_address(name) or (rest and not rest.startswith(":")):
                raise self._line_error(f'"{text}" is no address in brackets')
            return name, self._parse_int(rest[1:], text) if rest else None
        if text.count(":") > 1:
            return text, None
        name, colon, digits = text.partition(":")
        return name, self._parse_int(digits, text) if colon else None

    def _parse_settings(self, tokens: list[str]) -> Iterator[tuple[str, int]]:
        for token in tokens:
            key, equals, value = token.partition("=")
            if not equals or key not in (*_SLOT_KEYS, "port"):
                raise self._line_error(
                    f'"{token}" is not understood', f"after the host: slots=8 or port=2222; {_EXAMPLE_LINES}"
                )
            yield key, self._parse_int(value, token)

    def _parse_int(self, text: str, token: str) -> int:
        if (number := parse_whole(text, 9)) is None:
            raise self._line_error(f'"{text}" in "{token}" is no whole number')
        return number

    def _line_error(self, message: str, hint: str = "") -> ConfigError:
        return ConfigError(f"{self.source}:{self.line_number}: {message}", hint or f"one host a line: {_EXAMPLE_LINES}")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)  # an IPv6 address may name its interface: fe80::1%eth0
    except ValueError:
        return False
    return True
