"""The packed forward pass: one flat row of tokens, segments apart, logits only where they are needed.

Shapes: `T` tokens, `H` hidden size, `V` vocabulary, `B` conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.data.batch import IGNORE, Batch
from anabatic.device.ops import linear_cross_entropy, token_cross_entropy
from anabatic.device.segments import Segments
from anabatic.device.transfer import send
from anabatic.models import head, lora_many, rope_lengths
from anabatic.models.cache import Cache, Pass, Row
from anabatic.models.head import Head

NO_MASK = {"full_attention": None, "sliding_attention": None}
"""Tells transformers that masks are taken care of; it builds none."""
_LEAST_ROWS = 256
"""Rows of logits made at once, even where they are more bytes than asked for: every chunk reads the whole head three
times and writes its gradient once, which with fewer rows takes longer than multiplying (docs/dev/LOG.md)."""


@dataclass
class Packed:
    """A batch on the device, with all that depends on its shape made on the host.

    Attributes:
        input_ids, position_ids: `[1, T]`.
        targets: `[n]`, the labels that are learned.
        target_rows: `[n]`, which tokens they belong to; None when every token has one.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    targets: Tensor
    target_rows: Tensor | None


def pack(batch: Batch, device: torch.device, causal: bool = True) -> Packed:
    """Move a batch to `device`. The rows with labels are found on the host, where the labels still are.

    Args:
        causal: tokens see what comes before them; False: their whole segment.
    """
    rows = None
    targets = batch.labels
    if batch.num_targets != batch.labels.numel():
        rows = (batch.labels != IGNORE).nonzero().squeeze(1)
        targets = batch.labels[rows]
        rows = send(rows, device)
    return Packed(
        send(batch.input_ids.unsqueeze(0), device),
        send(batch.position_ids.unsqueeze(0), device),
        Segments(batch.cu_seqlens, device, causal),
        send(targets, device),
        rows,
    )


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """Return the last hidden states `[T, H]`.

    Raises:
        DataError: not every layer keeps segments apart by our attention.
    """
    _require_known(model)
    before = packed.segments.attended
    borders = packed.segments.cu_seqlens
    plan = [(end - start, end - start) for start, end in zip(borders, borders[1:], strict=False)]
    with rope_lengths.lengths(model, plan):
        out = model.base_model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            attention_mask=NO_MASK,
            use_cache=False,
            segments=packed.segments,
        )
    _require_apart(model, packed.segments.attended - before)
    states: Tensor = out.last_hidden_state.squeeze(0)
    return states


def _require_known(model: PreTrainedModel) -> None:
    if not model._supports_attention_backend:
        raise DataError(
            f"{type(model).__name__} mixes tokens in its own way, not by transformers' attention interface: rows of a"
            " batch would mix",
            "use a model of another family",
        )
    unknown = sorted({*(getattr(model.config, "layer_types", None) or ())} - NO_MASK.keys())
    if unknown:
        raise DataError(
            f"{type(model).__name__} has layers of the kind {', '.join(unknown)}, in which rows of a batch would mix",
            f"use a model whose layers are {' or '.join(NO_MASK)}",
        )


def _require_apart(model: PreTrainedModel, attended: int) -> None:
    layers = model.config.num_hidden_layers
    if attended != layers:
        raise DataError(
            f"{attended} of {layers} layers of {type(model).__name__} use packed attention; the others mix tokens in"
            " their own way, and rows of a batch with them",
            "use a model whose layers are all attention",
        )


def _head(model: PreTrainedModel) -> tuple[Tensor, Head]:
    """The output weight, and what else is done to logits, found when it is first asked for."""
    found = model.__dict__.get("_anabatic_head")
    if found is None:
        found = model.__dict__["_anabatic_head"] = head.find(model)
    weight: Tensor = model.get_output_embeddings().weight
    return weight, found


def chunk_bytes_of(weight: Tensor, wanted: int) -> int:
    """Return the bytes of logits made at once: what is wanted, or the least that is worth a pass over the head."""
    return max(wanted, _LEAST_ROWS * 4 * weight.shape[0])


def target_states(model: PreTrainedModel, packed: Packed) -> tuple[Tensor, Tensor, Head]:
    """Return states of the rows with targets, scaled as the model scales its logits; the output weight; the head."""
    states = hidden_states(model, packed)
    weight, found = _head(model)
    if packed.target_rows is not None:
        states = states.index_select(0, packed.target_rows)
    return states if found.scale == 1 else states * found.scale, weight, found


class Root(nn.Module):
    """Whatever runs a model runs inside this module's forward pass.

    There sharded weights are gathered (FSDP2), and there data parallelism learns which gradients to wait for.

    Attributes:
        parts: ranks that share attention heads and MLPs (`tensor.py`).
        partial: names of parameters that are whole on each of them, and whose gradients are parts.
    """

    def __init__(self, model: PreTrainedModel, parts: int = 1, partial: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.model = model
        self.parts, self.partial = parts, partial

    def forward(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(model, *args)`."""
        return call(self.model, *args)


def cast_adapters(model: PreTrainedModel) -> None:
    """Make the low-precision copies of grouped adapters that the next forward pass takes."""
    bank = model.__dict__.get("adapter_bank")
    if bank is not None:
        bank.cast()


def summed_loss(model: PreTrainedModel, packed: Packed, chunk_bytes: int) -> Tensor:
    """Return the summed cross-entropy of the batch's targets, fp32."""
    if torch.is_grad_enabled():
        cast_adapters(model)
    states, weight, found = target_states(model, packed)
    return linear_cross_entropy(states, weight, packed.targets, chunk_bytes_of(weight, chunk_bytes), found.softcap)


@torch.no_grad()
def token_scores(model: PreTrainedModel, packed: Packed, chunk_bytes: int) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of every target, fp32 `[n]`, and whether it is the likeliest token, bool `[n]`."""
    states, weight, found = target_states(model, packed)
    return token_cross_entropy(states, weight, packed.targets, chunk_bytes_of(weight, chunk_bytes), found.softcap)


@torch.no_grad()
def extend(model: PreTrainedModel, rows: Sequence[Row], cache: Cache) -> Tensor:
    """Read new tokens of many requests, packed without padding, into the cache.

    Returns:
        Logits after the last token of each row that wants them, fp32 `[n, V]`.

    Raises:
        DataError: the model mixes tokens in its own way.
    """
    _require_known(model)
    now = cache.now = Pass(rows, cache)
    lora_many.use(model, now.adapters)
    with rope_lengths.lengths(model, now.lengths):
        out = model.base_model(
            input_ids=now.input_ids,
            position_ids=now.position_ids,
            attention_mask=NO_MASK,
            use_cache=False,
            cache=cache,
        )
    _require_apart(model, now.attended)
    return _logits(model, out.last_hidden_state.squeeze(0).index_select(0, now.last))


def _logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    weight, found = _head(model)
    return found.logits(states.to(weight.dtype), weight).float()
