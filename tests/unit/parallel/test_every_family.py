"""Every family over every dimension of a mesh: two processes train as one does, or say why they cannot."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from anabatic.device.device import select_device
from anabatic.parallel.world import World, init_world, leave_world
from anabatic_testing.multiprocess import spawn_ranks
from unit.parallel import family_grid
from unit.parallel.one_step import DEVICE

pytestmark = pytest.mark.process


def together(folder: Path) -> None:
    device = select_device(DEVICE)
    init_world(device)
    family_grid.train_together(folder, device)
    leave_world(World(size=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    family_grid.save_models(root)
    spawn_ranks(together, 2, root)
    return root


train_alone = functools.cache(family_grid.train_alone)


@pytest.mark.parametrize(("family", "dimension"), family_grid.GRID)
def test_two_processes_train_as_one_does(folder: Path, family: str, dimension: str) -> None:
    places = [folder / f"{family} {dimension} {rank}" for rank in range(2)]
    if (family, dimension) in family_grid.REFUSED:
        family_grid.check_refusal(family, dimension, places)
        return
    expected, ranks = train_alone(folder, family), family_grid.read_ranks(folder, family, dimension)
    for found in ranks:
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            scale = value.abs().max() + 1e-9
            most = 2e-4 if key.endswith(("weight", "bias", "valid")) else 2e-5  # as in test_context.py
            torch.testing.assert_close(found[key] / scale, value / scale, rtol=0, atol=most, msg=key)
    for key, value in ranks[0].items():  # copies of a weight stay copies
        assert torch.equal(ranks[1][key], value), key
