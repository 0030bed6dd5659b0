"""Texts as vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from anabatic.data.batching.packing import Batch
from anabatic.models import forward
from anabatic.models.lora import multi_adapter

_MAX_PASS_TOKENS = 2048
"""Tokens of a forward pass; a longer text is read alone."""


def embed_rows(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Iterator[list[list[float]]]:
    """Yield the mean of the last hidden states of each row of tokens, of length 1, fp32 `[n, H]`; n rows of a forward
    pass at a time, so that others can use the model in between.

    Raises:
        DataError: the model mixes tokens in its own way.
    """
    for some in _group_rows(rows):
        yield _mean_hidden_states(model, _make_batch(some))


@torch.inference_mode()
def _mean_hidden_states(model: PreTrainedModel, batch: Batch) -> list[list[float]]:
    multi_adapter.select_adapters(model, [])
    states = forward.compute_hidden_states(model, forward.pack_batch(batch, model.device)).float()
    borders = batch.cu_seqlens
    means = [states[start:end].mean(0) for start, end in zip(borders, borders[1:], strict=False)]
    normal: list[list[float]] = torch.nn.functional.normalize(torch.stack(means), dim=-1).tolist()
    return normal


def _group_rows(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    pack: list[Sequence[int]] = []
    for row in rows:
        if pack and sum(map(len, pack)) + len(row) > _MAX_PASS_TOKENS:
            yield pack
            pack = []
        pack.append(row)
    yield pack


def _make_batch(rows: Sequence[Sequence[int]]) -> Batch:
    borders = [0]
    for row in rows:
        borders.append(borders[-1] + len(row))
    ids = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return Batch(ids, ids, positions, borders, borders[-1], borders[-1])
