"""Pipeline parallelism: a decoder's layers are divided among stages, the embedding is on the first one, the last norm
and the head on the last one. A stage may have several chunks of layers, with those of other stages between them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError
from anabatic.models.experts.expert_layers import iter_expert_layers
from anabatic.models.lora.adapter import find_blocks
from anabatic.parallel.pipeline_parameters import remove_absent
from anabatic.parallel.sharding import named_parameters_of_all
from anabatic.parallel.world import World
from anabatic.plan import job_rules
from anabatic.plan.pipeline_stages import estimate_bubble, split_layers

STAGE = "_anabatic_stage"
"""Attribute of a model of which this process has a stage."""
WORTH_A_HINT = 0.25
"""Part of a step: if stages wait longer, the log says what helps."""
_TOKENS = 3


class _Stage:
    """The layers that a process has of a divided model.

    Attributes:
        sizes: number of layers of every chunk of all stages, in the order of the layers.
        own: layers of each chunk of this stage.
        chunk: the one that is computed.
        views: of each chunk that has been computed, the modules that the body shows then, by attribute.
    """

    def __init__(self, parts: Sequence[range], stages: int, rank: int) -> None:
        self.sizes = [len(part) for part in parts]
        self.own = list(parts[rank::stages])
        self.is_last = rank == stages - 1
        self.chunk = 0
        self.views: dict[int, dict[str, nn.Module]] = {}


def require_stages(model: PreTrainedModel, world: World) -> None:
    """Check that a model, perhaps on the meta device, can be divided into the stages of a world.

    Raises:
        ConfigError: it has too few layers, or a structure that is not known.
    """
    stages, chunks = world.pipeline_group.size, world.pipeline_chunks
    if stages == 1:
        return
    names = find_blocks(model)
    unknown = _find_unknown(model, names)
    if unknown:
        raise ConfigError(
            f"parallel.pipeline is {stages}, and {unknown}", f"leave parallel.pipeline at 1; {job_rules.ZERO3_HINT}"
        )
    job_rules.raise_problems(job_rules.find_layer_problems(len(names), stages, chunks))


def _find_unknown(model: PreTrainedModel, names: list[str]) -> str:
    if len(names) != model.config.num_hidden_layers or not names:
        return f"{type(model).__name__} has no plain list of decoder layers"
    body: Any = model.base_model
    if "norm" not in body._modules or set(body._modules) - _BODY_PARTS:
        return f"{type(body).__name__} has other parts than embedding, layers and norm"
    if not _passes_states(model, names):
        return f"{type(body).__name__} changes what its embedding returns"
    return ""


_BODY_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}


def _passes_states(model: PreTrainedModel, names: list[str]) -> bool:
    """True when a body whose layers and norm do nothing returns the states that it is given (Granite scales them)."""
    body: Any = model.base_model
    modules = [*(model.get_submodule(name) for name in names), body.norm]
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.__dict__["forward"] = _pass_on
    states = torch.linspace(-1, 1, _TOKENS * model.config.hidden_size).view(1, _TOKENS, -1)
    try:
        with torch.no_grad(), torch.device("cpu"):
            out = body(
                inputs_embeds=states,
                position_ids=torch.arange(_TOKENS)[None],
                use_cache=False,
            ).last_hidden_state
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward
    return torch.equal(out, states)


def _pass_on(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states


def _divide(model: PreTrainedModel, world: World) -> list[range]:
    layers = [_count_active(model, model.get_submodule(name)) for name in find_blocks(model)]
    head = model.get_output_embeddings().weight.numel()
    return split_layers(layers, head, world.pipeline_group.size, world.pipeline_chunks)


def _count_active(model: PreTrainedModel, block: nn.Module) -> int:
    """Return the parameters of a block that a token is multiplied by; of experts, those of one token."""
    idle = 0
    for _, layer in iter_expert_layers(block):
        share = 1 - int(model.config.num_experts_per_tok) / int(layer.num_experts)
        idle += round(share * sum(parameter.numel() for parameter in layer.parameters()))
    return sum(parameter.numel() for parameter in block.parameters()) - idle


def apply_pipeline(model: PreTrainedModel, world: World) -> None:
    """Leave a model on the meta device the parameters of this rank's stage; the others' layers pass on their input."""
    group = world.pipeline_group
    if group.size == 1:
        return
    require_stages(model, world)
    names, parts = find_blocks(model), _divide(model, world)
    stage_of = {name: at % group.size for at, part in enumerate(parts) for name in names[part.start : part.stop]}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    last = group.size - 1
    tied = head.weight is embedding.weight
    owners: dict[str, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((block for block in names if name.startswith(f"{block}.")), None)
        if block is not None:
            owners[name] = {stage_of[block]}
        elif parameter is embedding.weight:
            owners[name] = {0, last} if tied else {0}
        else:
            owners[name] = {last}
    remove_absent(model, owners, group.rank)
    for name in names:
        if stage_of[name] != group.rank:
            model.get_submodule(name).__dict__["forward"] = _pass_on
    if group.rank != last:
        body: Any = model.base_model
        body.norm.__dict__["forward"] = _pass_on
    model.__dict__[STAGE] = _Stage(parts, group.size, group.rank)


@contextmanager
def use_chunk(model: PreTrainedModel, chunk: int) -> Iterator[None]:
    """Compute one chunk of this stage's layers in forward passes of the model; backward passes need no such context.

    Modules stay where they are: FSDP2 looks for its own among them in its first forward pass.
    """
    stage: _Stage = model.__dict__[STAGE]
    stage.chunk = chunk
    if len(stage.own) == 1:
        yield
        return
    body: Any = model.base_model
    if chunk not in stage.views:
        stage.views[chunk] = _make_view(body, stage, chunk)
    body.__dict__.update(stage.views[chunk])  # before `_modules`, where the attributes are otherwise looked up
    try:
        yield
    finally:
        for name in stage.views[chunk]:
            del body.__dict__[name]


def _make_view(body: Any, stage: _Stage, chunk: int) -> dict[str, nn.Module]:
    skipped = set(itertools.chain(*stage.own)) - set(stage.own[chunk])
    layers = [_PassOn(layer) if index in skipped else layer for index, layer in enumerate(body.layers)]
    view: dict[str, nn.Module] = {"layers": nn.ModuleList(layers)}
    if stage.is_last and chunk < len(stage.own) - 1:
        view["norm"] = _PassOn(body.norm)
    return view


class _PassOn(nn.Module):
    """Stands for a layer that returns its input; other attributes are the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)

    forward = staticmethod(_pass_on)


