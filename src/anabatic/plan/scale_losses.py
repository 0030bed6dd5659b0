"""What a job loses on many machines: slow machines, shared links between them, checkpoints and failures.

Every number is an assumption, most with a published source, and `--assume` of `anabatic plan --scale` changes it. None
is fitted; `benchmarks/plan_scaling.py` compares the result with published rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.plan import step_time
from anabatic.plan.cost_model import ChipRates
from anabatic.plan.host_resources import DISK_BYTES_PER_SECOND, count_writing_machines
from anabatic.plan.memory_estimate import get_persistent_bytes
from anabatic.plan.step_time import StepTime
from anabatic.plan.training_setup import TrainingSetup


@dataclass(frozen=True)
class ScaleAssumptions:
    """Assumptions about a cluster; each can be changed by its name."""

    slow_machines: float = 0.005
    """Fraction of machines that compute slowly: an assumption without a published figure."""
    slowdown: float = 0.1
    """How much longer they take (MegaScale, arXiv 2402.15627: some hosts took 10 % longer in every job)."""
    contention: float = 0.05
    """Fraction of the bandwidth between machines lost to flows that share a link. 0.05: with many queue pairs and
    scheduling that knows the topology; 0.3: equal-cost multipath by hash alone (Baidu AI Cloud on hash collisions in
    its network HPN: about 95 % and about 70 of 100 Gb/s)."""
    failure_hours: float = 50_677.0
    """Device-hours between failures that stop a job: 16,384 devices for 54 days had 419 (Llama 3, arXiv 2407.21783,
    table 5)."""
    restart_minutes: float = 15.0
    """From a failure until the job computes again (MegaScale: less than 10 minutes for detection and diagnosis, less
    than 15 until the job has resumed; Huawei names less than 10 minutes for its clusters, June 2025)."""
    checkpoint_minutes: float = 0.0
    """Between checkpoints; 0: the interval that loses least (Young 1974). At least the time of a step, and of writing
    one."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = 1.0 if field.name in ("slow_machines", "contention") else math.inf
            if not 0 <= value < math.inf or value > limit or (field.name == "contention" and value == 1):
                raise ConfigError(
                    f"--assume {field.name}={value:g} is out of range",
                    f"{field.name} is a fraction from 0 to 1" if limit == 1 else f"{field.name} is 0 or more",
                )


IDEAL = {"slow_machines": 0.0, "contention": 0.0, "failure_hours": 0.0, "restart_minutes": 0.0}
"""Assumptions of a cluster that loses nothing; no failures: 0 hours between them."""


def parse_assumptions(text: str) -> ScaleAssumptions:
    """Return the assumptions of `slowdown=0.2,restart_minutes=30`, or of `ideal`.

    Raises:
        ConfigError: a name is unknown, or a value is no number or out of range.
    """
    names = [field.name for field in fields(ScaleAssumptions)]
    changes: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, value = part.partition("=")
        name = name.strip().replace("-", "_")
        if part == "ideal":
            changes |= IDEAL
            continue
        if name not in names or not separator:
            raise ConfigError(
                f"--assume has {part!r:.60}, which is no assumption.{did_you_mean(name, names)}",
                f"write NAME=NUMBER with one of {', '.join(names)}, or ideal",
            )
        try:
            changes[name] = float(value)
        except ValueError:
            raise ConfigError(f"--assume {name} is {value!r:.60}, no number", f"write {name}=0.1") from None
    return ScaleAssumptions(**changes)


@dataclass(frozen=True)
class ScaleLosses:
    """Seconds of a step in a long run, by part; the sum is what a step takes on average.

    Attributes:
        step: without losses; links: waiting for shared links; stragglers: for slow machines; checkpoints: for their
            copies; failures: lost work and restarts.
        interval: seconds between checkpoints; between_failures: seconds; infinite without failures.
    """

    step: float
    links: float
    stragglers: float
    checkpoints: float
    failures: float
    interval: float
    between_failures: float

    @property
    def total_seconds(self) -> float:
        """Seconds of a step with all losses."""
        return self.step + self.links + self.stragglers + self.checkpoints + self.failures

    def get_fractions(self) -> Mapping[str, float]:
        """Return the share of each loss in the whole time."""
        total = self.total_seconds
        return {
            name: getattr(self, name) / total if math.isfinite(total) else float(name == "failures")
            for name in ("links", "stragglers", "checkpoints", "failures")
        }


def estimate_losses(
    setup: TrainingSetup, time: StepTime, rates: ChipRates, machines: int, assumed: ScaleAssumptions
) -> ScaleLosses:
    """Return the losses of a job on `machines` machines.

    Every step waits for the slowest machine: with fraction f of slow ones, one of M is slow with probability
    1 - (1 - f)^M, and then computation takes `slowdown` longer. A checkpoint copies the shards of a device to its
    host, and is written while the training continues (`save.background`), at most one after each step. A failure loses
    half an interval and the restart (Daly 2006, first order); where it comes sooner than that, nothing is left.
    """
    contended = replace(rates, network=rates.network * (1 - assumed.contention))
    with_contention = step_time.estimate_step_time(setup, contended) if machines > 1 else time
    links = max(0.0, with_contention.total_seconds - time.total_seconds)
    probability = 1 - (1 - assumed.slow_machines) ** machines
    stragglers = probability * assumed.slowdown * max(time.compute, time.launches)
    waited = time.total_seconds + links + stragglers
    copy, write = _estimate_checkpoint(setup, rates, machines)
    between = 3600 * assumed.failure_hours / setup.world_size if assumed.failure_hours else math.inf
    wanted = 60 * assumed.checkpoint_minutes or (math.sqrt(2 * copy * between) if math.isfinite(between) else math.inf)
    interval = max(wanted, write, waited)
    checkpoints = waited * copy / interval
    lost = interval / 2 + 60 * assumed.restart_minutes if math.isfinite(between) else 0.0
    fraction = lost / between
    failures = (waited + checkpoints) * fraction / (1 - fraction) if fraction < 1 else math.inf
    return ScaleLosses(time.total_seconds, links, stragglers, checkpoints, failures, interval, between)


def _estimate_checkpoint(setup: TrainingSetup, rates: ChipRates, machines: int) -> tuple[float, float]:
    """Return the seconds that a device copies to its host, and those that the machines write; what every rank holds
    whole is copied and written once."""
    persistent = get_persistent_bytes(setup.whole_experts)
    size = setup.tensor * (persistent["trained weights"] + persistent["optimizer"])
    parts = setup.world_size if setup.is_sharded else setup.tensor * setup.pipeline
    writers = count_writing_machines(setup, machines)
    return size / parts / rates.host_link, size / writers / DISK_BYTES_PER_SECOND
