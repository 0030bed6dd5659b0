"""The learning rate over the run: up, level, down."""

from __future__ import annotations

import math

from anabatic.config.sections.common import Schedule


def compute_lr_scale(step: int, total: int, schedule: Schedule) -> float:
    """Return the share of the peak learning rate at `step` (1 to `total`).

    Linear warm-up, a plateau, then the fall (WSD, arXiv 2404.06395); the last step has `final_lr_ratio`.
    """
    warmup = round(schedule.warmup_ratio * total)
    if step <= warmup:
        return step / warmup
    fall = round(schedule.decay_ratio * total)
    into = step - (total - fall)
    if schedule.decay == "none" or fall == 0 or into <= 0:
        return 1.0
    done = into / fall
    left = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.final_lr_ratio + (1.0 - schedule.final_lr_ratio) * left
