"""Rotary frequencies that depend on how long a text is, chosen for each text of a packed row by its own length.

transformers' rope type `longrope` (arXiv 2402.13753) has one set of frequencies up to the length of the first training
and one beyond; `dynamic` (NTK scaling) has other frequencies for each length beyond the model's positions. transformers
chooses them by the largest position of a batch, so that a text's neighbours would change what is computed for it.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, modeling_rope_utils

from anabatic.core.errors import DataError
from anabatic.device.transfer import send_to_device

LengthPlan = Sequence[tuple[int, int]]
"""For each text of a row: how long it is, and how many of its tokens are in the row."""
_MODULES_KEY, _PLAN_KEY = "_anabatic_rope", "_anabatic_plan"


def get_length_limit(config: PretrainedConfig) -> int | None:
    """Return the length beyond which a text has other frequencies; None: they are the same for all lengths."""
    lengths = [
        _length_limit(config, kind, parameters)
        for kind, parameters in _rope_parameters(config)
        if _depends_on_length(parameters)
    ]
    return min(lengths, default=None)


@contextmanager
def use_length_plan(model: PreTrainedModel, plan: LengthPlan) -> Iterator[None]:
    """Let a forward pass over one packed row turn the tokens of each text as its length asks.

    Raises:
        DataError: the model's frequencies depend on the length in a way that is not known.
    """
    modules = _find_modules(model)
    for module in modules:
        module.__dict__[_PLAN_KEY] = plan
    try:
        yield
    finally:
        for module in modules:
            del module.__dict__[_PLAN_KEY]


def _rope_parameters(config: PretrainedConfig) -> list[tuple[str | None, dict[str, Any]]]:
    """The settings of the frequencies, by the kind of layer where they differ between kinds."""
    given = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in given:
        return [(None, given)]
    return [(kind, one) for kind, one in given.items() if isinstance(one, dict)]


def _depends_on_length(parameters: dict[str, Any]) -> bool:
    kind = str(parameters.get("rope_type"))
    return kind == "longrope" or "dynamic" in kind


def _length_limit(config: PretrainedConfig, kind: str | None, parameters: dict[str, Any]) -> int:
    positions = int(config.max_position_embeddings)
    if "dynamic" in parameters["rope_type"]:
        return positions
    return int(parameters.get("original_max_position_embeddings") or positions)


def _find_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that make angles by lengths, found and given their new forward when first asked for."""
    found: list[nn.Module] | None = model.__dict__.get(_MODULES_KEY)
    if found is None:
        found = []
        if get_length_limit(model.config) is not None:
            found = [module for module in model.modules() if _is_length_dependent(module)]
            if not found:
                kinds = sorted(
                    {one["rope_type"] for _, one in _rope_parameters(model.config) if _depends_on_length(one)}
                )
                raise DataError(
                    f"{type(model).__name__} has rotary embeddings of the type {', '.join(kinds)}, whose frequencies"
                    " depend on the length of a text in a way that packing does not know",
                    "use a model of another family, or one whose config.json has another rope_type",
                )
        for module in found:
            module.__dict__["forward"] = types.MethodType(_forward_by_length, module)
        model.__dict__[_MODULES_KEY] = found
    return found


def _is_length_dependent(module: nn.Module) -> bool:
    """Does transformers' own code choose this module's frequencies by the largest position?"""
    step: Any = type(module).forward
    while step is not None:
        if getattr(step, "__globals__", None) is modeling_rope_utils.__dict__:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


@torch.no_grad()
def _forward_by_length(self: Any, x: Tensor, position_ids: Tensor, *more: Any, **named: Any) -> Any:
    """The angles of a packed row: those of each set of frequencies, each token's taken from its own set."""
    plan: LengthPlan | None = self.__dict__.get(_PLAN_KEY)
    if plan is None:
        return type(self).forward(self, x, position_ids, *more, **named)
    plain = inspect.unwrap(type(self).forward)
    kind = named.get("layer_type", more[0] if more else None)
    parameters = dict(_rope_parameters(self.config))[kind]
    if not _depends_on_length(parameters):
        return plain(self, x, position_ids, *more, **named)
    limit = _length_limit(self.config, kind, parameters)
    reached = [length if length > limit else 0 for length, _ in plan]
    if parameters["rope_type"] == "longrope":  # one set for all lengths beyond
        reached = [limit + 1 if length else 0 for length in reached]
    sets = sorted(set(reached))
    made = [_compute_angles(self, plain, x, position_ids, kind, length, *more, **named) for length in sets]
    out = made[0]
    if len(sets) > 1:
        counts = torch.tensor([count for _, count in plan])
        which = send_to_device(
            torch.tensor([sets.index(length) for length in reached]).repeat_interleave(counts), x.device
        )
        for number, other in enumerate(made[1:], start=1):
            out = [_select_tokens(which == number, new, old) for new, old in zip(other, out, strict=True)]
    return tuple(out) if len(out) > 1 else out[0]


def _select_tokens(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`[T]`, `[1, T, ...]`, `[1, T, ...]` -> `[1, T, ...]`."""
    return torch.where(mask.view(1, -1, *[1] * (new.dim() - 2)), new, old)


def _compute_angles(
    module: Any, plain: Any, x: Tensor, position_ids: Tensor, kind: str | None, length: int, *more: Any, **named: Any
) -> list[Tensor]:
    """What the module's own code makes of the frequencies of a length; 0: of those of short texts."""
    name = "inv_freq" if kind is None else f"{kind}_inv_freq"
    before = module._buffers[name]
    module._buffers[name] = _compute_frequencies(module, kind, length, before.device)
    try:
        out = plain(module, x, position_ids, *more, **named)
    finally:
        module._buffers[name] = before
    return list(out) if isinstance(out, tuple) else [out]


def _compute_frequencies(module: Any, kind: str | None, length: int, device: torch.device) -> Tensor:
    rope_type = module.rope_type if kind is None else module.rope_type[kind]
    settings = {} if kind is None else {"layer_type": kind}
    make = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    found: Tensor = make(module.config, torch.device("cpu"), seq_len=length or None, **settings)[0]
    return send_to_device(found, device)
