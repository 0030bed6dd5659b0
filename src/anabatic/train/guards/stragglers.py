"""Gather what every rank measured, where the loop logs, and name the rank or the link that slows the others down."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from anabatic.core import log
from anabatic.device.device import Device, get_device_ids
from anabatic.monitor.snapshot import DeviceReading, Snapshot
from anabatic.monitor.sources.selection import find_accelerator_source
from anabatic.parallel.collectives import all_gather_rows, all_gather_text, all_reduce_sum
from anabatic.train.context import LoopContext
from anabatic.train.guards.straggler_rules import RankTimes, StragglerDetector, StragglerFinding
from anabatic.train.metrics.rank_times import StepTimes, time_broadcasts, time_products

_CPU_LIMITS = (1.75, 0.05)
"""A rank is slow from so many times the median, a link from so many seconds more than usual: processes on one processor
disturb each other."""
_DEVICE_LIMITS = (1.25, 3e-4)
"""The same where each process has its own device."""
MAX_PROBE_FRACTION = 1e-3
"""Of the training time at most for timing broadcasts and products, unless the last ones were slow."""
MAX_LISTED_RANKS = 64
"""Ranks of which each row keeps every figure."""
MAX_WITNESSES = 64
"""Ranks whose view of all broadcasts is compared: with the views of all ranks, a table would grow with their square."""
_HOT_EXCESS_C = 10.0
_THROTTLED_FRACTION = 0.9
"""Of the other devices' temperature and clock: what is worth a word."""

_CAUSES = {
    "device": "its computation takes {ratio:.2f} times as long as the median rank's",
    "data": "it waits for its data: ready after {ratio:.2f} times the median rank's time",
    "link": "broadcasts over its link take {ratio:.1f} times as long as usual",
}
_HINTS = {
    "device": "look at its temperature, clock and other processes with anabatic monitor on that host, and leave the"
    " device out if it stays slow",
    "data": "look at the disk or file system of that host; more data.workers help with tokenisation",
    "link": "check its link with anabatic launch --check, and leave the device out if it stays slow",
}


class StragglerMonitor:
    """One small gather of figures for each logged row, and now and then a probe of links.

    Where steps do not distinguish the ranks, because they compute in lockstep (FSDP2; context, expert and tensor
    parallelism), the probe also times a product of matrices on each rank.
    """

    def __init__(self, loop: LoopContext) -> None:
        self.loop, self.world, self.device = loop, loop.world, loop.device
        self.detector = StragglerDetector(*(_CPU_LIMITS if loop.device.type == "cpu" else _DEVICE_LIMITS))
        world = loop.world
        meets_within = max(world.context_group.size, world.expert_group.size, world.tensor_group.size) > 1
        self.is_lockstep = loop.train_step.optimizer.is_sharded or meets_within
        if self.is_lockstep:
            loop.train_step.timer = None
        place = f"{os.uname().nodename}, {loop.device.type}:{loop.device.index}"
        self.places = all_gather_text(place, loop.world)
        self.probe_seconds = self.unprobed_seconds = 0.0
        self.is_warm = False

    def judge_row(self, step: int, span: float, steps: int, data_wait_s: float) -> dict[str, Any]:
        """Return what a logged row says of the ranks, and log what has changed; every rank calls it.

        Args:
            span, steps: seconds and steps since the last row.
            data_wait_s: seconds of it that this rank waited for data.
        """
        timer = self.loop.train_step.timer
        times = StepTimes() if timer is None else timer.take_times()
        own = [times.compute_s, times.wait_s, data_wait_s / max(steps, 1), span, self.probe_seconds]
        rows = self._gather(own)
        self.unprobed_seconds += max(row[3] for row in rows)
        if not self.is_warm:  # the first steps compile and connect
            self.is_warm = True
            return {}
        links, products = self._probe(max(row[4] for row in rows))
        ranks = [
            RankTimes(
                products[rank] if self.is_lockstep else compute,
                0.0 if self.is_lockstep else wait,
                0.0 if self.is_lockstep else data,
                links[rank],
            )
            for rank, (compute, wait, data, _, _) in enumerate(rows)
        ]
        for finding in self.detector.judge_row(ranks):
            self._report(step, finding)
        return self._describe_row(rows)

    def _gather(self, figures: list[float]) -> list[list[float]]:
        row = torch.tensor([figures], device=self.device.torch_device)
        found: list[list[float]] = all_gather_rows(row, self.world).tolist()
        return found

    def _probe(self, cost: float) -> tuple[list[float], list[float]]:
        """Return the seconds of a broadcast from each rank, and of a product on each; 0 where it is not yet time."""
        ranks = self.world.size
        is_cheap = cost <= MAX_PROBE_FRACTION * self.unprobed_seconds
        if not is_cheap and not self.detector.is_undecided(with_ranks=self.is_lockstep):
            return [0.0] * ranks, [0.0] * ranks
        self.unprobed_seconds = 0.0
        broadcasts, broadcast_s = time_broadcasts(self.world, self.device)
        product, product_s = time_products(self.device) if self.is_lockstep else (0.0, 0.0)
        self.probe_seconds = broadcast_s + product_s
        products = [row[0] for row in self._gather([product])] if self.is_lockstep else [0.0] * ranks
        return self._judge_broadcasts(broadcasts), products

    def _judge_broadcasts(self, own: list[float]) -> list[float]:
        """Return the seconds of each rank's broadcast, from what this rank and the other witnesses saw of them."""
        witnesses = list_witnesses(self.world.size)
        views = torch.zeros(len(witnesses), self.world.size, device=self.device.torch_device)
        if self.world.rank in witnesses:
            views[witnesses.index(self.world.rank)] = torch.tensor(own)
        return compute_link_seconds(witnesses, all_reduce_sum(views, self.world).tolist())

    def _report(self, step: int, finding: StragglerFinding) -> None:
        rank, place = finding.rank, self.places[finding.rank]
        host, _, device = place.partition(", ")
        if finding.is_over:
            log.info(f"step {step}: rank {rank} ({place}) is as fast as the others again")
            self.loop.metrics.log_event("straggler_over", step=step, rank=rank, host=host, device=device)
            return
        health = self._read_health(rank) if finding.cause == "device" else ""
        what = _CAUSES[finding.cause].format(ratio=finding.ratio)
        kind = "slow link" if finding.cause == "link" else "straggler"
        log.warn(
            f"step {step}: {kind}: rank {rank} ({place}) slows the others down: {what}{health and f'; {health}'};"
            f" {_HINTS[finding.cause]}"
        )
        self.loop.metrics.log_event(
            "straggler",
            step=step,
            rank=rank,
            host=host,
            device=device,
            reason=finding.cause,
            ratio=round(finding.ratio, 3),
            **({"health": health} if health else {}),
        )

    def _read_health(self, rank: int) -> str:
        """Return what the slow rank's machine says of its device; the one look at it, taken when it was found slow."""
        if self.device.type in ("cpu", "mps"):
            return ""
        return all_gather_text(read_device_health(self.device) if self.world.rank == rank else "", self.world)[rank]

    def _describe_row(self, rows: list[list[float]]) -> dict[str, Any]:
        compute, wait, data = ([row[at] for row in rows] for at in range(3))
        found: dict[str, Any] = {}
        if not self.is_lockstep:
            slowest = max(range(len(rows)), key=lambda rank: compute[rank] + data[rank])
            found = {
                "rank_compute_s_median": statistics.median(compute),
                "rank_compute_s_max": max(compute),
                "rank_wait_s_median": statistics.median(wait),
                "slowest_rank": slowest,
            }
        if len(rows) <= MAX_LISTED_RANKS:
            lists = (
                {"rank_data_s": data}
                if self.is_lockstep
                else {"rank_compute_s": compute, "rank_wait_s": wait, "rank_data_s": data}
            )
            found.update({name: [round(value, 6) for value in values] for name, values in lists.items()})
        if slow := self.detector.slow_ranks:
            found["stragglers"] = [
                {"rank": rank, "place": self.places[rank], "reason": cause} for rank, cause in slow.items()
            ]
        return found


