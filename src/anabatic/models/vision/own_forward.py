"""The forward pass of models that are not packed: transformers' own, one row at a time."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.data.batching.packing import Batch
from anabatic.device.device import send_to_device
from anabatic.models.forward import PackedBatch, pack_batch
from anabatic.models.vision.model_parts import find_part_prefixes, is_sight_trained
from anabatic.parallel.mesh import SINGLE_CONTEXT, ContextGroup

_KINDS_OF_TOKENS = ("token_type_ids", "mm_token_type_ids")
"""Arguments that say which tokens are pictures'; 0: text."""
_PROBED = "_anabatic_is_causal"


@dataclass(frozen=True)
class OwnRows:
    """Rows of a micro-batch of `T` tokens, each as the model's own forward pass takes it.

    Attributes:
        rows: inputs of each, on the device, and how many of its tokens are the batch's; a row with pictures has the
            token behind them too.
        total: `T`; what is behind the rows is padding.
        sight: names of the trained parameters in front of the decoder, which without pictures get a gradient of zero,
            so that ranks agree on what has one.
    """

    rows: list[tuple[dict[str, Tensor], int]]
    total: int
    sight: tuple[str, ...] = ()

    def compute_states(self, model: PreTrainedModel) -> Tensor:
        """Return the last hidden states `[T, H]`.

        Raises:
            DataError: a text's tokens see those behind them.
        """
        _require_causal(model)
        states = [_run_row(model, inputs)[:length] for inputs, length in self.rows]
        missing = self.total - sum(map(len, states))
        found = torch.cat([*states, states[0].new_zeros(missing, states[0].shape[1])])
        if not self.sight:
            return found
        trained = [model.get_parameter(name).sum() for name in self.sight]
        return found + torch.stack(trained).sum().to(found.dtype) * 0.0


def _run_row(model: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the last hidden states `[n, H]` of a row of `n` tokens."""
    body: Any = model.base_model
    if hasattr(body, "rope_deltas"):  # of the row before (Qwen2-VL): positions would go on from there
        body.rope_deltas = None
    states: Tensor = body(**inputs, use_cache=False).last_hidden_state
    return states[0]


@torch.no_grad()
def _require_causal(model: PreTrainedModel) -> None:
    """Refuse a model whose text looks ahead: it would learn to copy. PaliGemma's question does (arXiv 2407.07726)."""
    if model.__dict__.get(_PROBED):
        return
    was_training = model.training
    model.eval()
    try:
        packing = make_own_packing(model)
        texts = [torch.full((4,), 1, device=model.device), torch.tensor([1, 1, 1, 2], device=model.device)]
        one, other = (_run_row(model, packing.make_text_inputs(text)) for text in texts)
    finally:
        model.train(was_training)
    if not torch.allclose(one[:3], other[:3], rtol=1e-3, atol=1e-4):
        raise DataError(
            f"{type(model).__name__}: tokens of a text see those behind them, so that answers cannot be learned as in"
            " other models",
            "use another model",
        )
    model.__dict__[_PROBED] = True


@dataclass(frozen=True)
class OwnPacking:
    """Moves batches of a model that is not packed to the device; a `pack_batch`.

    Attributes:
        names: of the arguments of its forward pass.
        sight: names of trained parameters in front of the decoder.
    """

    names: frozenset[str]
    sight: tuple[str, ...]

    def __call__(
        self, batch: Batch, device: torch.device, causal: bool = True, context: ContextGroup = SINGLE_CONTEXT
    ) -> PackedBatch:
        """Return the batch on the device; arguments as of `pack_batch`."""
        rows = []
        for number, (start, stop) in enumerate(pairwise(batch.cu_seqlens)):
            if start >= batch.num_tokens:
                break
            shown = batch.row_inputs[number] if batch.row_inputs else {}
            inputs = {name: value for name, value in shown.items() if name in self.names}
            inputs = inputs or self.make_text_inputs(batch.input_ids[start:stop])
            rows.append(({name: send_to_device(value, device) for name, value in inputs.items()}, stop - start))
        sight = () if any(batch.row_inputs) else self.sight
        own = OwnRows(rows, batch.input_ids.numel(), sight)
        return replace(pack_batch(batch, device, causal, context), own_rows=own)

    def make_text_inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the inputs of a row of text alone, `[n]`."""
        row = ids[None]
        kinds = {name: torch.zeros_like(row) for name in _KINDS_OF_TOKENS if name in self.names}
        return {"input_ids": row, "attention_mask": torch.ones_like(row), **kinds}


def make_own_packing(model: PreTrainedModel) -> OwnPacking:
    """Return what moves batches of a model to its device."""
    names = {name for one in (model, model.base_model) for name in inspect.signature(one.forward).parameters}
    parts = find_part_prefixes(model)
    sight = tuple(
        name
        for name, one in model.named_parameters()
        if one.requires_grad and is_sight_trained(model) and not name.startswith(parts["language"])
    )
    return OwnPacking(frozenset(names), sight)
