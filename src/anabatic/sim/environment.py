"""The variables that a command inside the simulation gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from anabatic.sim.build import Build
from anabatic.sim.machine import CANN, PACKAGE, SEGMENT

DROPPED = ("ASCEND_CUSTOM_OPP_PATH", "ATB_HOME_PATH", "RANK_TABLE_FILE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables of a real installation, or that would keep torch_npu from loading."""


def variables(outer: Mapping[str, str], build: Build, segment: str) -> dict[str, str]:
    """Return the environment of COMMAND: `outer` with the simulated CANN in place of a real one."""
    inner = {key: value for key, value in outer.items() if key not in DROPPED}
    inner[SEGMENT] = segment
    inner[CANN] = build.wheel.cann
    inner[PACKAGE] = str(Path(__file__).parents[2])
    _first(inner, "PYTHONPATH", build.wheel.folder)
    _first(inner, "LD_LIBRARY_PATH", build.libraries)
    # The interpreter that the simulator was built for is the one that `python` means.
    _first(inner, "PATH", Path(sys.executable).parent)
    _first(inner, "PATH", build.programs)
    inner["ASCEND_HOME_PATH"] = inner["ASCEND_TOOLKIT_HOME"] = str(build.cann)
    inner["ASCEND_OPP_PATH"] = str(build.cann / "opp")
    inner["TASK_QUEUE_ENABLE"] = "0"  # operators run at once; the runtime insists on it (csrc/runtime/device.cpp)
    return inner


def _first(variables: dict[str, str], name: str, path: Path) -> None:
    old = variables.get(name)
    variables[name] = f"{path}{os.pathsep}{old}" if old else str(path)
