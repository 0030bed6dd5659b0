"""Select layers of a model by name: layers with an adapter, trained blocks. No torch.

Training uses the names of the loaded model; checks before torch is imported use the names that follow from the family
and the number of blocks in config.json.
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
    """Return the number of blocks from a config.json; None for unknown families."""
    blocks = config.get("num_hidden_layers")
    is_known = config.get("model_type") in _LINEAR_LAYERS and "auto_map" not in config
    return blocks if is_known and type(blocks) is int and blocks > 0 else None


def list_linear_layers(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers from a config.json, without the head; empty for unknown families."""
    blocks = count_blocks(config)
    names = _LINEAR_LAYERS.get(str(config.get("model_type")), ())
    return [f"model.layers.{block}.{name}" for block in range(blocks or 0) for name in names]


def matches_name_end(name: str, suffix: str) -> bool:
    """Return whether a module name is `suffix` or ends with it after a dot."""
    return name == suffix or name.endswith("." + suffix)


def select_target_modules(linear: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the linear layers that match `lora.target_modules`.

    Raises:
        ConfigError: a target matches no linear layer.
    """
    if list(targets) == ["all-linear"]:
        return list(linear)
    for target in targets:
        if not any(matches_name_end(name, target) for name in linear):
            known = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ConfigError(
                f'lora.target_modules: no linear layer is called "{target}".{did_you_mean(target, known)}',
                f"layers of this model: {', '.join(known)}, or all-linear",
            )
    return [name for name in linear if any(matches_name_end(name, target) for target in targets)]


def require_blocks(freeze: Freeze, blocks: int) -> None:
    """Check that a model has the blocks that are to be trained.

    Raises:
        ConfigError: it has fewer.
    """
    if freeze.last_layers > blocks:
        raise ConfigError(
            f"freeze.last_layers is {freeze.last_layers}, the model has {blocks} blocks",
            f"use at most {blocks}, or --tuner full",
        )


def compile_freeze_patterns(freeze: Freeze) -> Iterable[re.Pattern[str]]:
    """Yield the compiled patterns of `freeze.train`.

    Raises:
        ConfigError: an entry is not a regular expression.
    """
    for expression in freeze.train:
        try:
            yield re.compile(expression)
        except re.error as error:
            raise ConfigError(f'freeze.train: "{expression}" is no regular expression: {error}', "fix it") from error


def require_adapter_tuner(adapter: Path | str, tuner: str) -> None:
    """Check that the tuner of an adapter is `auto` or `lora`.

    Raises:
        ConfigError: it is another tuner.
    """
    if tuner not in ("auto", "lora"):
        message = f"{adapter} is an adapter, and tuner is {tuner}"
        raise ConfigError(message, "go on with --tuner lora, or merge it first with `anabatic merge`")
