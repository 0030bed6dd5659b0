"""What a job's devices did between two moments: mean, least and most of utilisation, memory and power."""

from __future__ import annotations

import os
import threading
from collections.abc import Set
from dataclasses import dataclass, field

from anabatic.monitor.snapshot import Device, Snapshot
from anabatic.monitor.sources import Source

MIB = 1 << 20


@dataclass
class _Values:
    """Sum, count, least and most of what was seen."""

    total: float = 0.0
    count: int = 0
    least: float = float("inf")
    most: float = float("-inf")

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1
            self.least, self.most = min(self.least, value), max(self.most, value)

    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


def _names() -> dict[str, _Values]:
    return {"util_pct": _Values(), "memory_bytes": _Values(), "power_w": _Values()}


@dataclass
class _Seen:
    values: dict[str, _Values] = field(default_factory=_names)

    def row(self) -> dict[str, float]:
        """Return `device_<what>_mean|min|max`; what was not seen is left out."""
        found = {}
        for name, values in self.values.items():
            mean = values.mean()
            if mean is not None:
                kinds = (("mean", mean), ("min", values.least), ("max", values.most))
                found.update({f"device_{name}_{kind}": value for kind, value in kinds})
        return found


class Window:
    """A source whose readings are also added up for the devices of one job.

    Utilisation and memory count each device by itself; power is the sum over the cards that the job uses, once for a
    card with two dies.

    Args:
        source: where the readings come from.
        mine: logic ids and UUIDs of the job's devices on this machine; empty: all of them.
    """

    def __init__(self, source: Source, mine: Set[int | str] = frozenset()) -> None:
        self._source, self._mine = source, mine
        self._lock = threading.Lock()
        self._now, self._all = _Seen(), _Seen()
        self._held = False
        self._seconds = self._tokens = 0.0
        # While a profiler runs, the counters of AICore and vector units stand at 0 and mean nothing (DCMI manual).
        self._profiled = os.environ.get("PROFILING_MODE", "").lower() == "true"

    def read(self) -> Snapshot:
        """Read the source and take the figures in."""
        found = self._source.read()
        with self._lock:
            if not self._held and found.error is None:
                self._add(found)
        return found

    def _is_mine(self, place: int, device: Device) -> bool:
        logic = place if device.logic_id is None else device.logic_id
        return not self._mine or logic in self._mine or device.uuid in self._mine

    def _add(self, found: Snapshot) -> None:
        mine = [device for place, device in enumerate(found.devices) if self._is_mine(place, device)]
        cards = {device.npu_id for device in mine}
        watts = [each.power_w for each in found.devices if each.npu_id in cards and each.power_w is not None]
        for seen in (self._now, self._all):
            for device in mine:
                seen.values["util_pct"].add(None if self._profiled else device.util_pct)
                seen.values["memory_bytes"].add(None if device.used_mb is None else device.used_mb * MIB)
            seen.values["power_w"].add(sum(watts) if watts else None)

    def hold(self, held: bool) -> None:
        """Leave readings out while `held`: an evaluation is not training."""
        with self._lock:
            self._held = held

    def take(self, seconds: float, tokens: float) -> dict[str, float]:
        """Return the figures since the last call, and begin anew; empty when there was no reading.

        Args:
            seconds: training time since then.
            tokens: trained in that time by the devices of this machine.
        """
        with self._lock:
            seen, self._now = self._now, _Seen()
            self._seconds += seconds
            self._tokens += tokens
        return {**seen.row(), **_energy(seen, seconds, tokens)}

    def totals(self) -> dict[str, float]:
        """Return the figures of the whole training: means, and the energy of all its training time."""
        with self._lock:
            means = {name: values.mean() for name, values in self._all.values.items()}
            found = {f"device_{name}": mean for name, mean in means.items() if mean is not None}
            return {**found, **_energy(self._all, self._seconds, self._tokens)}


def _energy(seen: _Seen, seconds: float, tokens: float) -> dict[str, float]:
    """Mean power times time, for a million tokens, in watt-hours; of the devices alone, not of the host."""
    power = seen.values["power_w"].mean()
    if power is None or tokens <= 0:
        return {}
    return {"energy_wh_per_mtoken": power * seconds / 3600 / (tokens / 1e6)}
