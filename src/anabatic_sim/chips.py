"""Facts of the simulated runtime about a chip. Speeds and memory are in `device.table`; here is the rest.

Sources: platform_config/*.ini of CANN 8.1.RC1 (cores, clock, L2). The SoC names are what `aclrtGetSocName` returns.
Of the 950 family the cores are published (`device.table`), and the clock follows from them and the peak; its L2 cache
is not published: that of the 910B stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.device import table


@dataclass(frozen=True)
class SimChip:
    """One device as torch_npu sees it: a chip, or one of the two dies of a 910C."""

    soc: str
    """As aclrtGetSocName gives it; also the name of its row in `device.table`."""
    npu_smi_name: str
    """As npu-smi prints it."""
    cube_cores: int
    vector_cores: int
    clock_mhz: int
    l2_mib: int

    @property
    def device_spec(self) -> table.Chip:
        """Its speeds and memory."""
        found = table.find_chip(self.soc)
        assert found is not None  # a test walks all rows
        return found


_SIM_CHIPS = (
    SimChip("Ascend910B1", "910B1", 24, 48, 1850, 192),
    SimChip("Ascend910B2", "910B2", 24, 48, 1800, 192),
    SimChip("Ascend910B3", "910B3", 20, 40, 1800, 192),
    SimChip("Ascend910B4", "910B4", 20, 40, 1500, 96),
    SimChip("Ascend910_9391", "Ascend910", 24, 48, 1850, 192),
    SimChip("Ascend910_9381", "Ascend910", 24, 48, 1800, 192),
    SimChip("Ascend910_9372", "Ascend910", 20, 40, 1800, 192),
    SimChip("Ascend910_9362", "Ascend910", 20, 40, 1500, 192),
    SimChip("Ascend950PR_9599", "Ascend950PR", 32, 64, 1650, 192),
    SimChip("Ascend950PR_9579", "Ascend950PR", 28, 56, 1650, 192),
    SimChip("Ascend950DT_9582", "Ascend950DT", 36, 72, 1650, 192),
    SimChip("Ascend910PremiumA", "910PremiumA", 32, 32, 1220, 32),
    SimChip("Ascend910ProA", "910ProA", 32, 32, 1100, 32),
    SimChip("Ascend910A", "910A", 32, 32, 1000, 32),
    SimChip("Ascend310P3", "310P3", 8, 7, 1060, 16),
)

CHIPS: dict[str, SimChip] = {row.soc: row for row in _SIM_CHIPS}
CHIP_ALIASES = {
    "910C": "Ascend910_9391",
    "310P": "Ascend310P3",
    "950PR": "Ascend950PR_9599",
    "950DT": "Ascend950DT_9582",
}
"""Names of the trade; a 910C counts as its two dies, each a device, a 950 as one."""


def find_sim_chip(name: str) -> SimChip:
    """Return the chip called `name`: `910B3`, `Ascend910B3` or `910C`.

    Raises:
        ConfigError: there is none; `910B` is refused because that name is the first generation's.
    """
    if name in ("910B", "Ascend910B"):
        raise ConfigError(
            f'--chip is "{name}", which names an old 30-core chip without bf16',
            "the Atlas A2 chips are 910B1, 910B2, 910B3 and 910B4",
        )
    soc = CHIP_ALIASES.get(name, name if name.startswith("Ascend") else f"Ascend{name}")
    if soc not in CHIPS:
        known = [key.removeprefix("Ascend") for key in CHIPS] + list(CHIP_ALIASES)
        raise ConfigError(f'--chip is "{name}".{did_you_mean(name, known)}', f"chips: {', '.join(known)}")
    return CHIPS[soc]
