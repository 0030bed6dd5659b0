"""KTO: unpaired answers, each desirable or not (Ethayarajh et al. 2024, arXiv 2402.01306).

Shapes: `A` answers, `T` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.data.batching.batch import IGNORE_INDEX, Batch
from anabatic.data.batching.packing import TokenSegment, collate_packed
from anabatic.device.transfer import send_to_device
from anabatic.models.forward import pack_batch
from anabatic.models.preference_loss import PackedPairs, PreferenceLoss, PreferenceOptions

KTO_METRIC_NAMES = ("margin", "accuracy", "kl")
"""Metrics summed besides the loss: the reward of desirable answers and the negative reward of others, the fraction of
answers on the right side of the reference point, and that point, `beta z`."""


@dataclass
class PackedAnswers(PackedPairs):
    """A batch of answers on the device; `answer_ids` holds the answer of each target, `lengths` and
    `reference_logprobs` are `[A]`.

    Attributes:
        desirable: bool `[A]`.
        reference_point: fp32 `[]`, the reference point `z`.
    """

    desirable: Tensor | None = None
    reference_point: Tensor | None = None


class KtoLoss(PreferenceLoss):
    """The summed loss of a batch of `data.preference_pairs.collate_unpaired_answers`.

    The reference point is estimated as in the paper (section 4.1) and in TRL's KTOTrainer: from each question with the
    answer to another one of the micro-batch. These pairs need the same memory, as each question and answer occurs once.
    """

    metric_names = KTO_METRIC_NAMES
    unit = "answers"

    def pack_batch(self, batch: Batch, device: torch.device) -> PackedAnswers:
        """Move a batch to `device`; compute reference log-probabilities and the reference point, outside of `root`."""
        assert self.reference is not None
        answers = pack_answers(batch, device)
        mismatched = make_mismatched_batch(batch)
        with self.device.autocast():
            with self.reference():
                answers.reference_logprobs = self.root(self.compute_log_probs, answers)
            answers.reference_point = answers.reference_logprobs.new_zeros(())
            if mismatched is not None:
                mismatched_answers = pack_answers(mismatched, device)
                with self.reference():
                    reference_logps = self.root(self.compute_log_probs, mismatched_answers)
                with torch.no_grad():
                    policy_logps = self.root(self.compute_log_probs, mismatched_answers)
                answers.reference_point = (policy_logps - reference_logps).mean().clamp(min=0)
        return answers

    def __call__(self, model: PreTrainedModel, pairs: PackedPairs) -> Tensor:
        """Return the summed loss of the answers, fp32."""
        assert isinstance(pairs, PackedAnswers)
        assert (
            pairs.reference_logprobs is not None and pairs.reference_point is not None and pairs.desirable is not None
        )
        ratios = self.compute_log_probs(model, pairs) - pairs.reference_logprobs
        with torch.no_grad():
            sign = torch.where(pairs.desirable, 1.0, -1.0)
            rewards, point = self.objective.beta * ratios, self.objective.beta * pairs.reference_point
            is_correct = (sign * (rewards - point) > 0).to(rewards.dtype)
            self.metric_sums += torch.stack(((sign * rewards).sum(), is_correct.sum(), point * len(ratios)))
        return compute_kto_losses(ratios, pairs.reference_point, pairs.desirable, self.objective).sum()


def compute_kto_losses(ratios: Tensor, point: Tensor, desirable: Tensor, objective: PreferenceOptions) -> Tensor:
    """Return the loss of every answer `[A]`: `w_d (1 - sigmoid(beta (r - z)))` for a desirable one and
    `w_u (1 - sigmoid(beta (z - r)))` for another (arXiv 2402.01306, equation 8).

    Args:
        ratios: `r = log pi(y|x) - log pi_ref(y|x)` `[A]`.
        point: `z`, the estimated KL divergence, at least 0, without a gradient.
        desirable: bool `[A]`.
    """
    logits = objective.beta * (ratios - point)
    desirable_losses = objective.desirable_weight * torch.sigmoid(-logits)
    undesirable_losses = objective.undesirable_weight * torch.sigmoid(logits)
    return torch.where(desirable, desirable_losses, undesirable_losses)


def pack_answers(batch: Batch, device: torch.device) -> PackedAnswers:
    """Move a batch of `data.preference_pairs.collate_unpaired_answers` to `device`."""
    rows = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
    answer_ids = torch.searchsorted(torch.tensor(batch.cu_seqlens[1:]), rows, right=True)
    lengths = torch.bincount(answer_ids, minlength=batch.num_targets).float()
    desirable = batch.extra["desirable"]
    return PackedAnswers(
        pack_batch(batch, device),
        send_to_device(answer_ids, device),
        send_to_device(lengths, device),
        None,
        send_to_device(desirable, device),
    )


def make_mismatched_batch(batch: Batch) -> Batch | None:
    """Return the questions of a batch with mismatched answers as targets; None if all are the same question.

    Answers are rotated in the order desirable, then others, so that the two answers of a pair are not exchanged. An
    answer is cut where its segment would exceed the longest one of the batch.
    """
    parts = [_split_answer(batch, index) for index in range(batch.num_targets)]
    longest = max(len(ids) + len(answer) - 1 for ids, answer in parts)
    desirable, question_ids = batch.extra["desirable"].tolist(), batch.extra["entry"].tolist()
    order = sorted(range(len(parts)), key=lambda index: not desirable[index])
    segments = []
    for index, other in zip(order, order[1:] + order[:1], strict=True):
        if question_ids[index] != question_ids[other]:
            ids, answer = parts[index][0], parts[other][1][: longest + 1 - len(parts[index][0])]
            mask = torch.cat((torch.zeros_like(ids), torch.ones_like(answer)))
            segments.append(TokenSegment(torch.cat((ids, answer)).numpy(), mask.numpy()))
    if not segments:
        return None
    packed = collate_packed(segments, len(batch.input_ids), int(batch.input_ids[-1]), longest)
    return replace(packed, num_targets=len(segments), extra={"desirable": torch.zeros(len(segments), dtype=torch.bool)})


def _split_answer(batch: Batch, index: int) -> tuple[Tensor, Tensor]:
    """Split a segment into the tokens before the first target, and the rest."""
    start, stop = batch.cu_seqlens[index : index + 2]
    first = int((batch.labels[start:stop] != IGNORE_INDEX).nonzero()[0])
    ids, labels = batch.input_ids[start:stop], batch.labels[start:stop]
    answer = torch.where(labels[first:-1] == IGNORE_INDEX, ids[first + 1 :], labels[first:-1])
    last = labels[-1:] if labels[-1] != IGNORE_INDEX else labels[:0]
    return ids[: first + 1], torch.cat((answer, last))
