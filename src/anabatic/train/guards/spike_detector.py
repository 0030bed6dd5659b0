"""Which steps are bad, found out on the device: a loss or gradient that is not finite, and spikes.

Nothing here waits for the device; `read`, called where the loop logs or saves, is the only read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anabatic.data.batching.packing import SegmentOrigin

WINDOW_STEPS = 64
"""Steps whose loss and gradient norm are compared with."""
_MAD_TO_STD = 1.4826
"""Median absolute deviation -> standard deviation of a normal distribution (Rousseeuw and Croux, JASA 1993)."""
_MIN_RELATIVE_STD = 0.01
"""Least standard deviation, as a share of the median: a curve as flat as a board has no spikes of a hair's breadth."""
REASONS = ("", "not finite", "spike")


@dataclass(frozen=True)
class BadStep:
    """A bad step.

    Attributes:
        step: its number.
        reason: not finite, or spike.
        loss: mean over all ranks' targets, in nats; grad_norm: of that mean. Both before the update was refused.
        is_local_finite: this rank's own loss was finite.
        rows: what this rank has read.
        loader_state: state of the data after the step.
    """

    step: int
    reason: str
    loss: float
    grad_norm: float
    is_local_finite: bool
    rows: list[SegmentOrigin]
    loader_state: dict[str, Any]


@dataclass
class _StepRecord:
    step: int
    rows: list[SegmentOrigin]
    loader_state: dict[str, Any]


@dataclass
class SpikeDetector:
    """Judges every step.

    A spike lies `spike_threshold` robust standard deviations above the median of the last `WINDOW_STEPS` steps: the
    modified z-score of Iglewicz and Hoaglin ("How to Detect and Handle Outliers", 1993), from median and median
    absolute deviation, which outliers do not move. Refused steps enter the window as well, so that a lasting change of
    level is accepted after half a window; what is not finite does not.

    Args:
        spike_threshold: 0: there are no spikes.
        device: where losses and norms lie.
    """

    spike_threshold: float
    device: torch.device
    window: Tensor = field(init=False)
    _pending: list[Tensor] = field(init=False, default_factory=list)
    _records: list[_StepRecord] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.window = torch.zeros(WINDOW_STEPS if self.spike_threshold else 0, 2, device=self.device)

    def judge_step(
        self, number: int, loss: Tensor, norm: Tensor, scaled: bool, here: Tensor, whole: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Judge a step; return two fp32 scalars: 1 where all is finite, and 1 where the update is to be made.

        Args:
            number: of the step, from 1.
            loss, norm: fp32 scalars, the same on every rank.
            scaled: an infinite norm is the ordinary sign that the loss scale is too large (fp16), and not told.
            here: this rank's loss was finite.
            whole: nothing has overflowed, where numbers do not show it.
        """
        finite = torch.isfinite(loss + norm)  # a sum beyond the largest fp32 number is as bad: one look instead of two
        finite = finite if whole is None else finite & whole
        fit = finite.float()
        reason, calm = 1 - (torch.isfinite(loss).float() if scaled else fit), fit
        if self.spike_threshold:
            spikes = self._detect_spikes(number, torch.stack((loss, norm)).float(), finite)
            reason, calm = torch.where(spikes, 2.0, reason), (finite & ~spikes).float()
        self._pending.append(torch.stack((reason, loss, norm, here)))  # of several types: the widest holds all
        return fit, calm

    def _detect_spikes(self, number: int, values: Tensor, finite: Tensor) -> Tensor:
        place = (number - 1) % WINDOW_STEPS
        middle = self.window.sort(dim=0).values[WINDOW_STEPS // 2]
        away = (self.window - middle).abs().sort(dim=0).values[WINDOW_STEPS // 2]
        deviation = torch.maximum(_MAD_TO_STD * away, _MIN_RELATIVE_STD * middle.abs())
        above = (values > middle + self.spike_threshold * deviation).any() & finite
        self.window[place] = torch.where(finite, values, self.window[place])
        return above if number > WINDOW_STEPS else torch.zeros_like(above)

    def record_step(self, number: int, rows: list[SegmentOrigin], loader: dict[str, Any]) -> None:
        """Remember what a step has read, until `take_bad_steps`."""
        self._records.append(_StepRecord(number, rows, loader))

    def take_bad_steps(self) -> list[BadStep]:
        """Wait for the device and return the bad ones of the steps since the last call."""
        if not self._pending:
            return []
        rows = torch.stack(self._pending).tolist()
        found = [
            BadStep(read.step, REASONS[int(reason)], loss, norm, here > 0, read.rows, read.loader_state)
            for read, (reason, loss, norm, here) in zip(self._records, rows, strict=True)
            if reason
        ]
        self.clear_records()
        return found

    def clear_records(self) -> None:
        """Drop what is known of the steps since the last read."""
        self._pending.clear()
        self._records.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps; memory is shared."""
        return {"window": self.window} if self.spike_threshold else {}


def find_data_positions(steps: Iterable[BadStep], micro_batches: int) -> list[int]:
    """Return where in the data bad steps begin, in micro-batches of all ranks; `micro_batches` are a step's."""
    return [int(step.loader_state["micro_batch"]) - micro_batches for step in steps]
