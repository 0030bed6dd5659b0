"""The secret of a job: its machines prove to each other that they have it before they take part.

The launcher that starts a job makes it (`--hosts`, Slurm, Kubernetes, Ray), and it travels with the job's environment.
It never crosses the network at the rendezvous: both sides answer the other's random number with an HMAC (RFC 2104;
mutual authentication in three passes, ISO/IEC 9798-4). Workers do not see it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, MutableMapping

from anabatic.core.errors import ConfigError

VARIABLE = "ANABATIC_JOB_SECRET"
"""Environment variable with the secret."""
MIN_CHARS = 16
MAX_CHARS = 1024
COORDINATOR, MACHINE = "coordinator", "machine"
"""The two sides; a proof of one is none of the other, so that it cannot be sent back."""
SHELL_COMMAND = "od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n'"
"""Prints a new secret; every Linux has these programs."""


def make_secret() -> str:
    """Return a new secret of 256 random bits."""
    return secrets.token_hex(32)


def read_secret(environ: Mapping[str, str]) -> str:
    """Return the secret of the job; empty: it has none.

    Raises:
        ConfigError: it is too short or too long, or not one line of text.
    """
    secret = environ.get(VARIABLE, "")
    if secret and not (MIN_CHARS <= len(secret) <= MAX_CHARS and secret.isascii() and secret.isprintable()):
        raise ConfigError(
            f"{VARIABLE} has {len(secret)} characters",
            f"use {MIN_CHARS} to {MAX_CHARS} printable ones of ASCII, for example 64 from: {SHELL_COMMAND}",
        )
    return secret


def take_secret(environ: MutableMapping[str, str]) -> str:
    """Return the secret and remove it: programs that this process starts do not need it.

    Raises:
        ConfigError: as for `read_secret`.
    """
    secret = read_secret(environ)
    environ.pop(VARIABLE, None)
    return secret


def compute_proof(secret: str, side: str, key: str, nonces: tuple[str, str]) -> str:
    """Return the proof that a side has the secret.

    Args:
        side: COORDINATOR or MACHINE.
        key: of the machine's process.
        nonces: random numbers of the machine and of the coordinator.
    """
    text = "\n".join((side, key, *nonces))
    return hmac.new(secret.encode(), _encode(text), hashlib.sha256).hexdigest()


def is_proof(given: object, expected: str) -> bool:
    """Return whether a proof is the expected one, in a time that does not depend on how much of it is right."""
    return isinstance(given, str) and hmac.compare_digest(_encode(given), expected.encode())


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold halves of surrogate pairs
