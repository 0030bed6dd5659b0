"""Preference losses: DPO and its variants on pairs, KTO on unpaired answers, as log-probability ratios to a reference.

Shapes: `P` pairs, `n` targets of a batch, `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.config.dpo import LossType
from anabatic.data.batching.packing import IGNORE_INDEX, Batch, TokenSegment, collate_packed
from anabatic.data.vision.picture_batch import list_pictures
from anabatic.data.vision.picture_tensors import PictureBatch
from anabatic.device.device import Device, send_to_device
from anabatic.device.ops import linear_log_probs
from anabatic.models.context_parallel import count_once, find_target_rows, sum_over_context
from anabatic.models.forward import (
    ModelRoot,
    PackBatch,
    PackedBatch,
    cast_adapters,
    choose_packing,
    compute_chunk_bytes,
    compute_target_states,
    pack_batch,
)
from anabatic.models.lora import adapter
from anabatic.parallel.mesh import SINGLE_CONTEXT, ContextGroup
from anabatic.parallel.sharded_tensors import get_local_slices, is_sharded, to_local
from anabatic.parallel.sharding import reshard_weights

REFERENCE_FREE_LOSSES = ("orpo", "simpo")
"""Losses without a reference model."""
PREFERENCE_METRIC_NAMES = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
"""Metrics summed besides the loss."""


@dataclass(frozen=True)
class PreferenceOptions:
    """Options of the loss; the names are those of TRL and LLaMA-Factory."""

    beta: float = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0
    simpo_gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass
class PackedPairs:
    """A batch of pairs on the device.

    Attributes:
        packed: the tokens.
        answer_ids: int64 `[n]`, the answer of each target: `2 p` the chosen one of pair `p`, `2 p + 1` the rejected
            one.
        lengths: fp32 `[P, 2]`, targets of each answer.
        reference_logprobs: fp32 `[P, 2]`, log-probabilities of the answers under the reference model.
    """

    packed: PackedBatch
    answer_ids: Tensor
    lengths: Tensor
    reference_logprobs: Tensor | None = None


def pack_pairs(
    batch: Batch, device: torch.device, context: ContextGroup = SINGLE_CONTEXT, pack: PackBatch = pack_batch
) -> PackedPairs:
    """Move a batch of `data.preference_pairs.collate_preference_pairs` to `device`.

    Args:
        context: ranks that share the batch.
        pack: of `choose_packing`.
    """
    answer_ids, counts = _find_answers(batch, 2 * batch.num_targets, context)
    return PackedPairs(
        pack(batch, device, context=context),
        send_to_device(answer_ids, device),
        send_to_device(counts.view(-1, 2), device),
    )


def _find_answers(batch: Batch, answers: int, context: ContextGroup) -> tuple[Tensor, Tensor]:
    """Return the answer of each target of this rank, int64 `[n]`, and the targets of each answer in the whole batch,
    fp32 `[answers]`."""
    ends = torch.tensor(batch.cu_seqlens[1:])
    every = torch.searchsorted(ends, find_target_rows(batch, SINGLE_CONTEXT), right=True)
    own = every if context.size == 1 else torch.searchsorted(ends, find_target_rows(batch, context), right=True)
    return own, torch.bincount(every, minlength=answers).float()


class ReferenceWeights:
    """The weights before training, swapped in for the reference forward pass.

    Only trained parameters are copied, with the same sharding. With a new adapter the reference is the base model, with
    a loaded one the model including it. Both sides of the ratio are computed in the same way, so it starts at exactly
    one.
    """

    def __init__(self, root: ModelRoot) -> None:
        self._root = root
        trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
        self._pairs = [(parameter, to_local(parameter).detach().clone()) for parameter in trained]
        self._sharded = any(map(is_sharded, trained))
        # PiSSA's initial adapter is part of a checkpoint, so that every machine continues with the same one.
        starts = {
            id(matrix): start
            for layer in adapter.find_lora_layers(root.model).values()
            for matrix, start in ((layer.lora_A, layer.lora_A_start), (layer.lora_B, layer.lora_B_start))
            if start is not None
        }
        self._starts = [
            (reference, starts[id(matrix)], get_local_slices(matrix))
            for matrix, reference in self._pairs
            if id(matrix) in starts
        ]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Use the reference weights within the block, without dropout and gradients."""
        was_training = self._root.training
        with torch.no_grad():
            for reference, start, local_slices in self._starts:
                reference.copy_(start[local_slices])
            self._swap_weights()
            self._root.eval()
            try:
                yield
            finally:
                if self._sharded:
                    reshard_weights(self._root)
                self._root.train(was_training)
                self._swap_weights()

    def _swap_weights(self) -> None:
        for parameter, reference in self._pairs:
            current = to_local(parameter)
            saved = current.clone()
            current.copy_(reference)
            reference.copy_(saved)


