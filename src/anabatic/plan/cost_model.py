"""Estimated time of operators and collectives on a chip; the simulated NPU uses the same formulas
(sim/csrc/runtime/paper.cpp).

The time of an operator is its launch on the device plus the longer of its arithmetic and its memory traffic (a
roofline). The time of a collective is its launch plus the bytes each device sends divided by the bandwidth of its
links. Efficiencies and launch costs are those of Ascend/msmodeling's device table (`tensor_cast/device.py`): 0.7 of the
peak for arithmetic, 0.6 for memory, 0.7 for links; 2 us for a vector operator, 5 us for one of the cube cores, 10 us
for a collective. Between servers the number of rounds of a collective is the logarithm of the number of servers: HCCL's
nonuniform hierarchical ring, its choice for many servers (HCCL documentation, HCCL_ALGO).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Literal

from anabatic.device.table import PROCESSOR_NAME, Chip

COMPUTE_EFFICIENCY = 0.7
MEMORY_EFFICIENCY = 0.6
LINK_EFFICIENCY = 0.7
LAUNCH_NS, LAUNCH_CUBE_NS, LAUNCH_COLLECTIVE_NS = 2000.0, 5000.0, 10000.0
HOST_NS = 10000.0
"""Host time of a two-stage aclnn call: the middle of 5 to 20 us (Ascend/pytorch, tuning guide)."""
FP32_FRACTION = 0.25
"""Speed of fp32 products on the cube cores relative to fp16 (msmodeling: 75 to 99.5 of 280 to 376 TFLOP/s, HF32
included)."""
PCIE_GBS = 31.5
"""PCIe 4.0 x16, one direction. An assumption: the figures of the chips are not published."""
NETWORK_GBS = 25.0
"""200 Gb/s RoCE per device (msmodeling)."""
NETWORK_NS = 10000.0
"""Latency of one exchange between servers: an assumption."""

ComputeUnit = Literal["vector", "cube half", "cube single", "host link"]
COMPUTE_UNITS: tuple[ComputeUnit, ...] = ("vector", "cube half", "cube single", "host link")
"""Compute units, in the order of `enum SimUnit` (csrc/sim.h)."""
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "all_to_all", "send", "recv",
    "barrier",
)  # fmt: skip
"""Collectives, in the order of `enum SimCollective`."""


@dataclass(frozen=True)
class ChipRates:
    """`struct SimRates` of csrc/segment.h: operations or bytes per second, efficiency included, and nanoseconds."""

    half_flops: float
    single_flops: float
    memory: float
    host_link: float
    peer: float
    peers: float
    card: float
    network: float
    launch_ns: float
    launch_cube_ns: float
    launch_collective_ns: float
    network_ns: float
    host_ns: float
    server: int


_LINKS = (
    ("Ascend910B", 28.0, 196.0, 0.0, 8),  # a full mesh of seven HCCS links (Atlas 800T A2)
    ("Ascend910_93", 196.0, 196.0, 224.0, 16),  # HCCS switched: every peer at the full rate; SIO in a card (A3)
    ("NVIDIA B200", 900.0, 900.0, 0.0, 8),
    ("NVIDIA H20", 450.0, 450.0, 0.0, 8),  # and H200: NVLink 4, 900 GB/s both ways together
    ("NVIDIA H100 PCIe", PCIE_GBS, PCIE_GBS, 0.0, 8),
    ("NVIDIA H100", 450.0, 450.0, 0.0, 8),
    ("NVIDIA H800", 200.0, 200.0, 0.0, 8),
    ("NVIDIA A100", 300.0, 300.0, 0.0, 8),
    ("NVIDIA A800", 200.0, 200.0, 0.0, 8),
)
"""(prefix of the chip's name, GB/s to one peer, to all peers, to the other die of the card, devices per server), one
direction. Ascend: msmodeling; NVIDIA: data sheets."""


def _find_links(chip: Chip) -> tuple[float, float, float, int]:
    """Return the link row of a chip; default: eight devices connected by PCIe."""
    return next((row[1:] for row in _LINKS if chip.name.startswith(row[0])), (PCIE_GBS, PCIE_GBS, 0.0, 8))


def get_chip_rates(chip: Chip) -> ChipRates:
    """Return the constants of a chip."""
    peer, peers, card, server = _find_links(chip)
    half = chip.half_tflops * 1e12 * COMPUTE_EFFICIENCY
    return ChipRates(
        half_flops=half,
        single_flops=half * (1.0 if chip.name == PROCESSOR_NAME else FP32_FRACTION),
        memory=(chip.bandwidth_gbs or 1200.0) * 1e9 * MEMORY_EFFICIENCY,
        host_link=PCIE_GBS * 1e9 * LINK_EFFICIENCY,
        peer=peer * 1e9 * LINK_EFFICIENCY,
        peers=peers * 1e9 * LINK_EFFICIENCY,
        card=card * 1e9 * LINK_EFFICIENCY,
        network=NETWORK_GBS * 1e9 * LINK_EFFICIENCY,
        launch_ns=LAUNCH_NS,
        launch_cube_ns=LAUNCH_CUBE_NS,
        launch_collective_ns=LAUNCH_COLLECTIVE_NS,
        network_ns=NETWORK_NS,
        host_ns=HOST_NS,
        server=server,
    )


def separate_ranks(rates: ChipRates, distance: int) -> ChipRates:
    """Return the constants for groups whose neighbours are `distance` ranks apart: so many share a server."""
    if distance == 1:
        return rates
    return replace(rates, server=max(1, rates.server // distance), card=0.0)


def list_rate_values(rates: ChipRates) -> list[float | int]:
    """Return the constants in the order of the C structure."""
    return list(asdict(rates).values())


def estimate_operator_ns(rates: ChipRates, unit: ComputeUnit, flops: float, bytes_moved: float) -> float:
    """Return the nanoseconds of an operator that reads and writes `bytes_moved` bytes."""
    if unit == "host link":
        return rates.launch_ns + 1e9 * bytes_moved / rates.host_link
    memory_ns = 1e9 * bytes_moved / rates.memory
    if unit == "vector":
        return rates.launch_ns + memory_ns
    flops_per_second = rates.half_flops if unit == "cube half" else rates.single_flops
    return rates.launch_cube_ns + max(memory_ns, 1e9 * flops / flops_per_second)


def get_collective_pattern(kind: str, ranks: int) -> tuple[float, int]:
    """Return the fraction of the tensor that each of `ranks` sends, and the number of sequential phases."""
    fraction = (ranks - 1) / ranks if ranks > 1 else 0.0
    if kind in ("all_reduce", "broadcast", "reduce"):
        return 2 * fraction, 2  # scatter (and add), then gather
    if kind in ("send", "recv"):
        return 1.0, 1
    return (0.0 if kind == "barrier" else fraction), 1


def estimate_collective_ns(rates: ChipRates, kind: str, total: float, ranks: int) -> float:
    """Return the nanoseconds of a collective over `total` bytes: inside servers first, then between them.

    Two ranks are taken to be the dies of one card, where a card has two; `separate_ranks` makes rates for others.
    """
    is_point_to_point = kind in ("send", "recv")
    ranks_per_server = min(ranks, rates.server)
    servers = -(-ranks // ranks_per_server)
    ns = rates.launch_collective_ns
    if ranks_per_server > 1 or is_point_to_point:
        link = rates.peer if is_point_to_point else min(rates.peers, (ranks_per_server - 1) * rates.peer)
        if ranks == 2:
            link = max(link, rates.card)
        ns += 1e9 * get_collective_pattern(kind, ranks_per_server)[0] * total / link
    if servers > 1 and not is_point_to_point:
        fraction, phases = get_collective_pattern(kind, servers)
        rounds = phases * (servers - 1).bit_length()  # the logarithm, rounded up
        ns += rounds * rates.network_ns + 1e9 * fraction * total / ranks_per_server / rates.network
    return ns
