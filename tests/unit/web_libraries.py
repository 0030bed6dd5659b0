"""Are the libraries of the chat page here? Set-up fetches them; without npm or a network there are none."""

from __future__ import annotations

import pytest

from anabatic.infer.web import libraries

NEEDS_LIBRARIES = pytest.mark.skipif(
    bool(libraries.find_wrong_files(libraries.read_table())),
    reason="the libraries of the page were not fetched: python scripts/fetch_web_libraries.py",
)
