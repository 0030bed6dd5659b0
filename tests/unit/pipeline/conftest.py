from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.core import log
from unit.pipeline.bench import Bench


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    log.setup_logging()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("text")
    (tmp_path / "c.jsonl").write_text('{"query": "a", "response": "b"}\n')
    return Bench(tmp_path)
