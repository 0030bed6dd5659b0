"""What a training learns: how pieces of data are laid into a batch, the loss of it, and what held-out data are
measured by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anabatic.data.batch import Batch
from anabatic.data.loader import ValidPass
from anabatic.data.pack import Lay, flatten
from anabatic.data.pairs import flatten_answers, flatten_pairs, longest
from anabatic.data.sequences import flatten_classes, flatten_words
from anabatic.device.device import Device
from anabatic.models.classifier import ClassLoss
from anabatic.models.forward import Root, pack, summed_loss
from anabatic.models.kto import KtoLoss
from anabatic.models.preference import Objective, PreferenceLoss
from anabatic.models.reward import RewardLoss, RewardObjective
from anabatic.parallel.world import World
from anabatic.train.validate import class_probabilities, validate, validate_pairs


@dataclass(frozen=True)
class Goal:
    """One way of training a model in the loop.

    Attributes:
        seq_len: longest piece that is not split.
        loss: `loss(model, packed)` returns the summed loss of a batch, fp32.
        validate: returns the metrics of held-out batches, `valid_loss` among them; every rank calls it.
        lay: makes a batch of pieces.
        pack: moves a batch to the device, as `loss` takes it.
        sums: what `loss` adds up beside its result, on the device, one number for each of `names`; None: nothing.
        logits: the model's head over the vocabulary is used.
    """

    seq_len: int
    loss: Callable[..., Tensor]
    validate: Callable[[ValidPass], dict[str, Any]]
    lay: Lay = flatten
    pack: Callable[[Batch, torch.device], Any] = pack
    sums: Tensor | None = None
    names: Sequence[str] = ()
    logits: bool = True


def next_token(root: Root, device: Device, world: World, seq_len: int) -> Goal:
    """Foretell every learned token from those before it."""
    loss = functools.partial(summed_loss, chunk_bytes=device.row.chunk_bytes)
    return Goal(seq_len, loss, lambda batches: validate(root, batches, device, world.data))


def preference(root: Root, device: Device, world: World, seq_len: int, objective: Objective) -> Goal:
    """Favour the better answer more than the model does now."""
    single = objective.loss_type == "kto"
    loss = (KtoLoss if single else PreferenceLoss)(root, device, objective)
    lay = flatten_answers if single else flatten_pairs
    return Goal(
        longest(seq_len), loss, lambda batches: validate_pairs(loss, batches, world.data), lay, loss.pack,
        loss.sums, loss.names,
    )  # fmt: skip


def rewards(root: Root, device: Device, world: World, seq_len: int, objective: RewardObjective) -> Goal:
    """Say how good a conversation is: the better one of a pair gets more."""
    loss = RewardLoss(root, device, objective)
    return Goal(
        longest(seq_len), loss, lambda batches: validate_pairs(loss, batches, world.data), flatten_pairs, loss.pack,
        loss.sums, loss.names, logits=False,
    )  # fmt: skip


def words(root: Root, device: Device, world: World, seq_len: int, causal: bool) -> Goal:
    """Foretell the words of sequences that were drawn as targets, from both sides or from what comes before them."""
    way = functools.partial(pack, causal=causal)
    loss = functools.partial(summed_loss, chunk_bytes=device.row.chunk_bytes)
    return Goal(seq_len, loss, lambda batches: validate(root, batches, device, world.data, way), flatten_words, way)


def classes(
    root: Root,
    device: Device,
    world: World,
    seq_len: int,
    loss: ClassLoss,
    sequences: int,
    score: Callable[[np.ndarray], dict[str, Any]],
) -> Goal:
    """Say what a sequence is.

    Args:
        sequences: how many are held out.
        score: metrics of the probabilities of the held-out sequences, fp64 `[sequences, C]`; nan: not asked.
    """

    def measure(batches: ValidPass) -> dict[str, Any]:
        mean_loss, probabilities = class_probabilities(root, loss, batches, sequences, device, world.data)
        return {"valid_loss": mean_loss, **score(probabilities)}

    return Goal(seq_len, loss, measure, flatten_classes, loss.pack, loss.sums, loss.names, logits=False)
