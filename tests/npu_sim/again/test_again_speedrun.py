"""The speedrun on two simulated NPUs; ANABATIC_TEST_SPEEDRUN=all runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e import test_speedrun
from e2e.home import Home


@pytest.mark.skipif(not test_speedrun.ALL, reason="ANABATIC_TEST_SPEEDRUN=all runs it")
def test_every_stage_of_the_speedrun(home: Home, shared_data: Path, tmp_path: Path) -> None:
    test_speedrun.test_every_stage_of_the_speedrun(home, shared_data, tmp_path, 2)
