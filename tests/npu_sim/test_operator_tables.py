"""The tables of operators on the fidelity pages are those of this simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_sim.conftest import CACHE, Sim

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["sim_coverage.py", "sim_stacks.py"])
def test_table_is_up_to_date(sim: Sim, program: str) -> None:
    words = [sys.executable, str(ROOT / "scripts" / program), "--check"]
    variables = {**os.environ, "ANABATIC_CACHE": str(CACHE)}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-2000:]
