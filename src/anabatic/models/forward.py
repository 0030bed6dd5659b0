"""The packed forward pass: one flat row of tokens, separate segments, logits only where they are needed.

Shapes: `T` tokens, `H` hidden size, `V` vocabulary, `B` conversations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import DataError
from anabatic.data.batching.packing import IGNORE_INDEX, Batch
from anabatic.device.attention import PackedSegments
from anabatic.device.device import send_to_device
from anabatic.device.ops import get_block_ops, linear_cross_entropy, token_cross_entropy
from anabatic.models import rope_scaling
from anabatic.models.experts import routing
from anabatic.models.kv_cache import CacheRow, ForwardPlan, KVCache
from anabatic.models.linear_attention import delta_net, delta_states
from anabatic.models.lora import multi_adapter
from anabatic.models.lora.adapter import runs_own_forward
from anabatic.models.pipeline import stages as pipeline_stages
from anabatic.parallel.context_exchange import HeadExchange
from anabatic.parallel.context_ring import RingExchange
from anabatic.parallel.mesh import SINGLE_CONTEXT, ContextGroup
from anabatic.parallel.token_split import TokenSplit

if TYPE_CHECKING:
    from anabatic.models.vision.packed_pictures import PackedPictures

_HIDDEN, _VOCAB = 6, 10


class BodyRunner(Protocol):
    """Runs the body and the head of a model without its modules."""

    head: Any
    """Has `multiply`: `[n, H]` -> logits `[n, V]`."""

    def compute_states(self, plan: ForwardPlan, cache: KVCache) -> Tensor:
        """Return the last hidden states `[T, H]` of the new tokens, and write them to the cache."""
        ...


class OwnForward(Protocol):
    """Rows of a batch that go through the model's own forward pass."""

    def compute_states(self, model: PreTrainedModel) -> Tensor:
        """Return the last hidden states `[T, H]`."""
        ...


class LmHead(NamedTuple):
    """LM head with logits `cap(scale * hidden weight^T)`."""

    scale: float = 1.0
    softcap: float | None = None

    def compute_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """`[..., H]` and `[V, H]` -> `[..., V]`."""
        return self.finish_logits(hidden @ weight.t())

    def finish_logits(self, out: Tensor) -> Tensor:
        """Return the logits of `hidden weight^T`."""
        out = out if self.scale == 1 else self.scale * out
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap


class _BodyOutput:
    """What a body returns: its states; None for everything else, whose names differ between transformers' versions."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]


class _StubBody(nn.Module):
    """Replaces the body of a model and returns given hidden states."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states

    def forward(self, *_: Any, **__: Any) -> Any:
        return _BodyOutput(self.states)


@torch.no_grad()
def find_lm_head(model: Any) -> LmHead:
    """Return the head of a causal language model; its weights are not read, so they may be on `meta`.

    Raises:
        DataError: its logits are computed in another way.
    """
    with torch.autocast("cpu", enabled=False), torch.device("cpu"):
        head = _probe_lm_head(model)
    if head is None:
        raise DataError(
            f"{type(model).__name__} makes its logits in a way that the loss in chunks does not know",
            "use a model whose logits are its output matrix, a factor and a cap",
        )
    return head


def _probe_lm_head(model: Any) -> LmHead | None:
    generator = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(*shape, generator=generator) for shape in ((1, 4, _HIDDEN), (_VOCAB, _HIDDEN)))
    output = model.get_output_embeddings()
    probe = copy.copy(model)
    probe.__dict__["_modules"] = dict(model._modules)
    if output is None or getattr(output, "bias", None) is not None:
        raise DataError(f"the head of {type(model).__name__} is not one matrix without a bias", "use another model")
    for name, child in model._modules.items():
        if child is output:
            head = nn.Linear(_HIDDEN, _VOCAB, bias=False, device="meta")  # draws no random numbers
            head.weight = nn.Parameter(weight)
            probe._modules[name] = head
        elif name == model.base_model_prefix:
            probe._modules[name] = _StubBody(states)
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return _match_head(_run_probe(probe), states, weight, softcap)


