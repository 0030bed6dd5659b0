"""Usage of a job's devices between two moments: mean, minimum and maximum of utilisation, memory and power."""

from __future__ import annotations

import os
import threading
from collections.abc import Set
from dataclasses import dataclass, field

from anabatic.monitor.snapshot import DeviceReading, Snapshot
from anabatic.monitor.sources.selection import DeviceSource

MIB = 1 << 20


@dataclass
class _RunningStats:
    """Sum, count, least and most of what was seen."""

    total: float = 0.0
    count: int = 0
    minimum: float = float("inf")
    maximum: float = float("-inf")

    def add_value(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)

    def compute_mean(self) -> float | None:
        return self.total / self.count if self.count else None


def _make_usage_stats() -> dict[str, _RunningStats]:
    return {"util_pct": _RunningStats(), "memory_bytes": _RunningStats(), "power_w": _RunningStats()}


@dataclass
class _UsageStats:
    stats: dict[str, _RunningStats] = field(default_factory=_make_usage_stats)

    def to_row(self) -> dict[str, float]:
        """Return `device_<what>_mean|min|max`; what was not seen is left out."""
        found = {}
        for name, values in self.stats.items():
            mean = values.compute_mean()
            if mean is not None:
                kinds = (("mean", mean), ("min", values.minimum), ("max", values.maximum))
                found.update({f"device_{name}_{kind}": value for kind, value in kinds})
        return found


class UsageWindow:
    """A source whose readings are also added up for the devices of one job.

    Utilisation and memory count each device by itself; power is the sum over the cards that the job uses, once for a
    card with two dies.

    Args:
        source: where the readings come from.
        mine: logic ids and UUIDs of the job's devices on this machine; empty: all of them.
    """

    def __init__(self, source: DeviceSource, job_devices: Set[int | str] = frozenset()) -> None:
        self._source, self._job_devices = source, job_devices
        self._lock = threading.Lock()
        self._current_stats, self._total_stats = _UsageStats(), _UsageStats()
        self._is_paused = False
        self._seconds = self._tokens = 0.0
        # While a profiler runs, the counters of AICore and vector units stand at 0 and mean nothing (DCMI manual).
        self._is_profiled = os.environ.get("PROFILING_MODE", "").lower() == "true"

    def read(self) -> Snapshot:
        """Read the source and take the figures in."""
        found = self._source.read()
        with self._lock:
            if not self._is_paused and found.error is None:
                self._add_snapshot(found)
        return found

    def _is_job_device(self, place: int, device: DeviceReading) -> bool:
        logic = place if device.logic_id is None else device.logic_id
        return not self._job_devices or logic in self._job_devices or device.uuid in self._job_devices

    def _add_snapshot(self, found: Snapshot) -> None:
        job_readings = [device for place, device in enumerate(found.devices) if self._is_job_device(place, device)]
        cards = {device.npu_id for device in job_readings}
        watts = [each.power_w for each in found.devices if each.npu_id in cards and each.power_w is not None]
        for seen in (self._current_stats, self._total_stats):
            for device in job_readings:
                seen.stats["util_pct"].add_value(None if self._is_profiled else device.util_pct)
                seen.stats["memory_bytes"].add_value(None if device.used_mb is None else device.used_mb * MIB)
            seen.stats["power_w"].add_value(sum(watts) if watts else None)

    def set_paused(self, paused: bool) -> None:
        """Leave readings out while `paused`: an evaluation is not training."""
        with self._lock:
            self._is_paused = paused

    def take_figures(self, seconds: float, tokens: float) -> dict[str, float]:
        """Return the figures since the last call, and begin anew; empty when there was no reading.

        Args:
            seconds: training time since then.
            tokens: trained in that time by the devices of this machine.
        """
        with self._lock:
            seen, self._current_stats = self._current_stats, _UsageStats()
            self._seconds += seconds
            self._tokens += tokens
        return {**seen.to_row(), **_compute_energy(seen, seconds, tokens)}

    def get_totals(self) -> dict[str, float]:
        """Return the figures of the whole training: means, and the energy of all its training time."""
        with self._lock:
            means = {name: values.compute_mean() for name, values in self._total_stats.stats.items()}
            found = {f"device_{name}": mean for name, mean in means.items() if mean is not None}
            return {**found, **_compute_energy(self._total_stats, self._seconds, self._tokens)}


def _compute_energy(seen: _UsageStats, seconds: float, tokens: float) -> dict[str, float]:
    """Mean power times time, for a million tokens, in watt-hours; of the devices alone, not of the host."""
    power = seen.stats["power_w"].compute_mean()
    if power is None or tokens <= 0:
        return {}
    return {"energy_wh_per_mtoken": power * seconds / 3600 / (tokens / 1e6)}
