"""Flags of `anabatic sim`: sizes, chips, counts."""

from __future__ import annotations

import pytest

from anabatic.core.errors import AnabaticError, ConfigError
from anabatic_sim import chips, machine_spec


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 2**36), ("512M", 2**29), ("1.5GB", 3 * 2**29), ("4194304", 2**22), ("2 TiB", 2**41)]
)
def test_sizes(text: str, size: int) -> None:
    assert machine_spec.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "1PiB", "1024"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--hbm is"):
        machine_spec.parse_size(text)


def test_every_chip_has_its_speeds() -> None:
    for name, chip in chips.CHIPS.items():
        assert chip.soc == name == chip.device_spec.name
        assert chips.find_sim_chip(name) is chip
        assert chips.find_sim_chip(name.removeprefix("Ascend")) is chip


def test_names_of_the_trade() -> None:
    assert chips.find_sim_chip("910C").soc == "Ascend910_9391"
    assert not chips.find_sim_chip("910A").device_spec.has_bf16
    assert machine_spec.build_machine(1, "910B4").hbm_bytes == 32 * 2**30


@pytest.mark.parametrize(("name", "hint"), [("910B", "910B3"), ("910B9", "chips: "), ("H100", "chips: ")])
def test_unknown_chips(name: str, hint: str) -> None:
    with pytest.raises(AnabaticError) as raised:
        chips.find_sim_chip(name)
    assert hint in raised.value.hint


@pytest.mark.parametrize("npus", [0, 65, -1])
def test_counts(npus: int) -> None:
    with pytest.raises(ConfigError, match=f"--npus is {npus}"):
        machine_spec.build_machine(npus)
