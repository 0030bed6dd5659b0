"""Names of the layers of a model from its config.json, and which of them a tuner trains; without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anabatic.config.sections.train_jobs import Freeze
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean
from anabatic.plan.shapes.config_values import MAX_BLOCKS

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
    """Return the number of blocks from a config.json; None for unknown families and sizes that a plan refuses."""
    blocks = config.get("num_hidden_layers")
    is_known = str(config.get("model_type")) in _LINEAR_LAYERS and "auto_map" not in config
    return blocks if is_known and type(blocks) is int and 0 < blocks <= MAX_BLOCKS else None


def list_linear_layers(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the linear layers from a config.json, without the head; empty for unknown families."""
    blocks = count_blocks(config)
    names = _LINEAR_LAYERS.get(str(config.get("model_type")), ())
    return [f"model.layers.{block}.{name}" for block in range(blocks or 0) for name in names]


def matches_name_end(name: str, suffix: str) -> bool:
    """Return whether a module name is `suffix` or ends with it after a dot."""
    return name == suffix or name.endswith("." + suffix)


ALL_EXPERTS = "all-experts"
"""Target of `lora.target_modules`: the stacked weights of every expert layer."""


def is_expert_target(target: str) -> bool:
    """True for a target that names stacked weights of experts: `all-experts`, or a name such as `experts.down_proj`."""
    return target == ALL_EXPERTS or re.search(r"(^|\.)experts\.(gate_up_proj|down_proj)$", target) is not None


def select_expert_weights(weights: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the stacked weights of experts that match `lora.target_modules`.

    Raises:
        ConfigError: a target names experts and matches none.
    """
    found: list[str] = []
    for target in filter(is_expert_target, targets):
        matching = [name for name in weights if target == ALL_EXPERTS or matches_name_end(name, target)]
        if not matching:
            raise ConfigError(
                f'lora.target_modules: "{target}" matches no stacked weight of experts',
                f"weights of this model: {', '.join(weights[:4])} and so on"
                if weights
                else "this model has none whose structure is known: leave it out",
            )
        found += matching
    return [name for name in weights if name in found]


def select_target_modules(linear: Sequence[str], targets: Sequence[str]) -> list[str]:
    """Return the linear layers that match `lora.target_modules`; targets that are experts are left out.

    Raises:
        ConfigError: a target matches no linear layer.
    """
    targets = [target for target in targets if not is_expert_target(target)]
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
        raise ConfigError(message, "continue with --tuner lora, or merge it first with `anabatic merge`")
