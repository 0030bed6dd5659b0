"""Held-out questions: mean reward, and pass@k where several answers are drawn."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabatic.config.chat import Sampling
from anabatic.config.rl import RlJob
from anabatic.data.scoring.questions import Question
from anabatic.parallel.collectives import all_gather_text
from anabatic.parallel.world import World
from anabatic.rl.rewards import RewardSet
from anabatic.rl.rollout import Rollout, RolloutRequest
from anabatic.rl.rollout_batches import GeneratorFactory, derive_seed, summarize_rollouts, warn_faults


@dataclass
class HeldoutRewards:
    """The questions, and how they are asked: the same draws at every evaluation."""

    job: RlJob
    questions: Sequence[Question]
    prompts: Sequence[list[int]]
    rewards: RewardSet
    make_generator: GeneratorFactory
    world: World

    def measure_rewards(self, step: int) -> tuple[dict[str, Any], list[Rollout]]:
        """Return the metrics after an optimizer step, and the answers; the same on every rank.

        Rewards that fail are reported and count 0: a few questions are too few to end a run for.
        """
        rollouts = self.make_generator(step).generate_rollouts(self._make_requests())
        assert rollouts is not None  # nobody stops an evaluation
        self.rewards.score_rollouts(rollouts, self.questions)
        gathered = all_gather_text(json.dumps([vars(one) for one in rollouts]), self.world)
        every = sorted(
            (Rollout(**one) for rank_rollouts in gathered for one in json.loads(rank_rollouts)),
            key=lambda one: one.number,
        )
        warn_faults(every)
        row = {f"valid_{key}": value for key, value in summarize_rollouts(every).items()}
        if self.job.eval.samples > 1:
            first = self.rewards.rewards[0].name
            right = np.array([one.scores[first] >= 1 for one in every]).reshape(-1, self.job.eval.samples).sum(axis=1)
            row |= {f"valid_pass@{k}": value for k, value in compute_pass_at_k(right, self.job.eval.samples).items()}
        return {**row, "questions": len(self.questions)}, every

    def _make_requests(self) -> list[RolloutRequest]:
        samples, data = self.job.eval.samples, self.world.data_group
        places = range(data.rank, len(self.questions), data.size)
        return [
            RolloutRequest(place, place * samples + one, self.prompts[place], self._make_sampling(place, one))
            for one in range(samples)
            for place in places
        ]

    def _make_sampling(self, place: int, one: int) -> Sampling:
        seed = derive_seed(f"{self.job.seed}/held/{place}/{one}")
        return self.job.sampling.make_sampling(seed, greedy=self.job.eval.samples == 1)


def compute_pass_at_k(right: np.ndarray, samples: int) -> dict[int, float]:
    """Return pass@k for k = 1, 2, 4, ... up to `samples`: the chance that one of k answers is right, without bias
    `1 - C(n - c, k) / C(n, k)` (Codex, arXiv 2107.03374, section 2.1), meaned over the questions.

    Args:
        right: of each question, how many of its `samples` answers are right.
    """
    found = {}
    k = 1
    while k <= samples:
        every = math.comb(samples, k)
        found[k] = sum(1 - math.comb(samples - int(c), k) / every for c in right) / max(1, len(right))
        k *= 2
    return found
