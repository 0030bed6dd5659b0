"""What the pages need is made once; each page has a copy."""

from __future__ import annotations

import pytest

from pages.stand import Stand


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """Models, runs and files under the names that the pages use."""
    pytest.importorskip("h3", reason="h3 is not installed (it is in the trajectory extra)")
    root = tmp_path_factory.mktemp("pages")
    (root / "stand").mkdir()
    made = Stand(root / "stand", root / "cache")
    made.make()
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A page is a row of commands."""
    for item in items:
        if "pages" in item.path.parts:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(900))
