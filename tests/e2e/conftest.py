"""What the commands under test share: text, a tokenizer, a base model and its losses."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from anabatic.testing.tiny import tiny_text
from e2e.home import Home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Text and a tokenizer trained on it."""
    root = tmp_path_factory.mktemp("home")
    made = Home(root, tiny_text(root), root / "tokenizer", root / "cache")
    made.anabatic("tokenizer", "train", "--data.train", made.text, "--vocab-size", 320, "--out", made.tokenizer)
    return made


@pytest.fixture(scope="session")
def base(home: Home) -> Path:
    """The run folder of a pretraining in one process that nobody disturbed; it must not be written to."""
    out = home.root / "base"
    home.anabatic(*home.pretrain(out))
    return out


@pytest.fixture(scope="session")
def base2(home: Home) -> Path:
    """The same in two processes."""
    out = home.root / "base2"
    home.anabatic(*home.pretrain(out, processes=2))
    return out


@pytest.fixture(scope="session")
def draw() -> random.Random:
    """Random numbers whose seed is printed: ANABATIC_TEST_SEED=... repeats a run that failed."""
    seed = int(os.environ.get("ANABATIC_TEST_SEED") or time.time_ns() % 1_000_000)
    print(f"ANABATIC_TEST_SEED={seed}")
    return random.Random(seed)
