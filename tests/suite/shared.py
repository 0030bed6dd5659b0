"""What is expensive is made once, by the first worker that needs it, and shared by all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = "ANABATIC_TEST_SHARED"
"""The folder that the pytest processes of one command share; unset: that of the workers of one process."""


def build_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """Return a folder that `build` has filled, here or in another worker; it must not be written to afterwards.

    A build that fails leaves nothing, and the next worker tries again.
    """
    base = factory.getbasetemp()
    root = Path(os.environ.get(FOLDER) or (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base))
    folder, done = root / name, root / f"{name}.done"
    with open(root / f"{name}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            build(folder)
            done.touch()
    return folder