class PreferenceLoss:
    """The summed loss of a batch of pairs, called by a step: `loss(model, loss.pack_batch(batch, device))`.

    On ranks that share a batch (`context`) each has the log-probabilities of whole answers; one counts the loss.

    Attributes:
        metric_names: names of `metric_sums`, which every call adds to and the reader resets to zero.
        unit: unit over which the loss is averaged.
        reference: the reference weights; None if the loss needs none.
    """

    metric_names: Sequence[str] = PREFERENCE_METRIC_NAMES
    unit = "pairs"

    def __init__(
        self, root: ModelRoot, device: Device, objective: PreferenceOptions, context: ContextGroup = SINGLE_CONTEXT
    ) -> None:
        self.root, self.device, self.objective, self.context = root, device, objective, context
        self._pack = choose_packing(root.model)
        self.reference = None if objective.loss_type in REFERENCE_FREE_LOSSES else ReferenceWeights(root)
        self.metric_sums = torch.zeros(len(self.metric_names), device=device.torch_device)

    def pack_batch(self, batch: Batch, device: torch.device) -> PackedPairs:
        """Move a batch to `device` and compute reference log-probabilities, which gathers sharded weights once more.

        Not called inside of `root`.
        """
        pairs = pack_pairs(batch, device, self.context, self._pack)
        if self.reference is not None:
            with self.reference(), self.device.autocast():
                pairs.reference_logprobs = self.root(self.compute_log_probs, pairs)
        return pairs

    def __call__(self, model: PreTrainedModel, pairs: PackedPairs) -> Tensor:
        """Return the summed loss of the pairs, fp32."""
        policy_logps = self.compute_log_probs(model, pairs)
        reference_logps = (
            torch.zeros_like(policy_logps) if pairs.reference_logprobs is None else pairs.reference_logprobs
        )
        with torch.no_grad():
            rewards = compute_rewards(policy_logps, reference_logps, pairs.lengths, self.objective).sum(0)
            self.metric_sums += count_once(rewards, self.context)
        losses = compute_pair_losses(policy_logps, reference_logps, pairs.lengths, self.objective)
        return count_once(losses.sum(), self.context)

    def compute_log_probs(self, model: PreTrainedModel, pairs: PackedPairs) -> Tensor:
        """Return the summed log-probability of every answer, fp32 `[P, 2]`."""
        cast_adapters(model)
        states, weight, head = compute_target_states(model, pairs.packed)
        chunk_bytes = compute_chunk_bytes(weight, self.device.device_row.chunk_bytes)
        logps = linear_log_probs(states, weight, pairs.packed.targets, chunk_bytes, head.softcap)
        sums = logps.new_zeros(pairs.lengths.numel()).index_add(0, pairs.answer_ids, logps)
        return sum_over_context(sums, self.context).view(pairs.lengths.shape)


def compute_log_ratios(
    policy_logps: Tensor, reference_logps: Tensor, lengths: Tensor, objective: PreferenceOptions
) -> Tensor:
    """Return `log pi(y|x) - log pi_ref(y|x)` of both answers `[P, 2]`; for IPO the mean over their tokens, for ORPO and
    SimPO the mean of `log pi(y|x)`.

    TRL and LLaMA-Factory use the mean for IPO; equation 17 of arXiv 2310.12036 has the sum.
    """
    if objective.loss_type in REFERENCE_FREE_LOSSES:
        return policy_logps / lengths
    ratios = policy_logps - reference_logps
    return ratios / lengths if objective.loss_type == "ipo" else ratios


