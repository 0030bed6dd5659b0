"""The loss of preference pairs: how much more the model favours the better answer than it did before training.

Shapes: `P` pairs, `n` targets of a batch, `T` tokens, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.config.dpo import LossType
from anabatic.data.batch import IGNORE, Batch
from anabatic.device.device import Device
from anabatic.device.ops import linear_log_probs
from anabatic.device.transfer import send
from anabatic.models import adapter
from anabatic.models.forward import Packed, Root, cast_adapters, chunk_bytes_of, pack, target_states
from anabatic.parallel.shard import part_again
from anabatic.parallel.sharded import is_sharded, local, part_of

ALONE = ("orpo", "simpo")
"""Losses without a reference."""
NAMES = ("rewards/chosen", "rewards/rejected", "margin", "accuracy")
"""What is added up beside the loss."""


@dataclass(frozen=True)
class Objective:
    """Which loss of a pair; the names are those of TRL and LLaMA-Factory."""

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
        sides: int64 `[n]`, the answer that a target belongs to: `2 p` the better one of pair `p`, `2 p + 1` the other.
        lengths: fp32 `[P, 2]`, targets of each answer.
        before: fp32 `[P, 2]`, log-probabilities of the answers under the reference.
    """

    packed: Packed
    sides: Tensor
    lengths: Tensor
    before: Tensor | None = None


def pack_pairs(batch: Batch, device: torch.device) -> PackedPairs:
    """Move a batch of `data.pairs.flatten_pairs` to `device`."""
    rows = (batch.labels != IGNORE).nonzero().squeeze(1)
    sides = torch.searchsorted(torch.tensor(batch.cu_seqlens[1:]), rows, right=True)
    lengths = torch.bincount(sides, minlength=2 * batch.num_targets).view(-1, 2).float()
    return PackedPairs(pack(batch, device), send(sides, device), send(lengths, device))


class Reference:
    """The weights as they were before training, to be exchanged with the trained ones for a while.

    Only what is trained is kept twice, as divided as it is. An adapter that begins at zero thus gives the model without
    it, one that goes on gives the model that it came with, and both sides of the ratio are computed in the same way: it
    begins at exactly one.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        trained = [parameter for parameter in root.parameters() if parameter.requires_grad]
        self._pairs = [(parameter, local(parameter).detach().clone()) for parameter in trained]
        self._sharded = any(map(is_sharded, trained))
        # PiSSA's start is part of a checkpoint, so that every machine continues with the same one.
        begins = {
            id(own): start
            for layer in adapter.layers(root.model).values()
            for own, start in ((layer.lora_A, layer.lora_A_start), (layer.lora_B, layer.lora_B_start))
            if start is not None
        }
        self._begins = [(before, begins[id(own)], part_of(own)) for own, before in self._pairs if id(own) in begins]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block the model is the one before training, without dropout and without gradients."""
        was_training = self._root.training
        with torch.no_grad():
            for before, start, part in self._begins:
                before.copy_(start[part])
            self._exchange()
            self._root.eval()
            try:
                yield
            finally:
                if self._sharded:
                    part_again(self._root)
                self._root.train(was_training)
                self._exchange()

    def _exchange(self) -> None:
        for parameter, before in self._pairs:
            now = local(parameter)
            kept = now.clone()
            now.copy_(before)
            before.copy_(kept)


class PreferenceLoss:
    """The summed loss of a batch of pairs, as a step calls it: `loss(model, loss.pack(batch, device))`.

    Attributes:
        names: of `sums`, what every call adds up; whoever reads it sets it to zero.
        unit: what it is a mean of.
        reference: None where the loss needs none.
    """

    names: Sequence[str] = NAMES
    unit = "pairs"

    def __init__(self, root: Root, device: Device, objective: Objective) -> None:
        self.root, self.device, self.objective = root, device, objective
        self.reference = None if objective.loss_type in ALONE else Reference(root)
        self.sums = torch.zeros(len(self.names), device=device.torch)

    def pack(self, batch: Batch, device: torch.device) -> PackedPairs:
        """Move a batch to `device`, and ask the reference. Outside of `root`: sharded weights are gathered twice."""
        pairs = pack_pairs(batch, device)
        if self.reference is not None:
            with self.reference(), self.device.autocast():
                pairs.before = self.root(self.log_probs, pairs)
        return pairs

    def __call__(self, model: PreTrainedModel, pairs: PackedPairs) -> Tensor:
        """Return the summed loss of the pairs, fp32."""
        now = self.log_probs(model, pairs)
        before = torch.zeros_like(now) if pairs.before is None else pairs.before
        with torch.no_grad():
            self.sums += rewards(now, before, pairs.lengths, self.objective).sum(0)
        return pair_losses(now, before, pairs.lengths, self.objective).sum()

    def log_probs(self, model: PreTrainedModel, pairs: PackedPairs) -> Tensor:
        """Return the summed log-probability of every answer, fp32 `[P, 2]`."""
        cast_adapters(model)
        states, weight, head = target_states(model, pairs.packed)
        rows = chunk_bytes_of(weight, self.device.row.chunk_bytes)
        found = linear_log_probs(states, weight, pairs.packed.targets, rows, head.softcap)
        return found.new_zeros(pairs.lengths.numel()).index_add(0, pairs.sides, found).view(pairs.lengths.shape)


