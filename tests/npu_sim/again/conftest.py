"""The end-to-end tests once more, every command on two simulated NPUs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from anabatic.testing.tiny_models import write_tiny_text
from e2e.conftest import base, base2, both
from e2e.home import Home
from npu_sim.conftest import CACHE

__all__ = ["base", "base2", "both"]


@pytest.fixture(scope="session")
def home(_built: None, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Text and a tokenizer trained on it; commands run under `anabatic sim`, whose wheel and build are the user's."""
    root = tmp_path_factory.mktemp("npus")
    cache = root / "cache"
    cache.mkdir()
    (cache / "sim").symlink_to(CACHE / "sim")
    plain = Home(root, write_tiny_text(root), root / "tokenizer", cache)
    plain.anabatic("tokenizer", "train", "--data.train", plain.text, "--vocab-size", 320, "--out", plain.tokenizer)
    program = (sys.executable, "-m", "anabatic", "sim", "--npus", "2", "--")
    return replace(plain, device="npu", program=program)
