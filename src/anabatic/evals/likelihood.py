"""Likelihood of the ends of many texts: packed forward passes, logits at the scored tokens alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.progress import ProgressBar
from anabatic.device.attention import PackedSegments, PackedTrees
from anabatic.device.device import Device, send_to_device
from anabatic.evals.prefix_trees import PrefixTree, ScoredText, batch_trees, build_trees
from anabatic.models import rope_scaling
from anabatic.models.forward import PackedBatch, score_targets
from anabatic.models.linear_attention import delta_net
from anabatic.parallel.mesh import SINGLE_RANK, RankGroup


class Likelihood(NamedTuple):
    """Of the scored tokens of a text.

    Attributes:
        logprob: sum of their log-probabilities, in nats.
        is_greedy: each is the likeliest token where it stands.
        num_tokens: how many they are.
    """

    logprob: float
    is_greedy: bool
    num_tokens: int


def compute_likelihoods(
    model: PreTrainedModel,
    device: Device,
    texts: Sequence[ScoredText],
    batch_tokens: int,
    what: str,
    share: bool = True,
    group: RankGroup = SINGLE_RANK,
) -> Iterator[dict[int, Likelihood]]:
    """Yield what was found, by number of the text, batch by batch.

    A batch is fetched from the device when the next one is under way already: the device does not wait for the host,
    and the host waits once a batch.

    Args:
        texts: none longer than the model's context and one.
        batch_tokens: tokens of a forward pass.
        what: name of the work, for the progress.
        share: read equal beginnings once.
        group: processes that each read their share of the batches of one process.
    """
    share = (
        share and rope_scaling.get_length_limit(model.config) is None
    )  # else a beginning depends on how long its text is
    share = share and not delta_net.has_delta_layers(model)  # their states would pass from one branch to the next
    made = list(
        batch_trees(build_trees(texts, model.config.get_text_config().hidden_size, batch_tokens, share), batch_tokens)
    )
    made = made[group.rank :: group.size]
    done = 0
    waiting: tuple[list[PrefixTree], Tensor] | None = None
    with ProgressBar(what, sum(len(tree.target_rows) for batch in made for tree in batch)) as bar:
        for batch in [*made, None]:
            started = None if batch is None else (batch, _start_batch(model, device, batch))
            if waiting is not None:
                found = _fetch_batch(*waiting)
                done += len(found)
                bar.update(done)
                yield found
            waiting = started


def _start_batch(model: PreTrainedModel, device: Device, batch: list[PrefixTree]) -> Tensor:
    """Return `[2, texts]` on the device: the summed log-probability, and tokens that are not the likeliest."""
    packed, index, owner = _pack_trees(batch, device.torch_device)
    with device.autocast():
        losses, hits = score_targets(model, packed, device.device_row.chunk_bytes)
    both = torch.stack((-losses.double() if device.type == "cpu" else -losses, (~hits).to(losses.dtype)))
    return both.new_zeros(2, sum(len(tree.target_rows) for tree in batch)).index_add(
        1, owner, both.index_select(1, index)
    )


def _fetch_batch(batch: list[PrefixTree], sums: Tensor) -> dict[int, Likelihood]:
    asked = [(number, len(places)) for tree in batch for number, places in tree.target_rows.items()]
    logprobs, missed = sums.tolist()
    return {
        number: Likelihood(logprob, miss == 0, tokens)
        for (number, tokens), logprob, miss in zip(asked, logprobs, missed, strict=True)
    }


def _pack_trees(batch: list[PrefixTree], device: torch.device) -> tuple[PackedBatch, Tensor, Tensor]:
    """Return the batch on the device, and of every scored token of every text: its place among the targets, and the
    number of its text in the batch."""
    borders, rows, index, owner = [0], [], [], []
    first_target = texts = 0
    for tree in batch:
        rows += [borders[-1] + row for row in tree.rows]
        for places in tree.target_rows.values():
            index += [first_target + place for place in places]
            owner += [texts] * len(places)
            texts += 1
        borders.append(borders[-1] + len(tree.ids))
        first_target += len(tree.targets)
    targets = [token for tree in batch for token in tree.targets]
    ids = [token for tree in batch for token in tree.ids]
    depths = np.array([depth for tree in batch for depth in tree.depths])
    parts = [ids, depths.tolist(), rows, targets, index, owner]
    flat = send_to_device(
        torch.tensor([number for part in parts for number in part]), device
    )  # one copy to the device, not six
    on_device = flat.split([len(part) for part in parts])
    if any(tree.has_branches for tree in batch):
        segments: PackedSegments = PackedTrees(
            borders, np.array([end for tree in batch for end in tree.ends]), depths, device
        )
    else:
        segments = PackedSegments(borders, device)
    packed = PackedBatch(on_device[0][None], on_device[1][None], segments, on_device[3], on_device[2])
    return packed, on_device[4], on_device[5]
