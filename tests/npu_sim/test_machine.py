"""Flags of `anabatic sim`: sizes, chips, counts."""

from __future__ import annotations

import pytest

from anabatic.core.errors import AnabaticError, ConfigError
from anabatic.sim import chips, machine


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 2**36), ("512M", 2**29), ("1.5GB", 3 * 2**29), ("4194304", 2**22), ("2 TiB", 2**41)]
)
def test_sizes(text: str, size: int) -> None:
    assert machine.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GiB", "1PiB", "1024"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError, match="--hbm is"):
        machine.parse_size(text)


def test_every_chip_has_its_speeds() -> None:
    for name, chip in chips.CHIPS.items():
        assert chip.soc == name == chip.row.name
        assert chips.find(name) is chip
        assert chips.find(name.removeprefix("Ascend")) is chip


def test_names_of_the_trade() -> None:
    assert chips.find("910C").soc == "Ascend910_9391"
    assert not chips.find("910A").row.bf16
    assert machine.build(1, "910B4").hbm == 32 * 2**30


@pytest.mark.parametrize(("name", "hint"), [("910B", "910B3"), ("910B9", "chips: "), ("H100", "chips: ")])
def test_unknown_chips(name: str, hint: str) -> None:
    with pytest.raises(AnabaticError) as raised:
        chips.find(name)
    assert hint in raised.value.hint


@pytest.mark.parametrize("npus", [0, 65, -1])
def test_counts(npus: int) -> None:
    with pytest.raises(ConfigError, match=f"--npus is {npus}"):
        machine.build(npus)
