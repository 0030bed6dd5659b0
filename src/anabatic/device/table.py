"""Device table: one row per device type, one per chip. Data only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelSet = Literal["reference", "cpu", "npu"]


@dataclass(frozen=True)
class DeviceRow:
    """Facts about a device type."""

    type: str
    collective: str
    """Backend of torch.distributed."""
    visible_env: str
    """Variable that hides devices from a process; empty: there is none."""
    alloc_env: tuple[str, str]
    """Allocator variable and the value that suits training; empty: there is none."""
    start_env: tuple[tuple[str, str], ...]
    """Environment variables, with values, for the collectives of several processes."""
    dtype: Literal["bf16", "fp16", "fp32"]
    """Dtype of matrix products, unless the chip's row excludes it."""
    kernels: KernelSet
    """Which implementation of the fused operators runs (`ops.py`)."""
    fused_adamw: bool
    """torch's own fused AdamW kernel runs here and honours `found_inf`."""
    compile_pays: bool
    """torch.compile is worth its start-up time on long runs."""
    group_adapters: bool
    """Kernel launches cost more than multiplying zeros when adapters are computed in groups."""
    fuse_layers: bool
    """A decoder layer in one autograd function pays (`cpu_speed/decoder_layer.py`)."""
    cast_weights_together: bool
    """Kernel launches cost more than copying a block's weights once more."""
    read_cache_together: bool
    """Kernel launches cost more than padding and copying the cached tokens of generating requests."""
    graph_class: str
    """Class in torch's module of the device that captures decode steps as graphs; empty: launches cost little, or no
    such device has run them."""
    pin_memory: bool
    chunk_bytes: int
    """Bytes of logits that linear_cross_entropy holds at a time."""
    direct_generation: bool = False
    """Known decoders generate without their modules (`cpu_speed/direct_forward.py`): measured and tested here."""


