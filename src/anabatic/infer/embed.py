"""Texts as vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from anabatic.data.batch import Batch
from anabatic.models import forward, lora_many

_TOKENS = 2048
"""Tokens of a forward pass; a longer text is read alone."""


def embed(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Iterator[list[list[float]]]:
    """Yield the mean of the last hidden states of each row of tokens, of length 1, fp32 `[n, H]`; n rows of a forward
    pass at a time, so that others can use the model in between.

    Raises:
        DataError: the model mixes tokens in its own way.
    """
    for some in _packs(rows):
        yield _means(model, _batch(some))


@torch.inference_mode()
def _means(model: PreTrainedModel, batch: Batch) -> list[list[float]]:
    lora_many.use(model, [])
    states = forward.hidden_states(model, forward.pack(batch, model.device)).float()
    borders = batch.cu_seqlens
    means = [states[start:end].mean(0) for start, end in zip(borders, borders[1:], strict=False)]
    normal: list[list[float]] = torch.nn.functional.normalize(torch.stack(means), dim=-1).tolist()
    return normal


def _packs(rows: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    pack: list[Sequence[int]] = []
    for row in rows:
        if pack and sum(map(len, pack)) + len(row) > _TOKENS:
            yield pack
            pack = []
        pack.append(row)
    yield pack


def _batch(rows: Sequence[Sequence[int]]) -> Batch:
    borders = [0]
    for row in rows:
        borders.append(borders[-1] + len(row))
    ids = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return Batch(ids, ids, positions, borders, borders[-1], borders[-1])
