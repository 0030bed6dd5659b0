"""Held-out loss (nats per target, perplexity, bits per byte, accuracy) over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from anabatic.core.heartbeat import HEARTBEAT
from anabatic.data.batching.packing import Batch
from anabatic.data.batching.validation_batches import ValidationBatches
from anabatic.device.device import Device
from anabatic.models.classifier import ClassLoss
from anabatic.models.classifier import compute_class_logits as class_logits
from anabatic.models.forward import ModelRoot, PackedBatch, pack_batch, score_targets
from anabatic.models.preference_loss import PreferenceLoss
from anabatic.models.reward_head import RewardLoss
from anabatic.parallel.collectives import all_reduce_sum
from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharding import reshard_weights
from anabatic.parallel.world import World
from anabatic.train import pipeline_step


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
