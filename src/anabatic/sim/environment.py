"""The variables that a command inside the simulation gets."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from anabatic.sim.machine_spec import CANN_VARIABLE, PACKAGE_VARIABLE, SEGMENT_VARIABLE
from anabatic.sim.native_build import SimulatorBuild

DROPPED_VARIABLES = ("ASCEND_CUSTOM_OPP_PATH", "ATB_HOME_PATH", "RANK_TABLE_FILE", "TORCH_DEVICE_BACKEND_AUTOLOAD")
"""Variables of a real installation, or that would keep torch_npu from loading."""


def build_environment(outer: Mapping[str, str], build: SimulatorBuild, segment: str) -> dict[str, str]:
    """Return the environment of COMMAND: `outer` with the simulated CANN in place of a real one."""
    inner = {key: value for key, value in outer.items() if key not in DROPPED_VARIABLES}
    inner[SEGMENT_VARIABLE] = segment
    inner[CANN_VARIABLE] = build.wheel.cann_release
    inner[PACKAGE_VARIABLE] = str(Path(__file__).parents[2])
    _prepend_path(inner, "PYTHONPATH", build.wheel.folder)
    _prepend_path(inner, "LD_LIBRARY_PATH", build.library_folder)
    # The interpreter that the simulator was built for is the one that `python` means.
    _prepend_path(inner, "PATH", Path(sys.executable).parent)
    _prepend_path(inner, "PATH", build.program_folder)
    inner["ASCEND_HOME_PATH"] = inner["ASCEND_TOOLKIT_HOME"] = str(build.cann_folder)
    inner["ASCEND_OPP_PATH"] = str(build.cann_folder / "opp")
    inner["TASK_QUEUE_ENABLE"] = "0"  # operators run at once; the runtime insists on it (csrc/runtime/device.cpp)
    return inner


def _prepend_path(variables: dict[str, str], name: str, path: Path) -> None:
    old = variables.get(name)
    variables[name] = f"{path}{os.pathsep}{old}" if old else str(path)