_ROWS = (
    # torch.compile on NPU needs triton-ascend of one exact version (TorchNPU 26.2.0 release notes): opt-in.
    DeviceRow(
        type="npu",
        collective="hccl",
        visible_env="ASCEND_RT_VISIBLE_DEVICES",
        alloc_env=("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
        # Ranks wait 120 s for each other by default: too short when one reads data (HCCL documentation).
        start_env=(("HCCL_CONNECT_TIMEOUT", "1200"),),
        dtype="bf16",
        kernels="npu",
        fused_adamw=False,
        compile_pays=False,
        group_adapters=True,
        fuse_layers=False,
        cast_weights_together=True,
        read_cache_together=True,
        graph_class="NPUGraph",
        pin_memory=True,
        chunk_bytes=512 << 20,
    ),
    DeviceRow(
        type="cuda",
        collective="nccl",
        visible_env="CUDA_VISIBLE_DEVICES",
        alloc_env=("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        start_env=(),
        dtype="bf16",
        kernels="reference",
        fused_adamw=True,
        compile_pays=True,
        group_adapters=True,
        fuse_layers=False,
        cast_weights_together=False,
        read_cache_together=True,
        graph_class="",
        pin_memory=True,
        chunk_bytes=512 << 20,
    ),
    DeviceRow(
        type="mps",
        collective="gloo",
        visible_env="",
        alloc_env=("", ""),
        start_env=(),
        dtype="fp32",
        kernels="reference",
        fused_adamw=False,
        compile_pays=False,
        group_adapters=False,
        fuse_layers=False,
        cast_weights_together=False,
        read_cache_together=True,
        graph_class="",
        pin_memory=False,
        chunk_bytes=128 << 20,
    ),
    # fp32 gives the same digits on every CPU; half formats are faster only with instructions for them (docs/dev).
    # Eight MiB of logits stay in the cache.
    DeviceRow(
        type="cpu",
        collective="gloo",
        visible_env="",
        alloc_env=("", ""),
        start_env=(),
        dtype="fp32",
        kernels="cpu",
        fused_adamw=True,
        compile_pays=False,
        group_adapters=False,
        fuse_layers=True,
        cast_weights_together=False,
        read_cache_together=False,
        graph_class="",
        pin_memory=False,
        chunk_bytes=8 << 20,
        direct_generation=True,
    ),
)
DEVICES: dict[str, DeviceRow] = {}
for _row in _ROWS:
    DEVICES[_row.type] = _row


@dataclass(frozen=True)
class Chip:
    """Figures of one chip, that is, of one torch device."""

    name: str
    """Name that the device reports, or its prefix."""
    half_tflops: float
    """Dense peak of fp16 = bf16 matrix products, in 1e12 operations per second."""
    memory_gib: float
    bandwidth_gbs: float
    """Device memory, 1e9 bytes per second; 0: not published."""
    has_bf16: bool = True
    watts: int = 0
    """Maximum power published by the vendor; 0: none is published."""
    taken_gib: float | None = None
    """Memory in use before a job starts; None: not measured."""
    can_train: bool = True
    """False: the vendor sells it for inference."""


# Ascend: cube cores x 4096 MAC x 2 x clock, from the platform_config/*.ini of CANN 8.1.RC1; memory and bandwidth from
# the data sheets and Ascend/msmodeling. A device of an A3 server is one of a card's two dies.
# The 910B4 is sold with 32 GB (Atlas 300T A2, 800I A2) and, as 910B4-1, with 64 GB: the platform_config of CANN 8.1
# still says 32 of it, npu-smi of such cards and the data sheet of the 800I A2 say 64.
# 950: memory and bandwidth from Huawei's announcement of 18 September 2025 (950PR: HiBL 1.0; 950DT: HiZQ 2.0), cube
# cores and peak from table 3-1 of its white paper as Ascend/pytorch's patch of torchtitan gives them (32 cores 432, 36
# cores 486); a 9579 has 28 of these cores (CANN 9.0), which others have 32 is not published. fp8 and fp4 are not used.
# The 310P is Atlas 300I and 300V, inference products: no bf16, few collectives (torch_npu's lists of products).
# NVIDIA: data sheets, dense figures; where a name covers several cards, the power of the largest. Power of the first
# Ascend 910: Huawei's announcement of 23 August 2019 ("310 W"); of its successors none is published.
CHIPS: tuple[Chip, ...] = (
    Chip("Ascend910B1", 363.7, 64, 1600),
    Chip("Ascend910B2C", 353.9, 64, 1600),
    Chip("Ascend910B2", 353.9, 64, 1600),
    Chip("Ascend910B3", 294.9, 64, 1600),
    Chip("Ascend910B4-1", 245.8, 64, 1600),
    Chip("Ascend910B4", 245.8, 32, 800),
    Chip("Ascend910_9391", 363.7, 64, 1600),
    Chip("Ascend910_9392", 363.7, 64, 1600),
    Chip("Ascend910_9381", 353.9, 64, 1600),
    Chip("Ascend910_9382", 353.9, 64, 1600),
    Chip("Ascend910_9372", 294.9, 64, 1600),
    Chip("Ascend910_9362", 245.8, 64, 1600),
    Chip("Ascend950PR_9599", 432.0, 128, 1600),
    Chip("Ascend950PR_9579", 378.0, 128, 1600),
    Chip("Ascend950DT_9582", 486.0, 144, 4000),
    Chip("Ascend910PremiumA", 320.0, 32, 1200, has_bf16=False),
    Chip("Ascend910ProA", 288.0, 32, 1200, has_bf16=False),
    Chip("Ascend910ProB", 283.0, 32, 1200, has_bf16=False),
    Chip("Ascend910A", 262.0, 32, 1200, has_bf16=False, watts=310),
    Chip("Ascend910B", 221.0, 32, 1200, has_bf16=False),
    Chip("Ascend310P3", 69.5, 24, 204, has_bf16=False, can_train=False),
    Chip("NVIDIA B200", 2250.0, 180, 8000, watts=1000),
    Chip("NVIDIA H200", 989.0, 141, 4800, watts=700),
    Chip("NVIDIA H100 80GB HBM3", 989.0, 80, 3350, watts=700),
    Chip("NVIDIA H100 PCIe", 756.0, 80, 2000, watts=350),
    Chip("NVIDIA H100", 989.0, 80, 3350, watts=700),
    Chip("NVIDIA H800", 989.0, 80, 3350, watts=700),
    Chip("NVIDIA H20", 148.0, 96, 4000, watts=400),
    Chip("NVIDIA A100", 312.0, 80, 2000, watts=400),
    Chip("NVIDIA A800", 312.0, 80, 2000, watts=400),
    Chip("NVIDIA L40S", 362.0, 48, 864, watts=350),
    Chip("NVIDIA A10", 125.0, 24, 600, watts=150),
    Chip("NVIDIA GeForce RTX 4090", 165.0, 24, 1008, watts=450),
    Chip("NVIDIA GeForce RTX 3090", 71.0, 24, 936, watts=350),
    Chip("Tesla V100", 125.0, 32, 900, has_bf16=False, watts=300),
    Chip("Tesla T4", 65.0, 16, 320, has_bf16=False, watts=70),
)


def find_chip(name: str) -> Chip | None:
    """Return the row of a device name: an exact match, else the longest matching prefix, else None.

    "Ascend910B" without a digit is the first generation without bf16, so Ascend names must match exactly.
    """
    if name.startswith("Ascend"):
        return next((chip for chip in CHIPS if chip.name == name), None)
    matches = [chip for chip in CHIPS if name.startswith(chip.name)]
    return max(matches, key=lambda chip: len(chip.name)) if matches else None


PROCESSOR_NAME = "processor"
"""Name of the row for a CPU, whose figures are measured on the machine (`plan/detect_chip.py`)."""


def get_device_row(chip: Chip) -> DeviceRow:
    """Return the row of a chip's device type."""
    if chip.name.startswith(PROCESSOR_NAME):
        return DEVICES["cpu"]
    return DEVICES["npu" if chip.name.startswith("Ascend") else "cuda"]
