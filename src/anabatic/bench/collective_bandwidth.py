"""`anabatic bench collective`: how fast the processes of a job exchange tensors, size by size.

Every process is timed, and the slowest counts. The figure is the bandwidth of the bus: what each process must send,
over the time, so that figures of any number of processes compare: 2 (n - 1) / n of an all-reduce's bytes, (n - 1) / n
of the gathered or scattered ones (PERFORMANCE.md of NVIDIA/nccl-tests); `plan.cost_model.get_collective_pattern` is the
table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from anabatic.bench import environment_info, result_files
from anabatic.bench.measurements import BenchMetric, BenchResult
from anabatic.config.bench import BenchCollectiveJob
from anabatic.core import log
from anabatic.core.errors import ConfigError
from anabatic.core.heartbeat import HEARTBEAT
from anabatic.device.device import Device, select_device
from anabatic.parallel import process_groups as parallel
from anabatic.parallel.process_groups import World
from anabatic.plan import cost_model

_TARGET_SECONDS = 0.2
"""Of a measurement, about."""
_MAX_ITERATIONS = 50
"""Exchanges in it."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Methods of an exchange, and names in the cost model."""


@dataclass
class _CollectiveBuffers:
    """The tensors of one size on this process."""

    device: Device
    world: World
    num_bytes: int

    def __post_init__(self) -> None:
        count = max(self.world.size, self.num_bytes // 4)
        count -= count % self.world.size
        self.full_tensor = torch.zeros(count, device=self.device.torch_device)
        self.shard_tensor = torch.zeros(count // self.world.size, device=self.device.torch_device)
        self.buffer_bytes = 4 * count

    def all_reduce(self) -> None:
        dist.all_reduce(self.full_tensor)

    def all_gather(self) -> None:
        parallel.all_gather_rows(self.shard_tensor, self.world)

    def reduce_scatter(self) -> None:
        # torch 2.13 renamed it as it did all_gather_into_tensor (`process_groups.all_gather_rows`).
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
        scatter(self.shard_tensor, self.full_tensor)

    def broadcast(self) -> None:
        dist.broadcast(self.full_tensor, 0)


def run(job: BenchCollectiveJob) -> int:
    """Measure as the job says, on every rank; return the exit code.

    Raises:
        ConfigError: there is one process.
        Failure: the figures cannot be written.
    """
    if parallel.get_world_size() == 1:
        raise ConfigError("one process exchanges nothing", "give --nproc 2 or more")
    load = result_files.prepare_output(job) if log.get_rank() == 0 else 0.0
    device = select_device(job.device)
    world = parallel.init_world(device)
    figures = []
    for mib in sorted(job.mib):
        figures += _measure_size(job, _CollectiveBuffers(device, world, int(mib * 2**20)))
        HEARTBEAT.record_beat()
    if world.is_main_process:
        where = environment_info.collect_environment(load, device.name, world.size)
        title = f"collectives of {world.size} processes, {device.device_row.collective}: bandwidth of the bus"
        result = BenchResult(
            "collective", title, figures, asdict(job), where, "bytes", environment_info.caveat_notes(where)
        )
        result_files.write_results(job, result)
    parallel.leave_world(world)
    return 0


def _measure_size(job: BenchCollectiveJob, exchange: _CollectiveBuffers) -> list[BenchMetric]:
    metrics = []
    kept = exchange.device.torch_device
    for kind in COLLECTIVES:
        call: Callable[[], None] = getattr(exchange, kind)
        times = parallel.count_calls(call, kept, _TARGET_SECONDS, _MAX_ITERATIONS)
        taken = [parallel.time_slowest_rank(call, times, kept) / times for _ in range(job.warm_up + job.repeats)][
            job.warm_up :
        ]
        bytes_factor, _ = cost_model.get_collective_pattern(kind, exchange.world.size)
        moved = bytes_factor * exchange.buffer_bytes
        chip = exchange.device.chip
        planned = None
        if chip is not None:
            nanoseconds = cost_model.estimate_collective_ns(
                cost_model.get_chip_rates(chip), kind, exchange.buffer_bytes, exchange.world.size
            )
            planned = moved / (nanoseconds / 1e9)
        metrics.append(
            BenchMetric(kind, "B/s", tuple(moved / one for one in taken), planned, float(exchange.buffer_bytes))
        )
    return metrics
