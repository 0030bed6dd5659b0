"""The syntax trees of the project are made once for all tests of a worker."""

from __future__ import annotations

import pytest

from house import tree


@pytest.fixture(scope="session", autouse=True)
def _trees() -> None:
    for path in tree.python_files():
        tree.nodes(path)
