"""Every command of the pages, typed in order in a folder with stand-ins; pages/how.py says which are only read."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import pytest

from pages import visit
from pages.stand import Stand


@pytest.mark.parametrize("page", visit.pages(), ids=visit.title)
def test_commands_of_a_page(page: Path, stand: Stand, tmp_path: Path) -> None:
    reader = visit.Visit(stand.copy(tmp_path / "work"), stand.cache)
    wrong = []
    for one in visit.lines(page):
        began = time.monotonic()
        try:
            reader.type(one)
        except Exception:  # the page is read to its end, and all that is wrong is shown below
            wrong.append(f"{one.name}: {one.text}\n{traceback.format_exc()}")
        print(f"{time.monotonic() - began:6.1f} s {one.name} {one.text[:150]}")
    reader.leave()
    assert not wrong, "\n\n".join(wrong)