def list_witnesses(ranks: int) -> list[int]:
    """Return the ranks that report what they saw of all broadcasts: spread evenly, all of a small job."""
    count = min(ranks, MAX_WITNESSES)
    return [number * ranks // count for number in range(count)]


def compute_link_seconds(witnesses: Sequence[int], views: Sequence[Sequence[float]]) -> list[float]:
    """Return how long the broadcast from each rank takes: the median of what the witnesses saw.

    A sender is no witness of its own broadcast: what it sees ends when its data have left.

    Args:
        views: for each witness, the seconds of the broadcast from each rank.
    """
    return [
        statistics.median_low(seconds for witness, seconds in zip(witnesses, column, strict=True) if witness != source)
        for source, column in enumerate(zip(*views, strict=True))
    ]


def read_device_health(device: Device) -> str:
    """Return what this process's device shows that the others of the machine do not; empty: nothing, or unknown."""
    source, notes = find_accelerator_source()
    if source is None:
        log.info(f"the device's temperature and clock are not known: {'; '.join(notes)}")
        return ""
    snapshot = source.read()
    if snapshot.error is not None:
        log.info(f"the device's temperature and clock are not known: {snapshot.error}")
        return ""
    ids = get_device_ids(device, device.index + 1) - get_device_ids(device, device.index)
    return describe_health(snapshot, ids or frozenset({device.index}))


def describe_health(snapshot: Snapshot, own_ids: frozenset[int | str]) -> str:
    """Return in words how the device with one of `own_ids` differs from the others of its machine."""
    own: list[DeviceReading] = []
    others: list[DeviceReading] = []
    for place, device in enumerate(snapshot.devices):
        logic = place if device.logic_id is None else device.logic_id
        (own if logic in own_ids or device.uuid in own_ids else others).append(device)
    if not own:
        return ""
    mine, words = own[0], []
    if mine.health not in (None, "OK"):
        words.append(f"health {mine.health}")
    temperatures = [each.temp_c for each in others if each.temp_c is not None]
    if mine.temp_c is not None:
        usual = statistics.median(temperatures) if temperatures else None
        hot = usual is not None and mine.temp_c - usual >= _HOT_EXCESS_C
        words.append(f"hot: {mine.temp_c:.0f} °C, the others {usual:.0f} °C" if hot else f"{mine.temp_c:.0f} °C")
    clocks = [each.freq_mhz for each in others if each.freq_mhz is not None]
    if mine.freq_mhz is not None and clocks and mine.freq_mhz < _THROTTLED_FRACTION * statistics.median(clocks):
        words.append(f"throttled: clock {mine.freq_mhz} MHz, the others {statistics.median(clocks):.0f} MHz")
    return ", ".join(words)
