"""`anabatic bench collective`: how fast the processes of a job exchange tensors, size by size.

Every process is timed, and the slowest counts. The figure is the bandwidth of the bus: what each process must send,
over the time, so that figures of any number of processes compare: 2 (n - 1) / n of an all-reduce's bytes, (n - 1) / n
of the gathered or scattered ones (PERFORMANCE.md of NVIDIA/nccl-tests); `plan.cost.shape` is the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from anabatic.bench import machine, written
from anabatic.bench.figures import Figure, Result
from anabatic.config.bench import BenchCollectiveJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.heart import HEART
from anabatic.device.device import Device, pick
from anabatic.parallel import timing
from anabatic.parallel import world as parallel
from anabatic.parallel.world import World
from anabatic.plan import cost

_SECONDS = 0.2
"""Of a measurement, about."""
_MOST = 50
"""Exchanges in it."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Methods of an exchange, and names in the cost model."""


@dataclass
class _Exchange:
    """The tensors of one size on this process."""

    device: Device
    world: World
    num_bytes: int

    def __post_init__(self) -> None:
        count = max(self.world.size, self.num_bytes // 4)
        count -= count % self.world.size
        self.whole = torch.zeros(count, device=self.device.torch)
        self.part = torch.zeros(count // self.world.size, device=self.device.torch)
        self.held = 4 * count

    def all_reduce(self) -> None:
        dist.all_reduce(self.whole)

    def all_gather(self) -> None:
        parallel.all_gather_rows(self.part, self.world)

    def reduce_scatter(self) -> None:
        # torch 2.13 renamed it as it did all_gather_into_tensor (`parallel.world`).
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        scatter(self.part, self.whole)

    def broadcast(self) -> None:
        dist.broadcast(self.whole, 0)


def run(job: BenchCollectiveJob) -> int:
    """Measure as the job says, on every rank; return the exit code.

    Raises:
        ConfigError: there is one process.
        Failure: the figures cannot be written.
    """
    if parallel.size() == 1:
        raise ConfigError("one process exchanges nothing", "give --nproc 2 or more")
    load = written.begin(job) if log.rank() == 0 else 0.0
    device = pick(job.device)
    world = parallel.start(device)
    figures = []
    for mib in sorted(job.mib):
        figures += _of_size(job, _Exchange(device, world, int(mib * 2**20)))
        HEART.beat()
    if world.first:
        where = machine.facts(load, device.name, world.size)
        title = f"collectives of {world.size} processes, {device.row.collective}: bandwidth of the bus"
        result = Result("collective", title, figures, asdict(job), where, "bytes", machine.notes(where))
        written.finish(job, result)
    parallel.stop(world)
    return 0


def _of_size(job: BenchCollectiveJob, exchange: _Exchange) -> list[Figure]:
    made = []
    kept = exchange.device.torch
    for kind in KINDS:
        call: Callable[[], None] = getattr(exchange, kind)
        times = timing.times(call, kept, _SECONDS, _MOST)
        taken = [timing.slowest(call, times, kept) / times for _ in range(job.warm_up + job.repeats)][job.warm_up :]
        share, _ = cost.shape(kind, exchange.world.size)
        moved = share * exchange.held
        chip = exchange.device.chip
        planned = None
        if chip is not None:
            nanoseconds = cost.collective_ns(cost.rates(chip), kind, exchange.held, exchange.world.size)
            planned = moved / (nanoseconds / 1e9)
        made.append(Figure(kind, "B/s", tuple(moved / one for one in taken), planned, float(exchange.held)))
    return made
