"""How hard every conversation is for the model as it is now: its mean loss per learned token.

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
from anabatic.data.pack import best_fit, flatten
from anabatic.data.shard_set import Entry, ShardSet
from anabatic.device.device import Device
from anabatic.evals.progress import Bar
from anabatic.models.forward import Root, pack, token_scores
from anabatic.parallel.shard import part_again
from anabatic.parallel.world import World, all_sum, barrier

FILE = "difficulty.npy"


def losses(
    root: Root, parts: Sequence[ShardSet], seq_len: int, micro_batch_tokens: int, device: Device, world: World,
    folder: Path, continues: bool,
) -> list[np.ndarray]:  # fmt: skip
    """Return the mean loss of every entry of every set, fp32; of a run that `continues` what its folder holds.

    Raises:
        DataError: what is known belongs to other rows.
        Failure: the run folder cannot be written.
    """
    sizes = [part.num_docs for part in parts]
    file = folder / FILE
    known = continues and file.is_file()
    if continues and not known:
        log.warn(f"{file} is gone: the rows are measured again, and may be drawn otherwise than before")
    barrier(world)  # nobody writes before all have looked
    if not known:
        measured = _measure(root, parts, seq_len, micro_batch_tokens, device, world)
        if world.first:
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
def _measure(
    root: Root, parts: Sequence[ShardSet], seq_len: int, micro_batch_tokens: int, device: Device, world: World
) -> np.ndarray:
    """Each rank reads every so-many-th batch; all receive all."""
    entries: list[tuple[ShardSet, Entry]] = []
    for part in parts:
        entries += [(part, part.entry(number)) for number in range(part.num_docs)]
    groups = list(best_fit([min(entry.length, seq_len) for _, entry in entries], micro_batch_tokens))
    result = torch.zeros(len(entries), dtype=torch.float32, device=device.torch)
    was_training = root.training
    root.eval()
    data = world.data
    rounds = -(-len(groups) // data.size)
    with Bar("measuring how hard the rows are", rounds) as bar:
        for number in range(rounds):
            at = number * data.size + data.rank
            chosen = groups[at] if at < len(groups) else groups[0]  # sharded weights are gathered by all or none
            pieces = [entries[i][0].piece(entries[i][1], 0, min(entries[i][1].length, seq_len)) for i in chosen]
            batch = flatten(pieces, micro_batch_tokens, entries[0][0].eot, seq_len)
            targets = torch.tensor([_targets(piece.mask, piece.length) for piece in pieces])
            with device.autocast():
                each, _ = root(token_scores, pack(batch, device.torch), device.row.chunk_bytes)
            owner = torch.repeat_interleave(torch.arange(len(pieces)), targets).to(each.device)
            sums = each.new_zeros(len(pieces)).index_add(0, owner, each)
            if at < len(groups):
                result[torch.tensor(chosen, device=result.device)] = sums / targets.clamp(min=1).to(sums.device)
            bar.to(number + 1)
    part_again(root)
    root.train(was_training)
    found = all_sum(result, data).cpu().numpy()
    log.info(f"difficulty: mean loss of a row {found.min():.3f} to {found.max():.3f}, median {np.median(found):.3f}")
    return found


def _targets(mask: np.ndarray | None, length: int) -> int:
    return length if mask is None else int(np.count_nonzero(mask[1:]))
