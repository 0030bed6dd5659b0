"""The loss of preference pairs: how much more the model favours the better answer than it did before training.

Shapes: `P` pairs, `n` targets of a batch, `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.data.batch import IGNORE, Batch
from anabatic.device.ops import linear_log_probs
from anabatic.device.transfer import send
from anabatic.models import adapter
from anabatic.models.forward import Packed, chunk_bytes_of, head_of, pack, target_states

NAMES = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
"""What is added up beside the loss."""


@dataclass(frozen=True)
class Objective:
    """Which loss of a pair; the names are those of TRL and LLaMA-Factory."""

    beta: float = 0.1
    loss_type: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: float = 0.0
    rpo_alpha: float = 0.0


@dataclass
class PackedPairs:
    """A batch of pairs on the device.

    Attributes:
        packed: the tokens.
        sides: int64 `[n]`, the answer that a target belongs to: `2 p` the better one of pair `p`, `2 p + 1` the other.
        lengths: fp32 `[P, 2]`, targets of each answer.
    """

    packed: Packed
    sides: Tensor
    lengths: Tensor


def pack_pairs(batch: Batch, device: torch.device) -> PackedPairs:
    """Move a batch of `data.pairs.flatten_pairs` to `device`."""
    rows = (batch.labels != IGNORE).nonzero().squeeze(1)
    sides = torch.searchsorted(torch.tensor(batch.cu_seqlens[1:]), rows, right=True)
    lengths = torch.bincount(sides, minlength=2 * batch.num_targets).view(-1, 2).float()
    return PackedPairs(pack(batch, device), send(sides, device), send(lengths, device))


class Reference:
    """The weights as they were before training, to be exchanged with the trained ones for a while.

    Only what is trained is kept twice. An adapter that begins at zero thus gives the model without it, one that goes
    on gives the model that it came with, and both sides of the ratio are computed in the same way: it begins at
    exactly one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        # PiSSA's start is part of a checkpoint, so that every machine continues with the same one.
        starts = {
            id(own): start
            for layer in adapter.layers(model).values()
            for own, start in ((layer.lora_A, layer.lora_A_start), (layer.lora_B, layer.lora_B_start))
        }
        self._pairs = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                start = starts.get(id(parameter))
                self._pairs.append((parameter, parameter.detach().clone() if start is None else start))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block the model is the one before training, without dropout and without gradients."""
        was_training, cached = self._model.training, torch.is_autocast_cache_enabled()
        with torch.no_grad():
            self._exchange()
            self._model.eval()
            torch.set_autocast_cache_enabled(False)  # copies in half precision would outlive the exchange
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(cached)
                self._model.train(was_training)
                self._exchange()

    def _exchange(self) -> None:
        for now, before in self._pairs:
            kept = now.detach().clone()
            now.copy_(before)
            before.copy_(kept)


class PreferenceLoss(nn.Module):
    """A language model whose forward pass is the summed loss of a batch of pairs.

    Attributes:
        sums: `[4]`, what every forward pass adds up, in the order of `NAMES`; whoever reads it sets it to zero.
    """

    def __init__(self, model: PreTrainedModel, chunk_bytes: int, objective: Objective) -> None:
        super().__init__()
        self.model, self.chunk_bytes, self.objective = model, chunk_bytes, objective
        self.reference = Reference(model)
        self.sums = torch.zeros(len(NAMES), device=model.device)

    def forward(self, pairs: PackedPairs) -> Tensor:
        """Return the summed loss of the pairs, fp32."""
        with self.reference():
            before = self.log_probs(pairs)
        now = self.log_probs(pairs)
        with torch.no_grad():
            self.sums += rewards(now, before, pairs.lengths, self.objective).sum(0)
        return pair_losses(now, before, pairs.lengths, self.objective).sum()

    def log_probs(self, pairs: PackedPairs) -> Tensor:
        """Return the summed log-probability of every answer, fp32 `[P, 2]`."""
        head = head_of(self.model)
        states = target_states(self.model, pairs.packed)
        found = linear_log_probs(states, head, pairs.packed.targets, chunk_bytes_of(head, self.chunk_bytes))
        return found.new_zeros(pairs.lengths.numel()).index_add(0, pairs.sides, found).view(-1, 2)


def log_ratios(now: Tensor, before: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """Return `log pi(y|x) - log pi_ref(y|x)` of both answers `[P, 2]`; for IPO the mean over their tokens.

    The mean is what TRL and LLaMA-Factory take for IPO; equation 17 of arXiv 2310.12036 has the sum.
    """
    ratios = now - before
    return ratios / lengths if objective.loss_type == "ipo" else ratios


def pair_losses(now: Tensor, before: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """Return the loss of every pair `[P]`.

    With `h` the difference of the log-ratios: sigmoid `-log sigmoid(beta h)` (DPO, arXiv 2305.18290, equation 7; with
    label smoothing https://ericmitchell.ai/cdpo.pdf), hinge `max(0, 1 - beta h)` (SLiC, arXiv 2305.10425),
    ipo `(h - 1 / (2 beta))^2` (arXiv 2310.12036, equation 17). `rpo_alpha` adds that many times the better answer's
    cross-entropy per token (arXiv 2404.19733, equation 1).

    Args:
        now, before: log-probabilities of the answers under the model and under the reference `[P, 2]`.
        lengths: their targets `[P, 2]`.
    """
    ratios = log_ratios(now, before, lengths, objective)
    gap = ratios[:, 0] - ratios[:, 1]
    beta, smooth = objective.beta, objective.label_smoothing
    if objective.loss_type == "sigmoid":
        losses = -(1 - smooth) * F.logsigmoid(beta * gap) - smooth * F.logsigmoid(-beta * gap)
    elif objective.loss_type == "hinge":
        losses = (1 - beta * gap).clamp(min=0)
    else:
        losses = (gap - 1 / (2 * beta)).square()
    if objective.rpo_alpha:
        losses = losses - objective.rpo_alpha * now[:, 0] / lengths[:, 0]
    return losses


def rewards(now: Tensor, before: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """Return for every pair the rewards `beta log-ratio` of both answers, their difference, and whether it is above 0.

    Shape `[P, 4]`, in the order of `NAMES`.
    """
    both = objective.beta * log_ratios(now, before, lengths, objective)
    margin = both[:, 0] - both[:, 1]
    return torch.stack((both[:, 0], both[:, 1], margin, (margin > 0).to(both.dtype)), dim=1)
