"""KTO: single answers, each good or bad (Ethayarajh et al. 2024, arXiv 2402.01306).

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
"""What is added up beside the loss: the reward of good answers and the negative one of bad ones, the share of answers
on their side of the reference point, and that point, `beta z`."""


@dataclass
class PackedAnswers(PackedPairs):
    """A batch of answers on the device; `answer_ids` is the answer of a target, `lengths` and `reference_logprobs` are
    `[A]`.

    Attributes:
        desirable: bool `[A]`.
        reference_point: fp32 `[]`, the reference point `z`.
    """

    desirable: Tensor | None = None
    reference_point: Tensor | None = None


class KtoLoss(PreferenceLoss):
    """The summed loss of a batch of `data.preference_pairs.collate_unpaired_answers`.

    The reference point is estimated as in the paper (section 4.1) and in TRL's KTOTrainer: each question with an answer
    to another one of the micro-batch. Those fill the same room, since each question and each answer comes once.
    """

    metric_names = KTO_METRIC_NAMES
    unit = "answers"

    def pack_batch(self, batch: Batch, device: torch.device) -> PackedAnswers:
        """Move a batch to `device`, ask the reference, and find the reference point with both. Outside of `root`."""
        assert self.reference is not None
        answers = pack_answers(batch, device)
        strangers = make_mismatched_batch(batch)
        with self.device.autocast():
            with self.reference():
                answers.reference_logprobs = self.root(self.compute_log_probs, answers)
            answers.reference_point = answers.reference_logprobs.new_zeros(())
            if strangers is not None:
                others = pack_answers(strangers, device)
                with self.reference():
                    before = self.root(self.compute_log_probs, others)
                with torch.no_grad():
                    now = self.root(self.compute_log_probs, others)
                answers.reference_point = (now - before).mean().clamp(min=0)
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
            right = (sign * (rewards - point) > 0).to(rewards.dtype)
            self.metric_sums += torch.stack(((sign * rewards).sum(), right.sum(), point * len(ratios)))
        return compute_kto_losses(ratios, pairs.reference_point, pairs.desirable, self.objective).sum()


def compute_kto_losses(ratios: Tensor, point: Tensor, desirable: Tensor, objective: PreferenceOptions) -> Tensor:
    """Return the loss of every answer `[A]`: `w_d (1 - sigmoid(beta (r - z)))` of a good one and
    `w_u (1 - sigmoid(beta (z - r)))` of a bad one (arXiv 2402.01306, equation 8).

    Args:
        ratios: `r = log pi(y|x) - log pi_ref(y|x)` `[A]`.
        point: `z`, the estimated KL divergence, at least 0, without a gradient.
        desirable: bool `[A]`.
    """
    gain = objective.beta * (ratios - point)
    good = objective.desirable_weight * torch.sigmoid(-gain)
    bad = objective.undesirable_weight * torch.sigmoid(gain)
    return torch.where(desirable, good, bad)


def pack_answers(batch: Batch, device: torch.device) -> PackedAnswers:
    """Move a batch of `data.preference_pairs.collate_unpaired_answers` to `device`."""
    rows = (batch.labels != IGNORE_INDEX).nonzero().squeeze(1)
    sides = torch.searchsorted(torch.tensor(batch.cu_seqlens[1:]), rows, right=True)
    lengths = torch.bincount(sides, minlength=batch.num_targets).float()
    good = batch.extra["desirable"]
    return PackedAnswers(
        pack_batch(batch, device),
        send_to_device(sides, device),
        send_to_device(lengths, device),
        None,
        send_to_device(good, device),
    )


def make_mismatched_batch(batch: Batch) -> Batch | None:
    """Return questions of a batch, each with the answer to another one, all of it learned; None: all are one question.

    Good answers follow each other in a ring, then bad ones, so that the two of a pair do not meet. An answer loses what
    would make its segment longer than the longest one of the batch.
    """
    parts = [_split_answer(batch, number) for number in range(batch.num_targets)]
    longest = max(len(ids) + len(said) - 1 for ids, said in parts)
    good, entry = batch.extra["desirable"].tolist(), batch.extra["entry"].tolist()
    ring = sorted(range(len(parts)), key=lambda number: not good[number])
    pieces = []
    for number, other in zip(ring, ring[1:] + ring[:1], strict=True):
        if entry[number] != entry[other]:
            ids, said = parts[number][0], parts[other][1][: longest + 1 - len(parts[number][0])]
            mask = torch.cat((torch.zeros_like(ids), torch.ones_like(said)))
            pieces.append(TokenSegment(torch.cat((ids, said)).numpy(), mask.numpy()))
    if not pieces:
        return None
    laid = collate_packed(pieces, len(batch.input_ids), int(batch.input_ids[-1]), longest)
    return replace(laid, num_targets=len(pieces), extra={"desirable": torch.zeros(len(pieces), dtype=torch.bool)})


def _split_answer(batch: Batch, number: int) -> tuple[Tensor, Tensor]:
    """Tokens before the first learned one of a segment, and those from it on."""
    start, stop = batch.cu_seqlens[number : number + 2]
    first = int((batch.labels[start:stop] != IGNORE_INDEX).nonzero()[0])
    ids, labels = batch.input_ids[start:stop], batch.labels[start:stop]
    behind = torch.where(labels[first:-1] == IGNORE_INDEX, ids[first + 1 :], labels[first:-1])
    last = labels[-1:] if labels[-1] != IGNORE_INDEX else labels[:0]
    return ids[: first + 1], torch.cat((behind, last))