def compute_pair_losses(
    policy_logps: Tensor, reference_logps: Tensor, lengths: Tensor, objective: PreferenceOptions
) -> Tensor:
    """Return the loss of every pair `[P]`, see `LOSS_FUNCTIONS`. `rpo_alpha` is the weight of the added cross-entropy
    per token of the chosen answer (arXiv 2404.19733, equation 1).

    Args:
        policy_logps, reference_logps: log-probabilities of the answers under the model and the reference `[P, 2]`; ORPO
            and SimPO do not read the latter.
        lengths: number of their targets `[P, 2]`.
    """
    losses = LOSS_FUNCTIONS[objective.loss_type](
        compute_log_ratios(policy_logps, reference_logps, lengths, objective), objective
    )
    if objective.rpo_alpha:
        losses = losses - objective.rpo_alpha * policy_logps[:, 0] / lengths[:, 0]
    return losses


def sigmoid_loss(ratios: Tensor, objective: PreferenceOptions) -> Tensor:
    """DPO: `-log sigmoid(beta h)`, `h` the difference of the log-ratios (arXiv 2305.18290, equation 7); with label
    smoothing `e`, `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)` (https://ericmitchell.ai/cdpo.pdf)."""
    logits, smoothing = objective.beta * _log_ratio_gap(ratios), objective.label_smoothing
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)


def hinge_loss(ratios: Tensor, objective: PreferenceOptions) -> Tensor:
    """SLiC: `max(0, 1 - beta h)` (arXiv 2305.10425, equation 1, on the log-ratios as in arXiv 2309.06657)."""
    return (1 - objective.beta * _log_ratio_gap(ratios)).clamp(min=0)


def ipo_loss(ratios: Tensor, objective: PreferenceOptions) -> Tensor:
    """IPO: `(h - 1 / (2 beta))^2` (arXiv 2310.12036, equation 17)."""
    return (_log_ratio_gap(ratios) - 1 / (2 * objective.beta)).square()


def simpo_loss(means: Tensor, objective: PreferenceOptions) -> Tensor:
    """SimPO: `-log sigmoid(beta (m_w - m_l) - gamma)`, `m` the mean log-probability of an answer's tokens (arXiv
    2405.14734, equation 6)."""
    return -F.logsigmoid(objective.beta * _log_ratio_gap(means) - objective.simpo_gamma)


def orpo_loss(means: Tensor, objective: PreferenceOptions) -> Tensor:
    """ORPO: `-m_w - beta log sigmoid(log odds_w - log odds_l)` with `odds = p / (1 - p)` of `p = e^m` (arXiv
    2403.07691, equations 3, 6 and 7; `beta` is its lambda)."""
    means = means.clamp(max=-torch.finfo(means.dtype).tiny)  # the odds of a certain answer are infinite
    odds = means - (-torch.expm1(means)).log()
    return -means[:, 0] - objective.beta * F.logsigmoid(_log_ratio_gap(odds))


def _log_ratio_gap(ratios: Tensor) -> Tensor:
    return ratios[:, 0] - ratios[:, 1]


LOSS_FUNCTIONS: dict[str, Callable[[Tensor, PreferenceOptions], Tensor]] = {
    "sigmoid": sigmoid_loss,
    "hinge": hinge_loss,
    "ipo": ipo_loss,
    "simpo": simpo_loss,
    "orpo": orpo_loss,
}
"""Name of a loss -> function of the result of `compute_log_ratios` `[P, 2]` that returns the losses `[P]`."""


