from __future__ import annotations

from pathlib import Path

import pytest

from anabatic.core import log
from unit.pipeline.bench import Bench


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    log.setup()
    return Bench(tmp_path)
