"""Estimated time: what operators and collectives would take on the chip; the simulated NPU counts by the same formulas
(sim/csrc/runtime/paper.cpp).

An operator takes its launch on the device plus the longer of its arithmetic and its memory traffic (a roofline). A
collective takes its launch plus what each device must send over what its links carry. Efficiencies and launch costs are
those of Ascend/msmodeling's device table (`tensor_cast/device.py`): 0.7 of the peak for arithmetic, 0.6 for memory, 0.7
for links; 2 us for a vector operator, 5 us for one of the cube cores, 10 us for a collective. Between servers a
collective takes as many rounds as the logarithm of their number: HCCL's nonuniform hierarchical ring, its choice for
many servers (HCCL documentation, HCCL_ALGO).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from anabatic.device.table import PROCESSOR_NAME, Chip

COMPUTE_EFFICIENCY = 0.7
MEMORY_EFFICIENCY = 0.6
LINK_EFFICIENCY = 0.7
LAUNCH_NS, LAUNCH_CUBE_NS, LAUNCH_COLLECTIVE_NS = 2000.0, 5000.0, 10000.0
HOST_NS = 10000.0
"""The middle of the 5 to 20 us that a two-stage aclnn call costs the host (Ascend/pytorch, tuning guide)."""
FP32_FRACTION = 0.25
"""fp32 products on the cube cores against fp16 (msmodeling: 75 to 99.5 of 280 to 376 TFLOP/s, HF32 included)."""
PCIE_GBS = 31.5
"""PCIe 4.0 x16, one direction. The chips' own figures are not published: an assumption."""
NETWORK_GBS = 25.0
"""200 Gb/s RoCE of each device (msmodeling)."""
NETWORK_NS = 10000.0
"""Latency of one exchange between servers: an assumption."""

ComputeUnit = Literal["vector", "cube half", "cube single", "host link"]
COMPUTE_UNITS: tuple[ComputeUnit, ...] = ("vector", "cube half", "cube single", "host link")
"""In the order of `enum SimUnit` (csrc/sim.h)."""
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "scatter", "all_to_all", "send", "recv",
    "barrier",
)  # fmt: skip
"""In the order of `enum SimCollective`."""


@dataclass(frozen=True)
class ChipRates:
    """`struct SimRates` of csrc/segment.h: operations or bytes a second, efficiency taken off, and nanoseconds."""

    half_flops: float
    single_flops: float
    memory: float
    host_link: float
    peer: float
    peers: float
    network: float
    launch_ns: float
    launch_cube_ns: float
    launch_collective_ns: float
    network_ns: float
    host_ns: float
    server: int


_LINKS = (
    ("Ascend910B", 28.0, 196.0, 8),  # a full mesh of seven HCCS links (Atlas 800T A2)
    ("Ascend910_93", 196.0, 196.0, 16),  # switched: every peer at the full rate (A3)
    ("NVIDIA B200", 900.0, 900.0, 8),
    ("NVIDIA H20", 450.0, 450.0, 8),  # and H200: NVLink 4, 900 GB/s both ways together
    ("NVIDIA H100 PCIe", PCIE_GBS, PCIE_GBS, 8),
    ("NVIDIA H100", 450.0, 450.0, 8),
    ("NVIDIA H800", 200.0, 200.0, 8),
    ("NVIDIA A100", 300.0, 300.0, 8),
    ("NVIDIA A800", 200.0, 200.0, 8),
)
"""Start of a chip's name; GB/s to one peer and to all peers, one direction; devices of a server. Ascend: msmodeling;
NVIDIA: data sheets."""


def _find_links(chip: Chip) -> tuple[float, float, int]:
    """The row of a chip; what has none, or no published figure, is taken as eight behind PCIe."""
    return next((row[1:] for row in _LINKS if chip.name.startswith(row[0])), (PCIE_GBS, PCIE_GBS, 8))


def get_chip_rates(chip: Chip) -> ChipRates:
    """Return the constants of a chip."""
    peer, peers, server = _find_links(chip)
    half = chip.half_tflops * 1e12 * COMPUTE_EFFICIENCY
    return ChipRates(
        half_flops=half,
        single_flops=half * (1.0 if chip.name == PROCESSOR_NAME else FP32_FRACTION),
        memory=(chip.bandwidth_gbs or 1200.0) * 1e9 * MEMORY_EFFICIENCY,
        host_link=PCIE_GBS * 1e9 * LINK_EFFICIENCY,
        peer=peer * 1e9 * LINK_EFFICIENCY,
        peers=peers * 1e9 * LINK_EFFICIENCY,
        network=NETWORK_GBS * 1e9 * LINK_EFFICIENCY,
        launch_ns=LAUNCH_NS,
        launch_cube_ns=LAUNCH_CUBE_NS,
        launch_collective_ns=LAUNCH_COLLECTIVE_NS,
        network_ns=NETWORK_NS,
        host_ns=HOST_NS,
        server=server,
    )


def list_rate_values(found: ChipRates) -> list[float | int]:
    """Return the constants in the order of the C structure."""
    return list(asdict(found).values())


def estimate_operator_ns(found: ChipRates, unit: ComputeUnit, flops: float, moved: float) -> float:
    """Return the nanoseconds of an operator that reads and writes `moved` bytes."""
    if unit == "host link":
        return found.launch_ns + 1e9 * moved / found.host_link
    memory = 1e9 * moved / found.memory
    if unit == "vector":
        return found.launch_ns + memory
    rate = found.half_flops if unit == "cube half" else found.single_flops
    return found.launch_cube_ns + max(memory, 1e9 * flops / rate)


def get_collective_pattern(kind: str, ranks: int) -> tuple[float, int]:
    """Return the share of the tensor that each of `ranks` sends, and how many phases follow one another."""
    others = (ranks - 1) / ranks if ranks > 1 else 0.0
    if kind in ("all_reduce", "broadcast", "reduce"):
        return 2 * others, 2  # scatter (and add), then gather
    if kind in ("send", "recv"):
        return 1.0, 1
    return (0.0 if kind == "barrier" else others), 1


def estimate_collective_ns(found: ChipRates, kind: str, total: float, ranks: int) -> float:
    """Return the nanoseconds of a collective over `total` bytes: inside servers first, then between them."""
    pair = kind in ("send", "recv")
    inside = min(ranks, found.server)
    servers = -(-ranks // inside)
    ns = found.launch_collective_ns
    if inside > 1 or pair:
        link = found.peer if pair else min(found.peers, (inside - 1) * found.peer)
        ns += 1e9 * get_collective_pattern(kind, inside)[0] * total / link
    if servers > 1 and not pair:
        share, phases = get_collective_pattern(kind, servers)
        rounds = phases * (servers - 1).bit_length()  # the logarithm, rounded up
        ns += rounds * found.network_ns + 1e9 * share * total / inside / found.network
    return ns
