"""The loss of a batch of answers, as a training step calls it.

Shapes: `n` tokens that the model chose, of `S` answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.data.batching.packing import Batch, TokenSegment, collate_packed
from anabatic.device.device import Device, send_to_device
from anabatic.device.ops import linear_log_probs
from anabatic.models.forward import (
    ModelRoot,
    PackedBatch,
    cast_adapters,
    choose_packing,
    compute_chunk_bytes,
    compute_target_states,
)
from anabatic.models.preference_loss import ReferenceWeights
from anabatic.rl.policy_loss import ClipRange, RlAlgorithm, TokenLogProbs, correct_engine, kl_divergence
from anabatic.rl.rollout import Rollout

METRIC_NAMES = ("logprob_diff", "kl_engine", "clipped", "entropy")
"""Metrics summed together with the loss, means over an answer's tokens or over all, as the loss itself:

`logprob_diff` |log-probability in training - in the engine|; `kl_engine` the engine's less the training's, an estimate
of how far the two are apart; `clipped` share of the tokens whose ratio lies beyond its bounds; `entropy` minus the
log-probability of what was drawn, an estimate of the entropy. From the second update of a round on, the first three
also hold what the updates before have changed.
"""
CORRECTION_METRICS = ("engine_shift", "engine_bound")
"""With `rollout.correction`: mean |weight - 1|, and the share of tokens whose weight is at its bound or masked."""
REFERENCE_METRIC = "kl"
"""The mean divergence from the reference, where there is one."""


def metric_names(kl_coef: float, correction: str = "none") -> tuple[str, ...]:
    """Return what is added up."""
    corrected = CORRECTION_METRICS if correction != "none" else ()
    return (*METRIC_NAMES, *corrected, REFERENCE_METRIC) if kl_coef else (*METRIC_NAMES, *corrected)


def collate_rollouts(
    rollouts: Sequence[Rollout], pad_id: int, seq_len: int, pictures: Sequence[bytes] | None = None
) -> Batch:
    """Lay answers with their questions side by side. `num_targets` is what the caller makes it.

    Args:
        pictures: of each question, as `TokenSegment` has them.
    """
    pieces = []
    for rollout, shown in zip(rollouts, pictures or [b""] * len(rollouts), strict=True):
        mask = np.zeros(len(rollout.ids), dtype=np.uint8)
        mask[rollout.start :] = rollout.chosen
        pieces.append(TokenSegment(np.array(rollout.ids, dtype=np.int64), mask, pictures=shown))
    batch = collate_packed(pieces, sum(piece.num_inputs for piece in pieces), pad_id, seq_len)
    lengths = [rollout.num_chosen for rollout in rollouts]
    old = _list_chosen([(one.logprobs, one.chosen) for one in rollouts])
    answers = torch.repeat_interleave(torch.arange(len(rollouts)), torch.tensor(lengths))
    extra = {
        "old": torch.tensor(old),
        "answers": answers,
        "advantages": torch.tensor([rollout.advantage for rollout in rollouts], dtype=torch.float32),
        "lengths": torch.tensor(lengths, dtype=torch.float32),
    }
    if all(one.trained_logprobs for one in rollouts):
        extra["trained"] = torch.tensor(_list_chosen([(one.trained_logprobs, one.chosen) for one in rollouts]))
    return replace(batch, extra=extra)


def _list_chosen(pairs: Sequence[tuple[Sequence[float], Sequence[int]]]) -> list[float]:
    return [value for values, chosen in pairs for value, is_sampled in zip(values, chosen, strict=True) if is_sampled]


@dataclass
class PackedAnswers:
    """A batch on the device: `rl.policy_loss.TokenLogProbs` without the log-probabilities that training makes."""

    packed: PackedBatch
    extra: dict[str, Tensor]
    reference_logprobs: Tensor | None = None


class RolloutLoss:
    """The summed loss of a batch of answers: `loss(model, loss.pack(batch, device))`.

    Args:
        temperature: at which the answers were drawn, and are scored.
        correction: name and cap of `policy_loss.correct_engine`; `none`: the ratio is that to the engine.

    Attributes:
        sums: what every call adds up, in the order of `names`; whoever reads it sets it to zero.
    """

    def __init__(
        self,
        root: ModelRoot,
        device: Device,
        algorithm: RlAlgorithm,
        clip: ClipRange,
        kl_coef: float,
        temperature: float,
        correction: tuple[str, float] = ("none", 0.0),
    ) -> None:
        self.root, self.device = root, device
        self.algorithm, self.clip, self.kl_coef, self.temperature = algorithm, clip, kl_coef, temperature
        self.correction = correction
        self._pack = choose_packing(root.model)
        self.reference = ReferenceWeights(root) if kl_coef else None
        self.names = metric_names(kl_coef, correction[0])
        self.sums = torch.zeros(len(self.names), device=device.torch_device)

    def pack(self, batch: Batch, device: torch.device) -> PackedAnswers:
        """Move a batch to `device`, and ask the reference if there is one."""
        learned = replace(batch, num_targets=len(batch.extra["old"]))  # the batch's own is what its loss is divided by
        answers = PackedAnswers(
            self._pack(learned, device), {name: send_to_device(value, device) for name, value in batch.extra.items()}
        )
        if self.reference is not None:
            with self.reference(), self.device.autocast():
                answers.reference_logprobs = self.root(self.log_probs, answers)
        return answers

    def score(self, rollouts: Sequence[Rollout], pad_id: int, seq_len: int, temperature: float) -> list[float]:
        """Return the log-probability of every chosen token, one answer after the other; every rank calls this."""
        return self.score_batch(collate_rollouts(rollouts, pad_id, seq_len), temperature)

    def score_batch(self, batch: Batch, temperature: float | None = None) -> list[float]:
        """Return the log-probability of every chosen token of a batch, by default at the loss's own temperature; every
        rank calls this."""
        packed = self._pack(replace(batch, num_targets=len(batch.extra["old"])), self.device.torch_device)
        was_training = self.root.training
        self.root.eval()
        with torch.no_grad(), self.device.autocast():
            found: Tensor = self.root(self.log_probs, PackedAnswers(packed, {}), temperature)
        self.root.train(was_training)
        return [float(one) for one in found.float().cpu()]

    def log_probs(self, model: PreTrainedModel, answers: PackedAnswers, temperature: float | None = None) -> Tensor:
        """Return the log-probability of every chosen token at a temperature, by default the loss's own; fp32 `[n]`."""
        cast_adapters(model)
        temperature = self.temperature if temperature is None else temperature
        states, weight, head = compute_target_states(model, answers.packed)
        cap = head.softcap
        if temperature != 1:  # cap tanh(x / cap) / t is (cap / t) tanh((x / t) / (cap / t))
            states, cap = states / temperature, cap and cap / temperature
        rows = compute_chunk_bytes(weight, self.device.device_row.chunk_bytes)
        return linear_log_probs(states, weight, answers.packed.targets, rows, cap)

    def __call__(self, model: PreTrainedModel, answers: PackedAnswers) -> Tensor:
        """Return the summed loss of the answers, fp32."""
        extra, (name, cap) = answers.extra, self.correction
        tokens = TokenLogProbs(
            self.log_probs(model, answers),
            extra["old"],
            extra["answers"],
            extra["advantages"],
            extra["lengths"],
            answers.reference_logprobs,
        )
        bound = None
        if name != "none":  # without `trained`, the weights are those before the round's first update
            tokens.old_logprobs = extra["trained"] if "trained" in extra else tokens.logprobs.detach()
            tokens.weights, bound = correct_engine(name, cap, tokens.old_logprobs - extra["old"], tokens)
        with torch.no_grad():
            self.sums += self._mean_metrics(tokens, extra["old"], bound)
        return self.algorithm.loss_function(tokens, self.clip, self.kl_coef)

    def _mean_metrics(self, tokens: TokenLogProbs, engine: Tensor, bound: Tensor | None) -> Tensor:
        gap = tokens.logprobs - engine
        drift = gap if tokens.old_logprobs is engine else tokens.logprobs - tokens.old_logprobs
        beyond = (drift.exp() < 1 - self.clip.low) | (drift.exp() > 1 + self.clip.high)
        rows = [gap.abs(), -gap, beyond.float(), -tokens.logprobs]
        if bound is not None and tokens.weights is not None:
            rows += [(tokens.weights - 1).abs(), bound.float()]
        if tokens.reference_logprobs is not None:
            rows.append(kl_divergence(tokens))
        values = torch.stack(rows)
        if self.algorithm.normalizer == "token":
            return values.sum(1)
        return (values / tokens.lengths.clamp(min=1)[tokens.answer_index]).sum(1)
