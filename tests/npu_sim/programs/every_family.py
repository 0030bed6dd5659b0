"""Every family over every dimension of a mesh on two simulated devices (tests/unit/parallel/family_grid.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from safetensors.torch import save_file

from anabatic.config.sections.common import DeviceSettings
from anabatic.device.device import select_device
from unit.parallel import family_grid


def trained(rank, world, folder):
    """Make the steps of both processes; the first also makes those of one process on the CPU."""
    place, settings = Path(folder), DeviceSettings(type="npu", dtype="fp32", threads=1)
    family_grid.train_together(place, select_device(settings), settings)
    for family in list(family_grid.FAMILIES)[rank::world]:
        save_file(family_grid.train_alone(place, family), place / f"{family} alone")
    return True
