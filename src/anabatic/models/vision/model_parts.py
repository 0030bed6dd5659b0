"""The parts of a model that sees, by what they are: language model, tower, and the projector between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from anabatic.core.errors import ConfigError, DataError
from anabatic.models.lora.adapter import find_language_prefix

PartPrefixes = dict[str, tuple[str, ...]]
"""Part -> how the names of its modules begin."""


def find_tower(model: PreTrainedModel) -> tuple[str, Any]:
    """Return the name and the module of the tower: what is configured by `vision_config`.

    Raises:
        DataError: there is none.
    """
    config = model.config.vision_config
    for name, module in model.named_modules():
        if getattr(module, "config", None) is config and isinstance(module, PreTrainedModel):
            return name, module
    raise DataError(f"{type(model).__name__} has no tower that its vision_config describes", "use another model")


def find_part_prefixes(model: PreTrainedModel) -> PartPrefixes:
    """Return the parts of a model that sees.

    Raises:
        DataError: a parameter is in none of them.

    The projector is what makes states of the language model's width of the tower's: modules beside both, or else
    children of the tower with a matrix of that many outputs that are not its blocks.
    """
    language = find_language_prefix(model)
    tower_name, tower = find_tower(model)
    blocks = max((child for child in tower.children() if isinstance(child, nn.ModuleList)), key=len, default=None)
    width = getattr(tower.config, "out_hidden_size", model.config.get_text_config().hidden_size)
    base = f"{model.base_model_prefix}."
    beside = [
        f"{base}{name}."
        for name, _ in model.base_model.named_children()
        if f"{base}{name}." not in (language, f"{tower_name}.")
    ]
    inside = [
        f"{tower_name}.{name}."
        for name, child in tower.named_children()
        if child is not blocks
        and any(isinstance(one, nn.Linear) and one.out_features == width for one in child.modules())
    ]
    inside = [] if beside else inside
    beside += [f"{base}{name}" for name, _ in model.base_model.named_parameters(recurse=False)]  # borders of tiles
    children = [f"{tower_name}.{name}." for name, _ in tower.named_children()]
    own = [f"{tower_name}.{name}" for name, _ in tower.named_parameters(recurse=False)]
    rest = tuple(name for name in (*children, *own) if name not in inside)
    head = tuple(f"{name}." for name, _ in model.named_children() if name != model.base_model_prefix)
    parts = {"language": (language, *head), "projector": (*inside, *beside), "tower": rest or (f"{tower_name}.",)}
    for name, _ in model.named_parameters():
        if not language or sum(name.startswith(prefixes) for prefixes in parts.values()) != 1:
            raise DataError(
                f"the parts of {type(model).__name__} are not known: {name} is in none, or in several",
                "use another model",
            )
    return parts


def is_sight_trained(model: PreTrainedModel) -> bool:
    """Return whether anything in front of the decoder is trained."""
    own = {id(parameter) for parameter in model.get_decoder().parameters()}  # type: ignore[operator]
    return any(one.requires_grad and id(one) not in own for one in model.base_model.parameters())


def choose_parts(parts: Sequence[str], is_full: bool) -> tuple[str, ...]:
    """Return what is trained: as named, else the language model, and of a whole model its projector too."""
    return tuple(parts) or (("language", "projector") if is_full else ("language",))


def find_trained_prefixes(model: PreTrainedModel, parts: Sequence[str]) -> tuple[str, ...]:
    """Return how the names of what is in `parts` begin.

    Raises:
        ConfigError: the model has no such part.
    """
    found = find_part_prefixes(model)
    for part in parts:
        if not found[part]:
            what = f"vision.train names {part}, and {type(model).__name__} has none that is known"
            raise ConfigError(what, "leave it out")
    return tuple(prefix for part in parts for prefix in found[part])