def list_computed_blocks(model: PreTrainedModel) -> list[nn.Module] | None:
    """Return the blocks of the chunk that is computed; None: all that this process has."""
    stage: _Stage | None = model.__dict__.get(STAGE)
    if stage is None or len(stage.own) == 1:
        return None
    blocks = model.base_model._modules["layers"]
    assert isinstance(blocks, nn.ModuleList)
    return [blocks[index] for index in stage.own[stage.chunk]]


def count_own_layers(model: PreTrainedModel) -> int:
    """Return the number of layers that this rank computes in a forward pass."""
    stage: _Stage | None = model.__dict__.get(STAGE)
    return int(model.config.get_text_config().num_hidden_layers) if stage is None else len(stage.own[stage.chunk])


def is_tied_across_stages(model: PreTrainedModel) -> bool:
    """True when the first and the last stage of a divided model both hold the embedding, and train it."""
    weight = model.get_input_embeddings().weight
    return STAGE in model.__dict__ and model.get_output_embeddings().weight is weight and weight.requires_grad


def find_tied_name(model: nn.Module) -> str:
    """Return the name of the tied embedding among the parameters."""
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in named_parameters_of_all(model) if parameter is weight)


def describe_pipeline(model: PreTrainedModel, world: World, micro_steps: int) -> str:
    """Return a line about the stages and the time in which some of them wait."""
    stage: _Stage = model.__dict__[STAGE]
    stages, chunks = world.pipeline_group.size, world.pipeline_chunks
    sizes = [" and ".join(map(str, stage.sizes[rank::stages])) for rank in range(stages)]
    schedule = "1F1B" if chunks == 1 else "interleaved 1F1B"
    bubble = estimate_bubble(stages, chunks, micro_steps)
    line = (
        f"pipeline parallelism: {stages} stages of {' + '.join(sizes)} layers, {schedule}; micro-batches in a step:"
        f" {micro_steps}, so stages wait for {bubble:.0%} of the time"
    )
    more = "; a larger batch.global_batch_tokens or a smaller batch.micro_batch_tokens makes more micro-batches"
    return line + more * (bubble > WORTH_A_HINT)
