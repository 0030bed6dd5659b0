"""How much better an answer is than what was to be expected: pure functions of rewards, on the host.

Shapes: `P` prompts, `G` answers to each. All take and return fp64 `[P, G]`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rewards = np.ndarray
_EPS = 1e-4
"""Added to standard deviations, as in TRL's GRPOTrainer (trl/trainer/grpo_trainer.py)."""


def group(rewards: Rewards) -> np.ndarray:
    """Return `(r - mean) / std` within the answers to one prompt (GRPO, arXiv 2402.03300, section 4.1.2)."""
    return mean(rewards) / (_std(rewards, axis=1) + _EPS)


def mean(rewards: Rewards) -> np.ndarray:
    """Return `r - mean` within the answers to one prompt (Dr. GRPO, arXiv 2503.20783, section 3.2)."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def leave_one_out(rewards: Rewards) -> np.ndarray:
    """Return `r` less the mean of the *other* answers to its prompt (RLOO, arXiv 2402.14740, section 3.2)."""
    others = rewards.shape[1] - 1
    return (rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / others) if others else rewards.copy()


def batch(rewards: Rewards) -> np.ndarray:
    """Return `(r - mean) / std` over all answers of the step (REINFORCE++, arXiv 2501.03262, section 3.1)."""
    return (rewards - rewards.mean()) / (_std(rewards, axis=None) + _EPS)


def _std(rewards: Rewards, axis: int | None) -> np.ndarray:
    """The sample's standard deviation, 0 of a single number."""
    count = rewards.size if axis is None else rewards.shape[axis]
    found: np.ndarray = rewards.std(axis=axis, keepdims=True, ddof=1 if count > 1 else 0)
    return found


ADVANTAGES: dict[str, Callable[[Rewards], np.ndarray]] = {
    "group": group,
    "mean": mean,
    "leave_one_out": leave_one_out,
    "batch": batch,
}
"""Name in the settings -> function."""
