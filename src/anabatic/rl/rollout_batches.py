"""Rounds of rollouts: generate answers, score them, compute advantages, and collate micro-batches for one or several
updates.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from types import TracebackType
from typing import Any

import numpy as np

from anabatic.config.rl import RlJob
from anabatic.core import log
from anabatic.data.batching.packing import Batch
from anabatic.data.scoring.questions import Question
from anabatic.data.vision.picture_batch import CollatePictures, pack_grids
from anabatic.data.vision.picture_rules import PictureRules
from anabatic.parallel.collectives import all_gather_text
from anabatic.parallel.world import World
from anabatic.plan import job_rules
from anabatic.rl import rollout_loss
from anabatic.rl.policy_loss import ALGORITHMS
from anabatic.rl.rewards import RewardSet
from anabatic.rl.rollout import Rollout, RolloutGenerator, RolloutRequest

GeneratorFactory = Callable[[int], RolloutGenerator]
"""Makes a generator with an engine, whose cache lives as long as it does, from the number of optimizer steps that the
weights have behind them."""
_MAX_WARNINGS = 3
_IDLE_REASONS = {
    "truncated": "all answers were cut off at their limit (sampling.max_new_tokens, batch.seq_len; mask_truncated)",
    "flat_groups": "all answers to a question got the same reward, for every question",
}
"""Shares that are 1 in a round of which nothing can be learned."""


@dataclass(frozen=True)
class PromptedQuestions:
    """Questions, the tokens of their prompts, and how the model wants their pictures."""

    questions: Sequence[Question]
    prompts: Sequence[list[int]]
    rules: PictureRules | None = None


@dataclass
class RolloutBatches:
    """This rank's micro-batches, without end.

    A round has `examples_per_step` questions with `num_samples` answers each. Every rank answers and judges its share;
    then all know all answers, so advantages, metrics and the division into batches come out the same everywhere, under
    any number of ranks. What is drawn depends on the seed, the round and the place in it alone.

    Attributes:
        asked: questions to learn from.
        pad_id: a token that is never read.
        should_stop: whether somebody wishes to stop.
        score: the log-probability of every chosen token of a batch under the weights of now; every rank calls it.
        micro_steps: micro-batches of a rank for an update.
        state: of the batch before.
    """

    job: RlJob
    world: World
    asked: PromptedQuestions
    rewards: RewardSet
    make_generator: GeneratorFactory
    pad_id: int
    should_stop: Callable[[], bool]
    score: Callable[[Batch], list[float]]

    def __post_init__(self) -> None:
        self.questions, self.prompts = self.asked.questions, self.asked.prompts
        self.algorithm = ALGORITHMS[self.job.algorithm]
        update = job_rules.count_update_answers(self.job)
        self.micro_steps = update // (self.job.device_batch_size * self.world.data_group.size)
        self._queue: deque[Batch] = deque()
        self._warned: set[str] = set()
        self.load_state_dict({})

    @property
    def source_names(self) -> list[str]:
        """The source, as `Batch.segment_origins` numbers it."""
        return [", ".join(self.job.data.train)]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that `state` is of."""
        self._queue.clear()
        self.state = state or {"micro_batch": 0, "round": 0, "update": 0, "held": [], "told": {}}

    def __iter__(self) -> RolloutBatches:
        return self

    def __next__(self) -> Batch | None:
        """Return the next micro-batch; None: a signal came while answers were drawn or judged."""
        if not self._queue:
            pending, round_metrics = self.state["held"], self.state["told"]
            if not pending:
                answered = self._run_round(self.state["round"])
                if answered is None:
                    return None
                pending, round_metrics = answered
            self._queue_micro_batches([Rollout(**one) for one in pending], pending, round_metrics)
        return self._queue.popleft()

    def _run_round(self, number: int) -> tuple[list[dict[str, Any]], dict[str, Any]] | None:
        """Answer and judge; return all answers of all ranks, and their metrics."""
        start = time.perf_counter()
        generator = self.make_generator(number * self.job.updates)
        rank_rollouts = generator.generate_rollouts(self._make_requests(number))
        if rank_rollouts is None:
            return None
        generated_at = time.perf_counter()
        if not self.rewards.score_rollouts(rank_rollouts, self.questions, self.should_stop):
            return None
        judged = time.perf_counter()
        if self.job.rollout.correction != "none" and self.job.updates > 1:
            self._score_answers(rank_rollouts)
        gathered = all_gather_text(json.dumps([vars(one) for one in rank_rollouts]), self.world)
        every = sorted((Rollout(**one) for text in gathered for one in json.loads(text)), key=lambda one: one.number)
        self.rewards.require_working_rewards(every)
        rewards = np.array([np.nan if one.unjudged else one.reward for one in every]).reshape(-1, self.job.num_samples)
        advantages = compute_advantages(self.job.advantage or self.algorithm.advantage_name, rewards)
        judged_rows = [row[~np.isnan(row)] for row in rewards if not np.isnan(row).all()]
        for one, advantage in zip(every, advantages.reshape(-1).tolist(), strict=True):
            one.advantage = advantage
        round_metrics = {
            **summarize_rollouts(every),
            **generator.metrics,
            "reward_std": float(np.mean([row.std() for row in judged_rows])) if judged_rows else 0.0,
            "flat_groups": 1 - sum(bool(np.ptp(row)) for row in judged_rows) / len(rewards),
            "rollout_s": round(generated_at - start, 4),
            "reward_s": round(judged - generated_at, 4),
            "rollout_tokens_per_s": sum(one.num_chosen for one in every) / max(generated_at - start, 1e-9),
        }
        warn_faults(every)
        self._warn_idle_round(round_metrics)
        return [vars(one) for one in every], round_metrics

    def _score_answers(self, rollouts: list[Rollout]) -> None:
        """Note the trainer's log-probabilities, which later updates of the round change; all ranks make equally many
        forward passes."""
        job = self.job
        groups = -(-job.examples_per_step // self.world.data_group.size)
        for start in range(0, groups * job.num_samples, job.device_batch_size):
            part = rollouts[start : start + job.device_batch_size]
            values = iter(
                self.score(self._collate(part or rollouts[:1] or [Rollout(0, 0, [self.pad_id] * 2, 1, [0], [0.0])]))
            )
            for one in part:
                one.trained_logprobs = [next(values) if chosen else 0.0 for chosen in one.chosen]

    def _warn_idle_round(self, round_metrics: dict[str, Any]) -> None:
        """Say, once, why a round teaches nothing."""
        idle = [
            reason
            for reason in _IDLE_REASONS
            if round_metrics[reason] == 1 and (self.job.mask_truncated or reason != "truncated")
        ]
        if idle and idle[0] not in self._warned:
            self._warned.add(idle[0])
            log.warn(f"{_IDLE_REASONS[idle[0]]}: this step teaches nothing")

    def _make_requests(self, number: int) -> list[RolloutRequest]:
        """This rank's share: whole groups, their first answers first."""
        job, data = self.job, self.world.data_group
        places = range(data.rank, job.examples_per_step, data.size)
        chosen = {place: self._question_index(number * job.examples_per_step + place) for place in places}
        return [
            RolloutRequest(
                chosen[place],
                place * job.num_samples + sample,
                self.prompts[chosen[place]],
                job.sampling.make_sampling(derive_seed(f"{job.seed}/{number}/{place}/{sample}")),
            )
            for sample in range(job.num_samples)
            for place in places
        ]

    def _question_index(self, position: int) -> int:
        turn, place = divmod(position, len(self.questions))
        if getattr(self, "_turn", None) != turn:
            self._turn, self._order = turn, list(range(len(self.questions)))
            Random(f"{self.job.seed}/{turn}").shuffle(self._order)
        return self._order[place]

    def _queue_micro_batches(
        self, every: list[Rollout], pending: list[dict[str, Any]], round_metrics: dict[str, Any]
    ) -> None:
        """Fill the queue with this rank's micro-batches of the next update."""
        update, data = self.state["update"], self.world.data_group
        size = len(every) // self.job.updates
        part = every[update * size : (update + 1) * size]
        counted = [one for one in part if not (one.truncated and self.job.mask_truncated) and not one.unjudged]
        # An advantage of 0 has no gradient: such an answer is counted, and needs no forward pass.
        learned = [one for one in counted if one.advantage != 0 or self.job.kl_coef]
        bins = balance_batches(learned, self.micro_steps * data.size, self.job.device_batch_size)
        last = update + 1 == self.job.updates
        state = {
            "micro_batch": self.state["micro_batch"] + self.micro_steps * data.size,
            "round": self.state["round"] + last,
            "update": 0 if last else update + 1,
            "held": [] if last else pending,
            "told": round_metrics,
        }
        idle = min(part, key=lambda one: len(one.ids))
        rest = self._count_targets(counted) - self._count_targets(learned)
        for at in range(data.rank, len(bins), data.size):
            some = bins[at] or [replace(idle, chosen=[0] * len(idle.chosen))]
            batch = self._collate(some)
            batch.num_targets = self._count_targets(bins[at]) + (rest if at == 0 else 0)
            batch.loader_state = state
            turn = (self.state["round"] * self.job.examples_per_step) // len(self.questions)
            batch.segment_origins = [(0, one.question, turn, 0, len(one.ids) - 1) for one in bins[at]]
            self._queue.append(batch)
        self.state = state

    def _collate(self, rollouts: Sequence[Rollout]) -> Batch:
        grids = [self.questions[one.question].picture_grids for one in rollouts]
        names = [pack_grids(each) if each else b"" for each in grids]
        batch = rollout_loss.collate_rollouts(rollouts, self.pad_id, self.job.batch.resolved_seq_len, names)
        return batch if self.asked.rules is None else CollatePictures(self.asked.rules).add_pictures(batch)

    def _count_targets(self, rollouts: Sequence[Rollout]) -> int:
        """Divisor of the summed loss."""
        if self.algorithm.normalizer == "token":
            return sum(one.num_chosen for one in rollouts)
        return len(rollouts) * (self.job.sampling.max_new_tokens if self.algorithm.normalizer == "room" else 1)

    def __enter__(self) -> RolloutBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.clear()


def derive_seed(name: str) -> int:
    """Return a seed that follows from `name`."""
    return Random(name).getrandbits(62)


def balance_batches(rollouts: Sequence[Rollout], bins: int, max_rollouts: int) -> list[list[Rollout]]:
    """Split answers into batches of about equally many tokens, at most `max_rollouts` each, the longest first."""
    parts: list[list[Rollout]] = [[] for _ in range(bins)]
    sizes = [0] * bins
    for one in sorted(rollouts, key=lambda one: (-len(one.ids), one.number)):
        at = min((at for at in range(bins) if len(parts[at]) < max_rollouts), key=lambda at: (sizes[at], at))
        parts[at].append(one)
        sizes[at] += len(one.ids)
    return parts


def summarize_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return means of what a set of answers got: reward, each reward by name, tokens, shares truncated and empty.

    Rewards are those of the answers that could be judged.
    """
    count = max(1, len(rollouts))
    names = rollouts[0].scores if rollouts else {}
    faults = sum(len(one.faults) for one in rollouts)
    judged = [one for one in rollouts if not one.unjudged]
    num_judged = max(1, len(judged))
    return {
        "reward": sum(one.reward for one in judged) / num_judged,
        **{f"reward/{name}": sum(one.scores[name] for one in judged) / num_judged for name in names},
        "answer_tokens": sum(one.num_chosen for one in rollouts) / count,
        "truncated": sum(one.truncated for one in rollouts) / count,
        "empty": sum(not one.text.strip() for one in rollouts) / count,
        **({"reward_faults": faults} if faults else {}),
        **({"unjudged": 1 - len(judged) / count} if len(judged) < len(rollouts) else {}),
    }


def warn_faults(rollouts: Sequence[Rollout]) -> None:
    """Show faults, each text once: those of rewards, and of `turn`, which ends the conversation there; and how many
    answers nobody can judge."""
    fault_counts: dict[str, int] = {}
    for one in rollouts:
        for name, what in one.faults.items():
            fault_counts[f"{name}: {what}"] = fault_counts.get(f"{name}: {what}", 0) + 1
    for what, count in list(fault_counts.items())[:_MAX_WARNINGS]:
        name = what.partition(":")[0]
        then = "and counts 0 there" if name in rollouts[0].scores else "and ends the conversation there"
        log.warn(f"{name} failed for {count} of {len(rollouts)} answers, {then}:{what.removeprefix(name)[1:]}")
    if unjudged := [one.unjudged for one in rollouts if one.unjudged]:
        log.warn(f"{len(unjudged)} of {len(rollouts)} answers cannot be judged, and are left out: {unjudged[0]}")


RewardArray = np.ndarray


def compute_advantages(name: str, rewards: RewardArray) -> np.ndarray:
    """Return the advantages of answers, among those that could be judged; 0 of the others.

    Args:
        name: one of `ADVANTAGES`.
        rewards: `[prompts, answers]`, NaN where an answer could not be judged.
    """
    judged = ~np.isnan(rewards)
    if judged.all():
        return ADVANTAGES[name](rewards)
    found = np.zeros_like(rewards)
    if name == "batch":
        found[judged] = normalize_by_batch(rewards[judged][None])[0] if judged.any() else 0.0
        return found
    for row, mask in enumerate(judged):
        if mask.any():
            found[row, mask] = ADVANTAGES[name](rewards[row, mask][None])[0]
    return found


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
