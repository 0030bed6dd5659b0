"""The secret of a job: what is accepted, and that only the agent sees it."""

from __future__ import annotations

import pytest

from anabatic.core.errors import ConfigError
from anabatic.launch import job_secret


def test_a_secret_is_read_once_and_taken_away() -> None:
    environ = {job_secret.VARIABLE: (secret := job_secret.make_secret()), "A": "b"}
    assert job_secret.read_secret(environ) == secret and len(secret) == 64
    assert job_secret.take_secret(environ) == secret
    assert environ == {"A": "b"} and job_secret.take_secret(environ) == ""


@pytest.mark.parametrize("secret", ["short", "x" * 1025, "a" * 20 + "\n", "é" * 20])
def test_a_secret_that_cannot_be_one(secret: str) -> None:
    with pytest.raises(ConfigError, match=f"ANABATIC_JOB_SECRET has {len(secret)} characters"):
        job_secret.read_secret({job_secret.VARIABLE: secret})
