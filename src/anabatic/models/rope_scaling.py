"""Rotary frequencies that depend on the sequence length, chosen for each text of a packed row by its own length.

transformers' rope type `longrope` (arXiv 2402.13753) has one set of frequencies up to the original training length and
one beyond; `dynamic` (NTK scaling) has other frequencies for each length beyond the model's positions. transformers
chooses them by the largest position of a batch, so the result for a text would depend on other texts of the batch.
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
from anabatic.device.device import send_to_device

LengthPlan = Sequence[tuple[int, int]]
"""For each text of a row: its length, and the number of its tokens in the row."""
LENGTH_KINDS = ("longrope", "dynamic")
"""Parts of the rope types whose frequencies depend on the length."""
_MODULES_KEY, _PLAN_KEY = "_anabatic_rope", "_anabatic_plan"


def get_length_limit(config: PretrainedConfig) -> int | None:
    """Return the length beyond which the frequencies change; None: they are equal for all lengths."""
    lengths = [
        _length_limit(config, layer_type, parameters)
        for layer_type, parameters in _rope_parameters(config)
        if _depends_on_length(parameters)
    ]
    return min(lengths, default=None)


@contextmanager
def use_length_plan(model: PreTrainedModel, plan: LengthPlan) -> Iterator[None]:
    """Use the frequencies for the length of each text in a forward pass over one packed row.

    Raises:
        DataError: the model's frequencies depend on the length in an unsupported way.
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
    """Return the rope parameters, by layer type if they differ between types."""
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope_parameters:
        return [(None, rope_parameters)]
    return [
        (layer_type, parameters) for layer_type, parameters in rope_parameters.items() if isinstance(parameters, dict)
    ]


def _depends_on_length(parameters: dict[str, Any]) -> bool:
    rope_type = str(parameters.get("rope_type"))
    return any(kind in rope_type for kind in LENGTH_KINDS)


def _length_limit(config: PretrainedConfig, layer_type: str | None, parameters: dict[str, Any]) -> int:
    positions = int(config.max_position_embeddings)
    if "dynamic" in parameters["rope_type"]:
        return positions
    return int(parameters.get("original_max_position_embeddings") or positions)


def _find_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules with length-dependent angles; on first use, find them and replace their forward."""
    modules: list[nn.Module] | None = model.__dict__.get(_MODULES_KEY)
    if modules is None:
        modules = []
        if get_length_limit(model.config.get_text_config()) is not None:
            modules = [module for module in model.modules() if _is_length_dependent(module)]
            if not modules:
                kinds = sorted(
                    {
                        parameters["rope_type"]
                        for _, parameters in _rope_parameters(model.config.get_text_config())
                        if _depends_on_length(parameters)
                    }
                )
                raise DataError(
                    f"{type(model).__name__} has rotary embeddings of the type {', '.join(kinds)}, whose frequencies"
                    " depend on the length of a text in a way that packing does not know",
                    "use a model of another family, or one whose config.json has another rope_type",
                )
        for module in modules:
            module.__dict__["forward"] = types.MethodType(_forward_by_length, module)
        model.__dict__[_MODULES_KEY] = modules
    return modules


def _is_length_dependent(module: nn.Module) -> bool:
    """Return whether transformers' code chooses this module's frequencies by the largest position."""
    function: Any = type(module).forward
    while function is not None:
        if getattr(function, "__globals__", None) is modeling_rope_utils.__dict__:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


@torch.no_grad()
def _forward_by_length(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the angles of a packed row: computed for each set of frequencies, and selected for each token."""
    plan: LengthPlan | None = self.__dict__.get(_PLAN_KEY)
    if plan is None:
        return type(self).forward(self, x, position_ids, *args, **kwargs)
    original = inspect.unwrap(type(self).forward)
    layer_type = kwargs.get("layer_type", args[0] if args else None)
    parameters = dict(_rope_parameters(self.config))[layer_type]
    if not _depends_on_length(parameters):
        return original(self, x, position_ids, *args, **kwargs)
    limit = _length_limit(self.config, layer_type, parameters)
    lengths = [length if length > limit else 0 for length, _ in plan]
    if parameters["rope_type"] == "longrope":  # one set for all lengths beyond the limit
        lengths = [limit + 1 if length else 0 for length in lengths]
    distinct_lengths = sorted(set(lengths))
    angle_sets = [
        _compute_angles(self, original, x, position_ids, layer_type, length, *args, **kwargs)
        for length in distinct_lengths
    ]
    out = angle_sets[0]
    if len(distinct_lengths) > 1:
        counts = torch.tensor([count for _, count in plan])
        set_of_token = send_to_device(
            torch.tensor([distinct_lengths.index(length) for length in lengths]).repeat_interleave(counts), x.device
        )
        for index, other in enumerate(angle_sets[1:], start=1):
            out = [
                _select_tokens(set_of_token == index, selected, current)
                for selected, current in zip(other, out, strict=True)
            ]
    return tuple(out) if len(out) > 1 else out[0]


def _select_tokens(mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`[T]`, `[1, T, ...]`, `[1, T, ...]` -> `[1, T, ...]`."""
    return torch.where(mask.view(1, -1, *[1] * (new.dim() - 2)), new, old)


def _compute_angles(
    module: Any,
    original: Any,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None,
    length: int,
    *args: Any,
    **kwargs: Any,
) -> list[Tensor]:
    """Return the angles that the module computes with the frequencies for a length; 0: those of short texts."""
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    inv_freq = module._buffers[name]
    module._buffers[name] = _compute_frequencies(module, layer_type, length, inv_freq.device)
    try:
        out = original(module, x, position_ids, *args, **kwargs)
    finally:
        module._buffers[name] = inv_freq
    return list(out) if isinstance(out, tuple) else [out]


def _compute_frequencies(module: Any, layer_type: str | None, length: int, device: torch.device) -> Tensor:
    rope_type = module.rope_type if layer_type is None else module.rope_type[layer_type]
    options = {} if layer_type is None else {"layer_type": layer_type}
    compute = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    inv_freq: Tensor = compute(module.config, torch.device("cpu"), seq_len=length or None, **options)[0]
    return send_to_device(inv_freq, device)
