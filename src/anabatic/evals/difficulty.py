"""Difficulty of every conversation for the current model: its mean loss per target token.

Measured once, before the training, and kept in the run folder: a run that continues, whatever the model has learned by
then and wherever it runs, parts the rows as it did.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.core.paths import write_atomic
from anabatic.core.progress import ProgressBar
from anabatic.data.batching.packing import collate_packed, pack_best_fit
from anabatic.data.shards.reader import EntryLocation, ShardSet
from anabatic.device.device import Device
from anabatic.models.context_parallel import find_target_rows
from anabatic.models.forward import ModelRoot, pack_batch, score_targets
from anabatic.parallel.collectives import all_reduce_sum, barrier
from anabatic.parallel.sharding import reshard_weights
from anabatic.parallel.world import World

DIFFICULTY_FILE = "difficulty.npy"


def load_or_measure_losses(
    root: ModelRoot,
    parts: Sequence[ShardSet],
    seq_len: int,
    micro_batch_tokens: int,
    device: Device,
    world: World,
    folder: Path,
    continues: bool,
) -> list[np.ndarray]:
    """Return the mean loss of every entry of every set, fp32; of a run that `continues` what its folder holds.

    Raises:
        DataError: what is known belongs to other rows.
        Failure: the run folder cannot be written.
    """
    sizes = [part.num_docs for part in parts]
    file = folder / DIFFICULTY_FILE
    known = continues and file.is_file()
    if continues and not known:
        log.warn(f"{file} is gone: the rows are measured again, and may be drawn otherwise than before")
    barrier(world)  # nobody writes before all have looked
    if not known:
        measured = _measure_losses(root, parts, seq_len, micro_batch_tokens, device, world)
        if world.is_main_process:
            content = io.BytesIO()
            np.save(content, measured)
            write_atomic(file, content.getvalue())
        barrier(world)
    found: np.ndarray = np.load(file, allow_pickle=False)
    if found.shape != (sum(sizes),):
        raise DataError(
            f"{file} knows the difficulty of {found.size:,} rows, the data has {sum(sizes):,}",
            "start over with --save.resume never and another --out, or put the data back",
        )
    return np.split(found, np.cumsum(sizes)[:-1])


@torch.no_grad()
def _measure_losses(
    root: ModelRoot, parts: Sequence[ShardSet], seq_len: int, micro_batch_tokens: int, device: Device, world: World
) -> np.ndarray:
    """Each rank reads every so-many-th batch; all receive all."""
    entries: list[tuple[ShardSet, EntryLocation]] = []
    for part in parts:
        entries += [(part, part.locate_entry(number)) for number in range(part.num_docs)]
    groups = list(pack_best_fit([min(entry.num_inputs, seq_len) for _, entry in entries], micro_batch_tokens))
    result = torch.zeros(len(entries), dtype=torch.float32, device=device.torch_device)
    was_training = root.training
    root.eval()
    data = world.data_group
    rounds = -(-len(groups) // data.size)
    with ProgressBar("measuring how hard the rows are", rounds) as bar:
        for number in range(rounds):
            at = number * data.size + data.rank
            chosen = groups[at] if at < len(groups) else groups[0]  # sharded weights are gathered by all or none
            pieces = [
                entries[i][0].read_segment(entries[i][1], 0, min(entries[i][1].num_inputs, seq_len)) for i in chosen
            ]
            batch = collate_packed(pieces, micro_batch_tokens, entries[0][0].eot, seq_len)
            targets = torch.tensor([_count_targets(piece.loss_mask, piece.num_inputs) for piece in pieces])
            with device.autocast():
                packed = pack_batch(batch, device.torch_device, context=world.context_group)
                each, _ = root(score_targets, packed, device.device_row.chunk_bytes)
            ends = torch.tensor(batch.cu_seqlens[1:])
            owner = torch.searchsorted(ends, find_target_rows(batch, world.context_group), right=True).to(each.device)
            sums = each.new_zeros(len(pieces)).index_add(0, owner, each)
            if at < len(groups):
                result[torch.tensor(chosen, device=result.device)] = sums / targets.clamp(min=1).to(sums.device)
            bar.update(number + 1)
    reshard_weights(root)
    root.train(was_training)
    found = all_reduce_sum(result, world.gradient_group).cpu().numpy()
    log.info(f"difficulty: mean loss of a row {found.min():.3f} to {found.max():.3f}, median {np.median(found):.3f}")
    return found


def _count_targets(mask: np.ndarray | None, length: int) -> int:
    return length if mask is None else int(np.count_nonzero(mask[1:]))