def compute_rewards(
    policy_logps: Tensor, reference_logps: Tensor, lengths: Tensor, objective: PreferenceOptions
) -> Tensor:
    """Return for every pair the rewards `beta log-ratio` of both answers, their margin, and whether it is positive.

    Shape `[P, 4]`, in the order of `PREFERENCE_METRIC_NAMES`.
    """
    rewards = objective.beta * compute_log_ratios(policy_logps, reference_logps, lengths, objective)
    margin = _log_ratio_gap(rewards)
    return torch.stack((rewards[:, 0], rewards[:, 1], margin, (margin > 0).to(rewards.dtype)), dim=1)


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
        answers = pack_answers(batch, device, self.context, self._pack)
        mismatched = make_mismatched_batch(batch)
        with self.device.autocast():
            with self.reference():
                answers.reference_logprobs = self.root(self.compute_log_probs, answers)
            answers.reference_point = answers.reference_logprobs.new_zeros(())
            if mismatched is not None:
                mismatched_answers = pack_answers(mismatched, device, self.context, self._pack)
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
            sums = torch.stack(((sign * rewards).sum(), is_correct.sum(), point * len(ratios)))
            self.metric_sums += count_once(sums, self.context)
        losses = compute_kto_losses(ratios, pairs.reference_point, pairs.desirable, self.objective)
        return count_once(losses.sum(), self.context)


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


def pack_answers(
    batch: Batch, device: torch.device, context: ContextGroup = SINGLE_CONTEXT, pack: PackBatch = pack_batch
) -> PackedAnswers:
    """Move a batch of `data.preference_pairs.collate_unpaired_answers` to `device`; arguments as of `pack_pairs`."""
    answer_ids, lengths = _find_answers(batch, batch.num_targets, context)
    desirable = batch.extra["desirable"]
    return PackedAnswers(
        pack(batch, device, context=context),
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
    segments, asked = [], []
    for index, other in zip(order, order[1:] + order[:1], strict=True):
        if question_ids[index] != question_ids[other]:
            ids, answer = parts[index][0], parts[other][1][: longest + 1 - len(parts[index][0])]
            mask = torch.cat((torch.zeros_like(ids), torch.ones_like(answer)))
            segments.append(TokenSegment(torch.cat((ids, answer)).numpy(), mask.numpy()))
            asked.append((index, len(ids)))
    if not segments:
        return None
    packed = collate_packed(segments, len(batch.input_ids), int(batch.input_ids[-1]), longest)
    pictures = None if batch.pictures is None else _follow_pictures(batch, batch.pictures, packed, asked)
    desirable_ones = {"desirable": torch.zeros(len(segments), dtype=torch.bool)}
    return replace(packed, num_targets=len(segments), extra=desirable_ones, pictures=pictures)


def _follow_pictures(
    batch: Batch, pictures: PictureBatch, packed: Batch, asked: Sequence[tuple[int, int]]
) -> PictureBatch | None:
    """Return the pictures of questions that were laid anew; None: they have none.

    Args:
        batch: where the pictures are; packed: the questions with other answers.
        asked: of each of its segments, the segment of `batch` that it begins like, and how many tokens of it.
    """
    counts = [sum(one.times for one in list_pictures(names)) if names else 0 for names in batch.picture_names]
    borders = [0, *accumulate(counts)]
    patches = [0, *accumulate(rows * columns for rows, columns in pictures.grids)]
    positions = packed.position_ids[None].repeat(len(pictures.positions), 1)
    grids, pixels = [], []
    for number, (index, length) in enumerate(asked):
        source, (start, stop) = batch.cu_seqlens[index], packed.cu_seqlens[number : number + 2]
        same = min(length, stop - start)
        positions[:, start : start + same] = pictures.positions[:, source : source + same]
        behind = torch.arange(1, stop - start - same + 1)
        positions[:, start + same : stop] = positions[:, start + same - 1, None] + behind
        first, last = borders[index], borders[index + 1]
        grids += pictures.grids[first:last]
        pixels.append(pictures.pixels[patches[first] : patches[last]])
    return PictureBatch(torch.cat(pixels), grids, positions) if grids else None


def _split_answer(batch: Batch, index: int) -> tuple[Tensor, Tensor]:
    """Split a segment into the tokens before the first target, and the rest."""
    start, stop = batch.cu_seqlens[index : index + 2]
    first = int((batch.labels[start:stop] != IGNORE_INDEX).nonzero()[0])
    ids, labels = batch.input_ids[start:stop], batch.labels[start:stop]
    answer = torch.where(labels[first:-1] == IGNORE_INDEX, ids[first + 1 :], labels[first:-1])
    last = labels[-1:] if labels[-1] != IGNORE_INDEX else labels[:0]
    return ids[: first + 1], torch.cat((answer, last))