def log_ratios(now: Tensor, before: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """Return `log pi(y|x) - log pi_ref(y|x)` of both answers `[P, 2]`; for IPO the mean over their tokens, and for ORPO
    and SimPO the mean of `log pi(y|x)` alone.

    The mean is what TRL and LLaMA-Factory take for IPO; equation 17 of arXiv 2310.12036 has the sum.
    """
    if objective.loss_type in ALONE:
        return now / lengths
    ratios = now - before
    return ratios / lengths if objective.loss_type == "ipo" else ratios


def pair_losses(now: Tensor, before: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """Return the loss of every pair `[P]`, see `FORMULAS`. `rpo_alpha` adds that many times the better answer's
    cross-entropy per token (arXiv 2404.19733, equation 1).

    Args:
        now, before: log-probabilities of the answers under the model and under the reference `[P, 2]`; ORPO and SimPO
            do not read the latter.
        lengths: their targets `[P, 2]`.
    """
    losses = FORMULAS[objective.loss_type](log_ratios(now, before, lengths, objective), objective)
    if objective.rpo_alpha:
        losses = losses - objective.rpo_alpha * now[:, 0] / lengths[:, 0]
    return losses


def sigmoid(ratios: Tensor, objective: Objective) -> Tensor:
    """DPO: `-log sigmoid(beta h)`, `h` the difference of the log-ratios (arXiv 2305.18290, equation 7); with label
    smoothing `e`, `-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)` (https://ericmitchell.ai/cdpo.pdf)."""
    gap, smooth = objective.beta * _gap(ratios), objective.label_smoothing
    return -(1 - smooth) * F.logsigmoid(gap) - smooth * F.logsigmoid(-gap)


def hinge(ratios: Tensor, objective: Objective) -> Tensor:
    """SLiC: `max(0, 1 - beta h)` (arXiv 2305.10425, equation 1, on the log-ratios as in arXiv 2309.06657)."""
    return (1 - objective.beta * _gap(ratios)).clamp(min=0)


def ipo(ratios: Tensor, objective: Objective) -> Tensor:
    """IPO: `(h - 1 / (2 beta))^2` (arXiv 2310.12036, equation 17)."""
    return (_gap(ratios) - 1 / (2 * objective.beta)).square()


def simpo(means: Tensor, objective: Objective) -> Tensor:
    """SimPO: `-log sigmoid(beta (m_w - m_l) - gamma)`, `m` the mean log-probability of an answer's tokens (arXiv
    2405.14734, equation 6)."""
    return -F.logsigmoid(objective.beta * _gap(means) - objective.simpo_gamma)


def orpo(means: Tensor, objective: Objective) -> Tensor:
    """ORPO: `-m_w - beta log sigmoid(log odds_w - log odds_l)` with `odds = p / (1 - p)` of `p = e^m` (arXiv
    2403.07691, equations 3, 6 and 7; `beta` is its lambda)."""
    means = means.clamp(max=-torch.finfo(means.dtype).tiny)  # an answer that is certain has no odds
    odds = means - (-torch.expm1(means)).log()
    return -means[:, 0] - objective.beta * F.logsigmoid(_gap(odds))


def _gap(ratios: Tensor) -> Tensor:
    return ratios[:, 0] - ratios[:, 1]


FORMULAS: dict[str, Callable[[Tensor, Objective], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
}
"""Name of a loss -> the loss of every pair `[P]` from what `log_ratios` returns `[P, 2]`."""


def rewards(now: Tensor, before: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """Return for every pair the rewards `beta log-ratio` of both answers, their difference, and whether it is above 0.

    Shape `[P, 4]`, in the order of `NAMES`.
    """
    both = objective.beta * log_ratios(now, before, lengths, objective)
    margin = _gap(both)
    return torch.stack((both[:, 0], both[:, 1], margin, (margin > 0).to(both.dtype)), dim=1)
