"""Held-out loss: nats per target and bits per byte, over all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from anabatic.data.loader import ValidPass
from anabatic.device.device import Device
from anabatic.models.forward import Root, pack, token_losses
from anabatic.parallel.shard import part_again
from anabatic.parallel.world import World, all_sum


@torch.no_grad()
def validate(root: Root, batches: ValidPass, device: Device, world: World) -> dict[str, Any]:
    """Return `valid_loss` (nats per target), `valid_bpb` (bits per UTF-8 byte) and `tokens` (targets)."""
    was_training = root.training
    root.eval()
    totals = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device.torch)
    for batch in batches:
        with device.autocast():
            losses = root(token_losses, pack(batch, device.torch), device.row.chunk_bytes)
        totals[0] += losses.sum(dtype=totals.dtype)
        totals[1] += batch.num_targets
    nats, targets = all_sum(totals, world).tolist()
    part_again(root)
    root.train(was_training)
    return {
        "valid_loss": nats / max(targets, 1),
        "valid_bpb": nats / math.log(2) / batches.num_bytes if batches.num_bytes else None,
        "tokens": int(targets),
    }
