"""A rank may open a connection to each of the others."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from anabatic.config.sections.common import DeviceSettings
from anabatic.device.device import select_device
from anabatic.parallel.world import init_world, leave_world
from anabatic_testing.multiprocess import spawn_ranks

pytestmark = pytest.mark.process


LITTLE = 300
PROGRAM = f"""
import resource
from anabatic.parallel.world import _allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({LITTLE}, 2000))
_allow_connections(1500)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
_allow_connections(4096)
"""


def _join(folder: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LITTLE, hard))
    world = init_world(select_device(DeviceSettings(type="cpu", threads=1)))
    (folder / f"limit-{world.rank}").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    leave_world(world)


def test_ranks_raise_their_own_limit(tmp_path: Path) -> None:
    spawn_ranks(_join, 2, tmp_path)
    assert all(int((tmp_path / f"limit-{rank}").read_text()) > LITTLE for rank in range(2))


def test_a_hard_limit_below_the_ranks_is_said() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120, env={**os.environ}
    )
    assert done.stdout.split() == ["2000"]
    assert done.stderr.count("4096 ranks are more than the 2000 files that this process may open") == 1, done.stderr
    assert "1500 ranks" not in done.stderr
