"""The end-to-end tests once more, every command on two simulated NPUs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from e2e.fixtures import base, base2, both, build_home, home
from e2e.home import Home
from npu_sim.conftest import CACHE

__all__ = ["base", "base2", "both", "home"]


@pytest.fixture(scope="session")
def shared_home(_built: None, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Text and a tokenizer trained on it; commands run under `anabatic sim`, whose wheel and build are the user's."""
    plain = build_home(tmp_path_factory, "npus", CACHE / "sim")
    program = (sys.executable, "-m", "anabatic", "sim", "--npus", "2", "--")
    return replace(plain, device="npu", program=program)
