"""How much better an answer is than what was to be expected: pure functions of rewards, on the host.

Shapes: `P` prompts, `G` answers to each. All take and return fp64 `[P, G]`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

RewardArray = np.ndarray
_STD_EPS = 1e-4
"""Added to standard deviations, as in TRL's GRPOTrainer (trl/trainer/grpo_trainer.py)."""


def normalize_by_group(rewards: RewardArray) -> np.ndarray:
    """Return `(r - mean) / std` within the answers to one prompt (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return subtract_group_mean(rewards) / (_sample_std(rewards, axis=1) + _STD_EPS)


def subtract_group_mean(rewards: RewardArray) -> np.ndarray:
    """Return `r - mean` within the answers to one prompt (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def subtract_leave_one_out(rewards: RewardArray) -> np.ndarray:
    """Return `r` less the mean of the *other* answers to its prompt (RLOO, arXiv 2402.14740, section 3.2)."""
    others = rewards.shape[1] - 1
    return (rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / others) if others else rewards.copy()


def normalize_by_batch(rewards: RewardArray) -> np.ndarray:
    """Return `(r - mean) / std` over all answers of the step (REINFORCE++, arXiv 2501.03262, section 3.1)."""
    return (rewards - rewards.mean()) / (_sample_std(rewards, axis=None) + _STD_EPS)


def _sample_std(rewards: RewardArray, axis: int | None) -> np.ndarray:
    """The sample's standard deviation, 0 of a single number."""
    count = rewards.size if axis is None else rewards.shape[axis]
    found: np.ndarray = rewards.std(axis=axis, keepdims=True, ddof=1 if count > 1 else 0)
    return found


ADVANTAGES: dict[str, Callable[[RewardArray], np.ndarray]] = {
    "group": normalize_by_group,
    "mean": subtract_group_mean,
    "leave_one_out": subtract_leave_one_out,
    "batch": normalize_by_batch,
}
"""Name in the settings -> function."""
