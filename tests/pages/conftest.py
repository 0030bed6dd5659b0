"""What the pages need is made once; each page has a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from pages.stand import Stand
from suite.shared import build_once


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """Models, runs and files under the names that the pages use."""
    pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")

    def build(root: Path) -> None:
        (root / "stand").mkdir()
        Stand(root / "stand", root / "cache").make()

    root = build_once(tmp_path_factory, "pages", build)
    return Stand(root / "stand", root / "cache")
