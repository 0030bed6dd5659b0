"""Every family over every dimension of a mesh: two simulated NPUs make the CPU's gradients, or say why they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from npu_sim import ranks
from npu_sim.conftest import Sim
from unit.parallel import family_grid

ROUNDING = 1e-4
"""Relative: products are fp32 on both sides, in another order."""


@pytest.fixture(scope="module")
def folder(_built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    family_grid.save_models(root)
    assert ranks.run(Sim(root), 2, "every_family", "trained", str(root)) == {0: True, 1: True}
    return root


@pytest.mark.parametrize(("family", "dimension"), family_grid.GRID)
def test_two_devices_make_the_gradients_of_one_process(folder: Path, family: str, dimension: str) -> None:
    places = [folder / f"{family} {dimension} {rank}" for rank in range(2)]
    if (family, dimension) in family_grid.REFUSED:
        family_grid.check_refusal(family, dimension, places)
        return
    expected = load_file(folder / f"{family} alone")
    for found in family_grid.read_ranks(folder, family, dimension):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key.endswith(".grad") or key in ("loss", "norm"):  # an update multiplies the rounding of small gradients
                difference = (found[key].double() - value.double()).norm() / (value.double().norm() + 1e-6)
                assert difference < ROUNDING, key
