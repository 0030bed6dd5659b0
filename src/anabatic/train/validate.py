"""Held-out loss: nats per target, perplexity, bits per byte, and the share of tokens foretold, over all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from anabatic.core.heart import HEART
from anabatic.data.loader import ValidPass
from anabatic.device.device import Device
from anabatic.models.forward import Root, pack, token_scores
from anabatic.models.preference import NAMES, PreferenceLoss
from anabatic.parallel.shard import part_again
from anabatic.parallel.world import Group, all_sum


@torch.no_grad()
def validate(root: Root, batches: ValidPass, device: Device, world: Group) -> dict[str, Any]:
    """Return `valid_loss` (nats per target), `valid_perplexity` (its exponential), `valid_accuracy` (share of the
    targets that are the likeliest token), `valid_bpb` (bits per UTF-8 byte) and `tokens` (targets)."""
    was_training = root.training
    root.eval()
    totals = torch.zeros(3, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device.torch)
    for batch in batches:
        HEART.beat()
        with device.autocast():
            losses, hits = root(token_scores, pack(batch, device.torch), device.row.chunk_bytes)
        totals[0] += losses.sum(dtype=totals.dtype)
        totals[1] += hits.sum()
        totals[2] += batch.num_targets
    nats, hit, targets = all_sum(totals, world).tolist()
    part_again(root)
    root.train(was_training)
    loss = nats / max(targets, 1)
    return {
        "valid_loss": loss,
        "valid_perplexity": perplexity(loss),
        "valid_accuracy": hit / max(targets, 1),
        "valid_bpb": nats / math.log(2) / batches.num_bytes if batches.num_bytes else None,
        "tokens": int(targets),
    }


@torch.no_grad()
def validate_pairs(loss: PreferenceLoss, batches: ValidPass, world: Group) -> dict[str, Any]:
    """Return `valid_loss` (mean over the pairs), what `NAMES` says likewise, `pairs`, and `tokens` of their answers."""
    root, device = loss.root, loss.device
    was_training = root.training
    root.eval()
    loss.sums.zero_()
    totals = torch.zeros(3, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device.torch)
    for batch in batches:
        HEART.beat()
        pairs = loss.pack(batch, device.torch)
        with device.autocast():
            totals[0] += root(loss, pairs)
        part_again(root)
        totals[1] += batch.num_targets
        totals[2] += pairs.lengths.sum()
    found, count, tokens, *sums = all_sum(torch.cat((totals, loss.sums.to(totals.dtype))), world).tolist()
    loss.sums.zero_()
    root.train(was_training)
    means = {f"valid_{name}": value / max(count, 1) for name, value in zip(NAMES, sums, strict=True)}
    return {"valid_loss": found / max(count, 1), **means, "pairs": int(count), "tokens": int(tokens)}


def perplexity(loss: float) -> float:
    """Return the exponential of a loss in nats per token; infinite beyond what a float holds."""
    return math.exp(loss) if loss < 700.0 else math.inf
