"""The address of a Ray cluster's head: whether anything answers there, and what to do where nothing does."""

from __future__ import annotations

import os
import socket

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import parse_whole

_TIMEOUT_SECONDS = 2.0


def split_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `text`, or of RAY_ADDRESS for `auto`; None if it names none, as `auto` or `ray://...`."""
    host, _, port = (os.environ.get("RAY_ADDRESS", "") if text == "auto" else text).rpartition(":")
    number = parse_whole(port, 5)
    return (host, number) if host and "/" not in host and number is not None else None


def answers(address: tuple[str, int]) -> bool:
    """Return whether a connection to a host and port can be made."""
    try:
        socket.create_connection(address, timeout=_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError):  # a port beyond 65535
        return False
    return True


def require_head(text: str) -> None:
    """Make sure that something answers at an address: Ray itself tries for minutes.

    Raises:
        ConfigError: nothing does.
    """
    address = split_address(text)
    if address is not None and not answers(address):
        raise make_connect_error(text, "nothing answers there")


def make_connect_error(text: str, reason: str) -> ConfigError:
    """Return the error for an address without a cluster."""
    hint = "start one by `ray start --head` and `ray start --address HEAD:6379`, or give --address"
    if os.environ.get("RAY_AUTH_MODE") != "token":
        hint += "; a cluster that asks for a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH here, too"
    return ConfigError(f"there is no Ray cluster at {text}: {reason}", hint)
