"""Layers of a model by their names: which get an adapter, which blocks are trained. No torch.

The trainings ask with the names of the model that is loaded; checks before torch ask with those that follow from the
family and the number of blocks in config.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.config.sections.tuner import Freeze
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean

_ATTENTION_LAYERS = tuple(f"self_attn.{name}_proj" for name in "qkvo")
_GATED_MLP_LAYERS = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
_FUSED_GATE_LAYERS = ("mlp.gate_up_proj", "mlp.down_proj")
_LINEAR_LAYERS = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "olmo2")
        + ("granite",),
        (*_ATTENTION_LAYERS, *_GATED_MLP_LAYERS),
    ),
    **dict.fromkeys(("glm", "glm4"), (*_ATTENTION_LAYERS, *_FUSED_GATE_LAYERS)),
    "phi3": ("self_attn.qkv_proj", "self_attn.o_proj", *_FUSED_GATE_LAYERS),
}
"""Family (`model_type`) -> linear layers of each of its blocks, as transformers names them."""


def count_blocks(config: Mapping[str, Any]) -> int | None:
    """Return the blocks of a model by its config.json; None where that is not certain."""
    blocks = config.get("num_hidden_layers")
    known = config.get("model_type") in _LINEAR_LAYERS and "auto_map" not in config
    return blocks if known and type(blocks) is int and blocks > 0 else None


def list_linear_layers(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a model's linear layers, the head not among them, by its config.json; empty where they are
    not certain."""
    blocks = count_blocks(config)
    names = _LINEAR_LAYERS.get(str(config.get("model_type")), ())
    return [f"model.layers.{block}.{name}" for block in range(blocks or 0) for name in names]


def matches_name_end(name: str, end: str) -> bool:
    """True where a module is meant by the end of its name."""
    return name == end or name.endswith("." + end)


def select_target_modules(linear: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return those of some linear layers that `lora.target_modules` means.

    Raises:
        ConfigError: a name that no linear layer ends with.
    """
    if list(wanted) == ["all-linear"]:
        return list(linear)
    for end in wanted:
        if not any(matches_name_end(name, end) for name in linear):
            last = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ConfigError(
                f'lora.target_modules: no linear layer is called "{end}".{did_you_mean(end, last)}',
                f"layers of this model: {', '.join(last)}, or all-linear",
            )
    return [name for name in linear if any(matches_name_end(name, end) for end in wanted)]


def require_blocks(freeze: Freeze, blocks: int) -> None:
    """Make sure that a model has the blocks that are to be trained.

    Raises:
        ConfigError: it has fewer.
    """
    if freeze.last_layers > blocks:
        raise ConfigError(
            f"freeze.last_layers is {freeze.last_layers}, the model has {blocks} blocks",
            f"use at most {blocks}, or --tuner full",
        )


def compile_freeze_patterns(freeze: Freeze) -> Iterable[re.Pattern[str]]:
    """Yield the expressions of `freeze.train`.

    Raises:
        ConfigError: one is none.
    """
    for expression in freeze.train:
        try:
            yield re.compile(expression)
        except re.error as error:
            raise ConfigError(f'freeze.train: "{expression}" is no regular expression: {error}', "fix it") from error


def require_adapter_tuner(named: Path | str, tuner: str) -> None:
    """Refuse to train anything of an adapter but the adapter.

    Raises:
        ConfigError: another tuner is asked for.
    """
    if tuner not in ("auto", "lora"):
        what = f"{named} is an adapter, and tuner is {tuner}"
        raise ConfigError(what, "go on with --tuner lora, or merge it first with `anabatic merge`")
