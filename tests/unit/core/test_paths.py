"""A folder for one writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.core.errors import Failure
from anabatic.core.paths import alone

HOLD = """
import sys, time
from pathlib import Path
from anabatic.core.paths import alone
with alone(Path(sys.argv[1]), "test"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_writer_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    with pytest.raises(Failure, match="another training run works in"), alone(tmp_path, "training run"):
        pass
    first.kill()
    first.wait()
    first.stdout.close()
    with alone(tmp_path, "training run"):
        assert (tmp_path / ".lock").exists()