def _run_probe(probe: Any) -> Tensor:
    out: Tensor = probe.forward(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits
    return out


def _match_head(logits: Tensor, states: Tensor, weight: Tensor, softcap: float | None) -> LmHead | None:
    unscaled = states @ weight.t()
    factor = float((logits / unscaled).median())
    for head in (LmHead(softcap=softcap), LmHead(scale=factor), LmHead(factor, softcap)):
        if torch.allclose(head.compute_logits(states, weight), logits, rtol=1e-4, atol=1e-5):
            return head
    return None


_PLAIN_KINDS = {"full_attention", "sliding_attention"}
"""Layers by transformers' attention interface."""
NO_MASK = {"full_attention": None, "sliding_attention": None, delta_states.LAYER_KIND: None}
"""Value of `attention_mask` that keeps transformers from building masks."""
_MIN_LOGIT_ROWS = 256
"""Fewest rows of a chunk of logits, even if they exceed the requested bytes: every chunk reads the full head three
times and writes its gradient once, which with fewer rows takes longer than the products (docs/dev)."""


@dataclass
class PackedBatch:
    """A batch on the device; everything that depends on its shape is computed on the host.

    Attributes:
        input_ids, position_ids: `[1, T]`.
        targets: `[n]`, the labels of the target tokens.
        target_rows: `[n]`, their rows; None when every token has a target.
        pictures: what the tower reads; with tokens of pictures, positions are `[4, 1, T]`. None: it is not run.
        own_rows: the rows of a model that is not packed; None: it is.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: PackedSegments
    targets: Tensor
    target_rows: Tensor | None
    pictures: PackedPictures | None = None
    own_rows: OwnForward | None = None


def pack_batch(
    batch: Batch, device: torch.device, causal: bool = True, context: ContextGroup = SINGLE_CONTEXT
) -> PackedBatch:
    """Move a batch to `device`. The rows with labels are computed on the host, which still has the labels.

    Args:
        causal: tokens attend to earlier tokens; False: to their whole segment.
        context: ranks that share the batch; each moves only its tokens.
    """
    segments = PackedSegments(batch.cu_seqlens, device, causal)
    input_ids, position_ids, targets = batch.input_ids, batch.position_ids, batch.labels
    is_all_targets = batch.num_targets == targets.numel()
    mask = batch.make_token_mask()
    if context.size > 1:
        split = TokenSplit(targets.numel(), context)
        segments.exchange = (
            HeadExchange(split) if context.pieces == 1 else RingExchange(batch.cu_seqlens, split, device, get_block_ops)
        )
        input_ids, position_ids, targets = map(split.take, (input_ids, position_ids, targets))
        mask = None if mask is None else split.take(mask)
    rows = None
    if not is_all_targets:
        rows = (targets != IGNORE_INDEX).nonzero().squeeze(1)
        targets = targets[rows]
        rows = send_to_device(rows, device)
    segments.token_mask = mask
    return PackedBatch(
        send_to_device(input_ids.unsqueeze(0), device),
        send_to_device(position_ids.unsqueeze(0), device),
        segments,
        send_to_device(targets, device),
        rows,
    )


PackBatch = Callable[..., PackedBatch]
"""`pack_batch`, or what takes its place."""


def choose_packing(model: PreTrainedModel) -> PackBatch:
    """Return what moves batches of a model to its device: of one that sees, with their pictures."""
    if getattr(model.config, "vision_config", None) is None:
        return pack_batch
    if runs_own_forward(model):
        from anabatic.models.vision.own_forward import make_own_packing

        return make_own_packing(model)
    from anabatic.models.vision.picture_packing import make_picture_packing

    return make_picture_packing(model)


def compute_hidden_states(model: PreTrainedModel, packed: PackedBatch, received: Tensor | None = None) -> Tensor:
    """Return the last hidden states `[T, H]`; of a pipeline's stage those that the next stage reads.

    Args:
        received: `[T, H]` of the stage before; None: this is the first.

    Raises:
        DataError: not every layer uses packed attention.
    """
    if packed.own_rows is not None:
        return packed.own_rows.compute_states(model)
    _require_supported(model)
    attended_before = packed.segments.num_attended_layers
    borders = packed.segments.cu_seqlens
    if packed.segments.exchange is not None:
        plan = packed.segments.exchange.count_own(borders)
    else:
        plan = [(end - start, end - start) for start, end in zip(borders, borders[1:], strict=False)]
    recorder = routing.get_recorder(model) if routing.RECORDER in model.__dict__ else None
    watch = nullcontext() if recorder is None else recorder.record_forward(packed.segments)
    inputs: dict[str, Any] = (
        {"input_ids": packed.input_ids} if received is None else {"inputs_embeds": received.unsqueeze(0)}
    )
    if packed.pictures is not None:
        inputs = packed.pictures.compute_inputs(model, packed.input_ids)
    with _follow_lengths(model, plan), watch:
        out = get_body(model)(
            **inputs,
            position_ids=packed.position_ids,
            attention_mask=NO_MASK,
            use_cache=False,
            segments=packed.segments,
        )
    _require_all_attended(model, packed.segments.num_attended_layers - attended_before)
    states: Tensor = out.last_hidden_state.squeeze(0)
    return states


def _follow_lengths(model: PreTrainedModel, plan: rope_scaling.LengthPlan) -> AbstractContextManager[None]:
    """Use rotary frequencies that depend on the length of each text, in a model that has such."""
    kinds = str(getattr(model.config.get_text_config(), "rope_parameters", None))
    if not any(kind in kinds for kind in rope_scaling.LENGTH_KINDS):
        return nullcontext()
    return rope_scaling.use_length_plan(model, plan)


def _require_supported(model: PreTrainedModel) -> None:
    kinds = {*(getattr(model.config.get_text_config(), "layer_types", None) or ())}
    if model._supports_attention_backend and kinds <= _PLAIN_KINDS:
        return
    # Families with layers of the delta rule do not claim the interface, which their other layers still use.
    has_delta_layers = delta_net.has_delta_layers(model)
    if not model._supports_attention_backend and not has_delta_layers:
        raise DataError(
            f"{type(model).__name__} mixes tokens in its own way, not by transformers' attention interface: rows of a"
            " batch would mix",
            "use a model of another family",
        )
    known = NO_MASK.keys() - (() if has_delta_layers else (delta_states.LAYER_KIND,))
    unknown = sorted(kinds - known)
    if unknown:
        raise DataError(
            f"{type(model).__name__} has layers of the kind {', '.join(unknown)}, in which rows of a batch would mix",
            f"use a model whose layers are {' or '.join(sorted(known))}",
        )


def _require_all_attended(model: PreTrainedModel, attended: int) -> None:
    layers = model.config.get_text_config().num_hidden_layers
    if pipeline_stages.STAGE in model.__dict__:
        layers = pipeline_stages.count_own_layers(model)
    if attended != layers:
        raise DataError(
            f"{attended} of {layers} layers of {type(model).__name__} use packed attention; the others mix tokens in"
            " their own way, and rows of a batch with them",
            "use a model whose layers are all attention",
        )


def _get_lm_head(model: PreTrainedModel) -> tuple[Tensor, LmHead]:
    """Return the output weight, and the head, which is probed on first use."""
    head = model.__dict__.get("_anabatic_head")
    if head is None:
        head = model.__dict__["_anabatic_head"] = find_lm_head(model)
    weight: Tensor = model.get_output_embeddings().weight
    return weight, head


def compute_chunk_bytes(weight: Tensor, requested: int) -> int:
    """Return the bytes of a chunk of logits: the requested number, but at least `_MIN_LOGIT_ROWS` rows."""
    return max(requested, _MIN_LOGIT_ROWS * 4 * weight.shape[0])


def compute_target_states(
    model: PreTrainedModel, packed: PackedBatch, received: Tensor | None = None
) -> tuple[Tensor, Tensor, LmHead]:
    """Return the states of the target rows, times the model's logit scale; the output weight; the head."""
    # A plan of its own: recomputation in the backward pass must leave out the same rows.
    segments = copy.copy(packed.segments)
    if packed.pictures is None:  # features of pictures are added behind the first layers, one of which may be the last
        segments.output_rows = packed.target_rows
    states = compute_hidden_states(model, replace(packed, segments=segments), received)
    weight, head = _get_lm_head(model)
    if packed.target_rows is not None and not segments.has_dropped_rows:
        states = states.index_select(0, packed.target_rows)
    return states if head.scale == 1 else states * head.scale, weight, head


class ModelRoot(nn.Module):
    """Root module; all calls of a model run inside its forward pass.

    There FSDP2 gathers sharded weights, and DDP learns which gradients to expect.

    Attributes:
        tensor_ranks: number of tensor-parallel ranks (`tensor_parallel.py`).
        partial_params: names of parameters that each of these ranks holds in full with a partial gradient.
        expert_params: names of parameters that ranks of an expert group divide (`expert_parallel.py`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parts: int = 1,
        partial: frozenset[str] = frozenset(),
        experts: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.model = model
        self.tensor_ranks, self.partial_params, self.expert_params = parts, partial, experts

    def forward(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return `call(model, *args)`."""
        return call(self.model, *args)


def cast_adapters(model: PreTrainedModel) -> None:
    """Make the low-precision copies of grouped adapters for the next forward pass."""
    bank = model.__dict__.get("adapter_bank")
    if bank is not None:
        bank.cast_adapters(pipeline_stages.list_computed_blocks(model))


def compute_summed_loss(
    model: PreTrainedModel, packed: PackedBatch, chunk_bytes: int, received: Tensor | None = None
) -> Tensor:
    """Return the summed cross-entropy of the batch's targets, fp32."""
    if torch.is_grad_enabled():
        cast_adapters(model)
    states, weight, head = compute_target_states(model, packed, received)
    return linear_cross_entropy(states, weight, packed.targets, compute_chunk_bytes(weight, chunk_bytes), head.softcap)


@torch.no_grad()
def score_targets(
    model: PreTrainedModel, packed: PackedBatch, chunk_bytes: int, received: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of every target, fp32 `[n]`, and whether it is the most likely token, bool `[n]`."""
    states, weight, head = compute_target_states(model, packed, received)
    return token_cross_entropy(states, weight, packed.targets, compute_chunk_bytes(weight, chunk_bytes), head.softcap)


@torch.no_grad()
def extend_cache(
    model: PreTrainedModel, rows: Sequence[CacheRow], cache: KVCache, direct: BodyRunner | None = None
) -> Tensor:
    """Run new tokens of many requests, packed without padding, and write them to the cache.

    Args:
        direct: runs the body and the head instead of the modules.

    Returns:
        Logits after the last token of each row that requests them, fp32 `[n, V]`.

    Raises:
        DataError: the model does not use packed attention.
    """
    plan = cache.forward_plan = ForwardPlan(rows, cache)
    multi_adapter.select_adapters(model, plan.adapter_spans)
    if direct is not None and not plan.pictures and not torch.is_autocast_enabled(plan.input_ids.device.type):
        with _follow_lengths(model, plan.length_plan):
            states = direct.compute_states(plan, cache)
        _, head = _get_lm_head(model)
        return head.finish_logits(direct.head.multiply(states.index_select(0, plan.logit_positions))).float()
    return _compute_logits(model, run_modules(model, plan, cache).index_select(0, plan.logit_positions))


def run_modules(model: PreTrainedModel, plan: ForwardPlan, cache: KVCache) -> Tensor:
    """Return the last hidden states `[T, H]` of new tokens by the model's own modules, and write them to the cache.

    Raises:
        DataError: the model does not use packed attention.
    """
    _require_supported(model)
    with _follow_lengths(model, plan.length_plan):
        return _run_layers(model, plan, cache)


def run_plan(model: PreTrainedModel, plan: Any, cache: KVCache) -> Tensor:
    """Run a plan of fixed shapes (`infer.decode_graph`) without adapters: nothing here depends on the host.

    Args:
        plan: has the attributes of `ForwardPlan` that attention reads.

    Returns:
        Logits after every token, fp32 `[T, V]`.
    """
    cache.forward_plan = plan
    multi_adapter.select_adapters(model, [(-1, plan.input_ids.shape[1])])
    return _compute_logits(model, _run_layers(model, plan, cache))


def _run_layers(model: PreTrainedModel, plan: Any, cache: KVCache) -> Tensor:
    out = get_body(model)(
        **_read_tokens(model, plan),
        position_ids=plan.position_ids,
        attention_mask=NO_MASK,
        use_cache=False,
        request_cache=cache,  # not `cache`: since 5.24 that is an argument of transformers' own
    )
    _require_all_attended(model, plan.num_attended_layers)
    states: Tensor = out.last_hidden_state.squeeze(0)
    return states


def get_body(model: PreTrainedModel) -> Any:
    """Return what makes hidden states of tokens; of a model that sees its decoder, which is given features."""
    return model.base_model if getattr(model.config, "vision_config", None) is None else model.get_decoder()


def _read_tokens(model: PreTrainedModel, plan: Any) -> dict[str, Any]:
    """Return the tokens of a step as arguments of the body, those of pictures as features."""
    if plan.pictures:
        from anabatic.models.vision.packed_pictures import insert_features
        from anabatic.models.vision.prompt_pictures import gather_features

        if found := gather_features(model, plan.pictures, plan.input_ids.device):
            return insert_features(model, plan.input_ids, *found)
    return {"input_ids": plan.input_ids}


def _compute_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    weight, head = _get_lm_head(model)
    return head.compute_logits(states.to(weight.dtype), weight).float()
