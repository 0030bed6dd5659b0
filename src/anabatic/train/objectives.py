"""What a training learns: how pieces of data are laid into a batch, the loss of it, and what held-out data are
measured by.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.batching.packing import Batch, CollateFn, collate_packed
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.data.chat.preference_pairs import collate_preference_pairs, collate_unpaired_answers, max_pair_inputs
from anabatic.data.sequence.dataset import collate_classification, collate_word_targets
from anabatic.device.device import Device
from anabatic.models.classifier import ClassLoss
from anabatic.models.classifier import compute_class_logits as class_logits
from anabatic.models.forward import (
    ModelRoot,
    PackedBatch,
    choose_packing,
    compute_summed_loss,
    pack_batch,
    score_targets,
)
from anabatic.models.preference_loss import KtoLoss, PreferenceLoss, PreferenceOptions
from anabatic.models.reward_head import RewardLoss, RewardOptions
from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharding import reshard_weights
from anabatic.parallel.world import World
from anabatic.train import pipeline_step

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


@torch.no_grad()
def evaluate_loss(
    root: ModelRoot,
    batches: ValidationBatches,
    device: Device,
    world: World,
    pack: Callable[[Batch, torch.device], PackedBatch] = pack_batch,
) -> dict[str, Any]:
    """Return `valid_loss` (nats per target), `valid_perplexity` (its exponential), `valid_accuracy` (share of the
    targets that are the likeliest token), `valid_bpb` (bits per UTF-8 byte) and `tokens` (targets)."""
    was_training = root.training
    root.eval()
    totals = torch.zeros(3, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device.torch_device)
    link = pipeline_step.open_link(root.model, device, world) if world.pipeline_group.size > 1 else None
    for batch in batches:
        if HEARTBEAT.is_open:
            HEARTBEAT.record_beat()
        packed = pack(batch, device.torch_device)
        if link is not None:
            losses, hits = pipeline_step.score_batch(root, packed, device, link, world.pipeline_chunks)
        else:
            with device.autocast():
                losses, hits = root(score_targets, packed, device.device_row.chunk_bytes)
        totals[0] += losses.sum(dtype=totals.dtype)
        totals[1] += hits.sum()
        totals[2] += batch.num_targets * (world.context_group.rank == 0 and world.is_last_stage)
    if link is not None and world.tensor_group.rank:  # its neighbour has counted the same
        totals.zero_()
    group = world if link is not None else world.gradient_group  # the last stages know the losses
    nats, hit, targets = all_reduce_sum(totals, group).tolist()
    reshard_weights(root)
    root.train(was_training)
    loss = nats / max(targets, 1)
    return {
        "valid_loss": loss,
        "valid_perplexity": compute_perplexity(loss),
        "valid_accuracy": hit / max(targets, 1),
        "valid_bpb": nats / math.log(2) / batches.num_bytes if batches.num_bytes else None,
        "tokens": int(targets),
    }


@torch.no_grad()
def evaluate_pairs(loss: PreferenceLoss | RewardLoss, batches: ValidationBatches, world: World) -> dict[str, Any]:
    """Return `valid_loss` (mean over the pairs, or over single answers), what `loss.names` says likewise, `pairs` or
    `answers`, and `tokens` of their answers."""
    root, device = loss.root, loss.device
    was_training = root.training
    root.eval()
    loss.metric_sums.zero_()
    counts = world.context_group.rank == 0
    totals = torch.zeros(3, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device.torch_device)
    for batch in batches:
        HEARTBEAT.record_beat()
        pairs = loss.pack_batch(batch, device.torch_device)
        with device.autocast():
            totals[0] += root(loss, pairs)
        reshard_weights(root)
        totals[1] += batch.num_targets * counts
        totals[2] += pairs.lengths.sum() * counts
    totals = torch.cat((totals, loss.metric_sums.to(totals.dtype)))
    found, count, tokens, *sums = all_reduce_sum(totals, world.gradient_group).tolist()
    loss.metric_sums.zero_()
    root.train(was_training)
    means = {f"valid_{name}": value / max(count, 1) for name, value in zip(loss.metric_names, sums, strict=True)}
    return {"valid_loss": found / max(count, 1), **means, loss.unit: int(count), "tokens": int(tokens)}


@torch.no_grad()
def predict_class_probabilities(
    root: ModelRoot, loss: ClassLoss, batches: ValidationBatches, sequences: int, device: Device, world: RankGroup
) -> tuple[float, np.ndarray]:
    """Return the mean cross-entropy, unweighted, and the probabilities of each of `sequences`, fp64 `[sequences, C]`;
    nan: `batches` leave it out. The same on every rank."""
    was_training = root.training
    root.eval()
    classes = len(loss.description.classes)
    wide = torch.float64 if device.type == "cpu" else torch.float32
    found = torch.zeros(sequences + 1, classes + 2, dtype=wide, device=device.torch_device)
    for batch in batches:
        HEARTBEAT.record_beat()
        rows = loss.pack_batch(batch, device.torch_device)
        with device.autocast():
            logits = root(class_logits, rows).to(wide)
        losses = F.cross_entropy(logits, rows.labels, reduction="none")
        outputs = torch.cat((torch.softmax(logits, -1), losses[:, None], torch.ones_like(losses)[:, None]), dim=1)
        found.index_copy_(0, rows.sequence_ids, outputs)
    found = all_reduce_sum(found, world).cpu().double()
    reshard_weights(root)
    root.train(was_training)
    is_present = found[:sequences, -1:]
    probabilities = found[:sequences, :classes] / is_present  # 0 / 0: not asked
    return float(found[:, -2].sum() / is_present.sum()), probabilities.numpy()


def compute_perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token; infinite beyond what a float holds."""
    return math.exp(loss) if loss < 700.0 else math.inf
