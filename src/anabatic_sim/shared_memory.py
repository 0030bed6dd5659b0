"""The shared memory of a simulated machine: mirror of csrc/segment.h (a test compares every offset)."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_char, c_double, c_int32, c_int64, c_uint32, c_uint64
from pathlib import Path

from anabatic.core import process_info
from anabatic.core.errors import Failure
from anabatic.core.formatting import parse_whole
from anabatic.plan import cost_model
from anabatic_sim.fault_injection import FAULT_KINDS, HEALTH_STATES, MAX_FAULTS
from anabatic_sim.machine_spec import SimMachine
from anabatic_sim.program_name import PROGRAM

MAGIC = 0x314D4953414E41
VERSION = 3
MAX_DEVICES = 64
MAX_PROCESSES = 256
SHM_PREFIX = "anabatic-sim-"
"""Every shared object of a machine starts with this and the pid of its `anabatic sim`."""
_SHM = Path("/dev/shm")


COUNTER_NAMES = (
    *("hbm_total", "hbm_used", "hbm_peak", "busy_ns", "paper_ns", "operators", "syncs", "h2d_calls", "h2d_bytes"),
    *("d2h_calls", "d2h_bytes", "d2d_calls", "d2d_bytes", "collectives", "collective_bytes", "allocations"),
)
"""Counters of each device (`SimDevice`)."""


class SimFault(ctypes.Structure):
    """One fault that waits to strike."""

    _fields_ = [
        ("kind", c_uint32),
        ("device", c_int32),
        ("after", c_int64),
        ("value", c_int64),
        ("factor", c_double),
        ("struck", c_int64),
    ]


class SimDevice(ctypes.Structure):
    """Memory, time and counters of one device."""

    _fields_ = [
        *((name, c_uint64) for name in COUNTER_NAMES),
        ("health", c_uint32),
        ("link_down", c_uint32),
        ("lost", c_uint32),
        ("reserved", c_uint32),
    ]


class SimProcess(ctypes.Structure):
    """A process that uses devices; pid 0: a free row."""

    _fields_ = [
        ("pid", c_int32),
        ("pad", c_uint32),
        ("started", c_uint64),
        ("name", c_char * 64),
        ("hbm", c_uint64 * MAX_DEVICES),
    ]


class SimRates(ctypes.Structure):
    """Constants of the estimated time (`cost_model.ChipRates`)."""

    _fields_ = [
        *(
            (name, c_double)
            for name in [
                "half_flops",
                "single_flops",
                "memory",
                "host_link",
                "peer",
                "peers",
                "card",
                "network",
                "launch_ns",
                "launch_cube_ns",
                "launch_collective_ns",
                "network_ns",
                "host_ns",
            ]
        ),
        ("server", c_uint64),
    ]


class SimSegment(ctypes.Structure):
    """The whole."""

    _fields_ = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("devices", c_uint32),
        ("owner_pid", c_int32),
        ("owner_started", c_uint64),
        ("created_ns", c_uint64),
        ("soc", c_char * 32),
        ("cube_cores", c_uint32),
        ("vector_cores", c_uint32),
        ("l2_bytes", c_uint64),
        ("bf16", c_uint32),
        ("clock_mhz", c_uint32),
        ("half_tflops", c_double),
        ("bandwidth_gbs", c_double),
        ("rates", SimRates),
        ("device", SimDevice * MAX_DEVICES),
        ("process", SimProcess * MAX_PROCESSES),
        ("fault", SimFault * MAX_FAULTS),
    ]


def list_machine_names() -> list[str]:
    """Names of the machines whose shared memory exists, living or left behind."""
    found = {path.name for path in _SHM.glob(f"{SHM_PREFIX}*")}
    return sorted(name for name in found if parse_whole(name.removeprefix(SHM_PREFIX)) is not None)


def create_segment(machine: SimMachine) -> str:
    """Make the shared memory of a machine that this process owns; return its name.

    Raises:
        Failure: /dev/shm is full or missing.
    """
    name = f"{SHM_PREFIX}{os.getpid()}"
    remove_segment(name)  # left behind by an earlier process of this number
    path = _SHM / name
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, ctypes.sizeof(SimSegment))
            with mmap.mmap(file.fileno(), ctypes.sizeof(SimSegment)) as memory:
                _fill_segment(SimSegment.from_buffer(memory), machine)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise Failure(
            f"no shared memory for the simulated machine: {error.strerror}",
            "/dev/shm needs a megabyte; in a container see --shm-size",
        ) from error
    return name


def _fill_segment(segment: SimSegment, machine: SimMachine) -> None:
    chip = machine.chip
    segment.version = VERSION
    segment.size = ctypes.sizeof(SimSegment)
    segment.devices = machine.npus
    segment.owner_pid = os.getpid()
    segment.owner_started = process_info.read_start_time(os.getpid())
    segment.created_ns = time.time_ns()
    segment.soc = chip.soc.encode()
    segment.cube_cores = chip.cube_cores
    segment.vector_cores = chip.vector_cores
    segment.l2_bytes = chip.l2_mib << 20
    segment.bf16 = int(chip.device_spec.has_bf16)
    segment.clock_mhz = chip.clock_mhz
    segment.half_tflops = chip.device_spec.half_tflops
    segment.bandwidth_gbs = chip.device_spec.bandwidth_gbs
    segment.rates = SimRates(*cost_model.list_rate_values(cost_model.get_chip_rates(chip.device_spec)))
    for index in range(machine.npus):
        segment.device[index].hbm_total = machine.hbm_bytes
    for index, fault in enumerate(machine.faults):
        segment.fault[index] = SimFault(*fault.to_struct_values())
        if fault.kind == "health":  # true from the start
            for place in range(machine.npus) if fault.device < 0 else [fault.device]:
                segment.device[place].health = HEALTH_STATES.index(fault.value)
    segment.magic = MAGIC  # last: whoever sees it sees the rest


@contextmanager
def attach_segment(name: str) -> Iterator[SimSegment]:
    """Yield the live shared memory of a machine.

    Raises:
        Failure: it is gone, or of another version.
    """
    try:
        with open(_SHM / name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), ctypes.sizeof(SimSegment))
    except (OSError, ValueError) as error:
        raise Failure(f"the simulated machine {name} is gone", f"`{PROGRAM} status` lists those that live") from error
    segment = SimSegment.from_buffer(memory)
    try:
        if (segment.magic, segment.version, segment.size) != (MAGIC, VERSION, ctypes.sizeof(SimSegment)):
            raise Failure(f"the simulated machine {name} was made by another version", f"run `{PROGRAM} clean`")
        yield segment
    finally:
        del segment
        with contextlib.suppress(BufferError):  # a caller kept a row: the mapping goes with it
            memory.close()


def remove_segment(name: str) -> None:
    """Remove the shared memory of a machine and of its collectives."""
    for path in [_SHM / name, *_SHM.glob(f"{name}-*")]:
        path.unlink(missing_ok=True)


def describe_fault(row: SimFault) -> str:
    """Return a fault of a living machine and how far it is."""
    kind = next(name for name, number in FAULT_KINDS.items() if number == row.kind)
    where = kind + (f"@{row.device}" if row.device >= 0 else "")
    if kind in ("slow", "slow-link"):
        return f"{where}={row.factor:g}"
    if kind == "health":
        return f"{where}={HEALTH_STATES[row.value]}"
    return f"{where}, {row.after} events away" if row.after > 0 else f"{where}, struck {row.struck} times"
