"""What a training learns: how pieces of data are laid into a batch, the loss of it, and what held-out data are
measured by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anabatic.data.batching.packing import Batch, CollateFn, collate_packed
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.chat.preference_pairs import collate_preference_pairs, collate_unpaired_answers, max_pair_inputs
from anabatic.data.sequence.dataset import collate_classification, collate_word_targets
from anabatic.device.device import Device
from anabatic.models.classifier import ClassLoss
from anabatic.models.forward import ModelRoot, choose_packing, compute_summed_loss, pack_batch
from anabatic.models.preference_loss import KtoLoss, PreferenceLoss, PreferenceOptions
from anabatic.models.reward_head import RewardLoss, RewardOptions
from anabatic.parallel.world import World
from anabatic.train.validation import evaluate_loss, evaluate_pairs, predict_class_probabilities

if TYPE_CHECKING:
    from anabatic.data.vision.model_pictures import ModelPictures


@dataclass(frozen=True)
class Objective:
    """One way of training a model in the loop.

    Attributes:
        seq_len: longest piece that is not split.
        loss_fn: `loss(model, packed)` returns the summed loss of a batch, fp32.
        validate: returns the metrics of held-out batches, `valid_loss` among them; every rank calls it.
        collate: makes a batch of pieces.
        pack_batch: moves a batch to the device, as `loss_fn` takes it.
        metric_sums: what `loss_fn` adds up beside its result, on the device, one number for each of `metric_names`;
        None: nothing.
        has_lm_head: the model's head over the vocabulary is used.
    """

    seq_len: int
    loss_fn: Callable[..., Tensor]
    validate: Callable[[ValidationBatches], dict[str, Any]]
    collate: CollateFn = collate_packed
    pack_batch: Callable[[Batch, torch.device], Any] = pack_batch
    metric_sums: Tensor | None = None
    metric_names: Sequence[str] = ()
    has_lm_head: bool = True


def make_next_token_objective(root: ModelRoot, device: Device, world: World, seq_len: int) -> Objective:
    """Predict every target token from those before it."""
    loss = functools.partial(compute_summed_loss, chunk_bytes=device.device_row.chunk_bytes)
    pack = functools.partial(choose_packing(root.model), context=world.context_group)
    return Objective(seq_len, loss, lambda batches: evaluate_loss(root, batches, device, world, pack), pack_batch=pack)


def see_pictures(objective: Objective, pictures: ModelPictures) -> Objective:
    """Return an objective whose batches have the pictures of their rows."""
    from anabatic.data.vision.model_pictures import make_collate

    return replace(objective, collate=make_collate(pictures, objective.collate))


def make_preference_objective(
    root: ModelRoot, device: Device, world: World, seq_len: int, objective: PreferenceOptions
) -> Objective:
    """Favour the better answer more than the model does now."""
    single = objective.loss_type == "kto"
    loss = (KtoLoss if single else PreferenceLoss)(root, device, objective, world.context_group)
    lay = collate_unpaired_answers if single else collate_preference_pairs
    return Objective(
        max_pair_inputs(seq_len),
        loss,
        lambda batches: evaluate_pairs(loss, batches, world),
        lay,
        loss.pack_batch,
        loss.metric_sums,
        loss.metric_names,
    )


def make_reward_objective(
    root: ModelRoot, device: Device, world: World, seq_len: int, objective: RewardOptions
) -> Objective:
    """Say how good a conversation is: the better one of a pair gets more."""
    loss = RewardLoss(root, device, objective, world.context_group)
    return Objective(
        max_pair_inputs(seq_len),
        loss,
        lambda batches: evaluate_pairs(loss, batches, world),
        collate_preference_pairs,
        loss.pack_batch,
        loss.metric_sums,
        loss.metric_names,
        has_lm_head=False,
    )


def make_word_objective(root: ModelRoot, device: Device, world: World, seq_len: int, causal: bool) -> Objective:
    """Predict the words of sequences that were drawn as targets, from both sides or from what comes before them."""
    way = functools.partial(pack_batch, causal=causal)
    loss = functools.partial(compute_summed_loss, chunk_bytes=device.device_row.chunk_bytes)
    return Objective(
        seq_len,
        loss,
        lambda batches: evaluate_loss(root, batches, device, world, way),
        collate_word_targets,
        way,
    )


def make_class_objective(
    root: ModelRoot,
    device: Device,
    world: World,
    seq_len: int,
    loss: ClassLoss,
    sequences: int,
    score: Callable[[np.ndarray], dict[str, Any]],
) -> Objective:
    """Say what a sequence is.

    Args:
        sequences: how many are held out.
        score: metrics of the probabilities of the held-out sequences, fp64 `[sequences, C]`; nan: not asked.
    """

    def measure_classes(batches: ValidationBatches) -> dict[str, Any]:
        mean_loss, probabilities = predict_class_probabilities(root, loss, batches, sequences, device, world.data_group)
        return {"valid_loss": mean_loss, **score(probabilities)}

    return Objective(
        seq_len,
        loss,
        measure_classes,
        collate_classification,
        loss.pack_batch,
        loss.metric_sums,
        loss.metric_names,
        has_lm_head=False,
    )
