"""Sizes of a decoder model, read from its config.json. No torch, no weights.

Letters: `V` vocabulary, `H` hidden size, `L` blocks, `N` query heads, `K` key/value heads, `D` head size, `I` inner
size of an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from anabatic.core.errors import DataError
from anabatic.core.paths import RunFolder

ADAPTER_CONFIG_FILE = "adapter_config.json"

_ATTENTION_BIAS_FAMILIES = frozenset({"qwen2", "qwen2_moe"})
"""Families whose queries, keys and values have a bias that config.json does not name (their modeling files)."""
_HEAD_NORM_FAMILIES = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "gemma3"})
"""Families that normalize every query and key head."""
_FOUR_NORM_FAMILIES = frozenset({"gemma2", "gemma3_text", "gemma3", "glm4"})
"""Families that also have a norm after attention and MLP."""
_TIED_FAMILIES = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3", "cohere", "cohere2"})
"""Families with tied embeddings unless config.json says otherwise."""
_UNSUPPORTED_KEYS = ("kv_lora_rank", "linear_num_value_heads", "state_size", "attn_layer_period")
"""Keys of models whose blocks are not (only) attention with queries, keys and values."""
_KNOWN_FAMILIES = frozenset(
    ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3")
    + ("gemma3_text", "cohere", "cohere2", "glm", "glm4", "phi3", "olmo2", "granite")
)
"""Families whose blocks match `DecoderShape`."""
_FAMILY_NAMES = "Qwen2, Qwen3, Llama, Mistral, Gemma, GLM or Phi-3"
MAX_SIZE = 10**9
"""Upper bound of every size of a model."""


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of a block."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def params(self) -> int:
        """Number of parameters, weight and bias."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class DecoderShape:
    """The sizes that memory and time depend on."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    is_tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    norms: int = 2
    """Number of norms over the hidden size in a block."""
    experts: int = 0
    """Number of experts of a block; 0: one MLP."""
    experts_per_token: int = 0
    """Number of experts per token."""
    expert_inner: int = 0
    shared_inner: int = 0
    """Inner size of the shared expert."""
    max_positions: int = 0
    """Maximum sequence length of the model; 0: unknown."""

    @property
    def attention_linears(self) -> list[LinearShape]:
        """Projections of queries, keys, values and output."""
        h, d = self.hidden, self.head_dim
        return [
            LinearShape("q_proj", h, self.heads * d, self.qkv_bias),
            LinearShape("k_proj", h, self.kv_heads * d, self.qkv_bias),
            LinearShape("v_proj", h, self.kv_heads * d, self.qkv_bias),
            LinearShape("o_proj", self.heads * d, h, self.out_bias),
        ]

    @property
    def mlp_linears(self) -> list[LinearShape]:
        """Gate, up and down projection of the MLP or of the shared expert; empty if there is neither."""
        inner = self.shared_inner if self.experts else self.inner
        h = self.hidden
        return [
            LinearShape("gate_proj", h, inner),
            LinearShape("up_proj", h, inner),
            LinearShape("down_proj", inner, h),
        ] * (inner > 0)

    @property
    def linears(self) -> list[LinearShape]:
        """The linear layers that `all-linear` adapters cover."""
        return [*self.attention_linears, *self.mlp_linears]

    @property
    def expert_params(self) -> int:
        """Parameters of all experts of a block, and of the router."""
        return self.experts * (3 * self.hidden * self.expert_inner + self.hidden)

    @property
    def norm_params(self) -> int:
        """Parameters of the norms of a block."""
        return self.norms * self.hidden + (2 * self.head_dim if self.head_norms else 0)

    @property
    def block_params(self) -> int:
        """Parameters of a block."""
        return sum(linear.params for linear in self.linears) + self.expert_params + self.norm_params

    @property
    def embedding_params(self) -> int:
        """Parameters of one matrix over the vocabulary."""
        return self.vocab * self.hidden

    @property
    def outside_params(self) -> int:
        """Parameters outside the blocks: embedding, head, last norm."""
        return self.embedding_params * (1 if self.is_tied else 2) + self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self.layers * self.block_params + self.outside_params

    @property
    def multiplying_params(self) -> int:
        """Parameters used in products for one token: all but the input embedding and the inactive experts."""
        idle = self.layers * (self.experts - self.experts_per_token) * 3 * self.hidden * self.expert_inner
        return self.params - (0 if self.is_tied else self.embedding_params) - idle


def find_model_folder(path: Path) -> Path:
    """Return the folder of a model or an adapter: `path`, or the model inside a run folder."""
    run = RunFolder(path)
    candidates = (path, run.best_model, run.final_model)
    return next(
        (
            folder
            for folder in candidates
            if any((folder / name).is_file() for name in ("config.json", ADAPTER_CONFIG_FILE))
        ),
        path,
    )


def read_shape(config: Mapping[str, Any], name: str) -> DecoderShape:
    """Return the shape that a config.json describes.

    Args:
        name: name of the file, for errors.

    Raises:
        DataError: sizes are missing or not positive numbers, or the blocks are of another kind.
    """
    model_type = str(config.get("model_type", ""))
    if isinstance(config.get("text_config"), Mapping):
        return read_shape(
            {**config["text_config"], "model_type": config["text_config"].get("model_type", model_type)}, name
        )
    unsupported = [key for key in _UNSUPPORTED_KEYS if config.get(key)]
    if unsupported:
        raise DataError(
            f"{name} describes blocks of another kind ({', '.join(unsupported)}), whose memory is not known here",
            f"plan a model of the kind of {_FAMILY_NAMES}",
        )
    hidden, heads = _require_size(config, "hidden_size", name), _require_size(config, "num_attention_heads", name)
    experts = _optional_size(config, ("num_experts", "num_local_experts", "n_routed_experts"), name)
    dense_inner = _optional_size(config, ("intermediate_size",), name)
    shared_inner = _optional_size(config, ("shared_expert_intermediate_size",), name)
    kv_heads = _optional_size(config, ("num_key_value_heads",), name) or heads
    head_dim = _optional_size(config, ("head_dim",), name)
    _require_multiple(config, name, "num_attention_heads", "num_key_value_heads" if heads % kv_heads else "")
    _require_multiple(config, name, "hidden_size", "num_attention_heads" if hidden % heads and not head_dim else "")
    return DecoderShape(
        vocab=_require_size(config, "vocab_size", name),
        hidden=hidden,
        layers=_require_size(config, "num_hidden_layers", name),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        inner=dense_inner if experts else _require_size(config, "intermediate_size", name),
        is_tied=bool(config.get("tie_word_embeddings", model_type in _TIED_FAMILIES)),
        qkv_bias=bool(config.get("attention_bias", model_type in _ATTENTION_BIAS_FAMILIES)),
        out_bias=bool(config.get("attention_bias", False)) and model_type not in _ATTENTION_BIAS_FAMILIES,
        head_norms=model_type in _HEAD_NORM_FAMILIES,
        norms=4 if model_type in _FOUR_NORM_FAMILIES else 2,
        experts=experts,
        experts_per_token=_optional_size(config, ("num_experts_per_tok",), name) if experts else 0,
        expert_inner=(_optional_size(config, ("moe_intermediate_size",), name) or dense_inner) if experts else 0,
        shared_inner=shared_inner if experts else 0,
        max_positions=_optional_size(config, ("max_position_embeddings",), name),
    )


def describe_unknown_family(config: Mapping[str, Any]) -> str:
    """Return a note about an unknown model family of a config.json; empty if the family is known."""
    text_config = config.get("text_config")
    model_type = (text_config if isinstance(text_config, Mapping) else config).get("model_type") or config.get(
        "model_type"
    )
    if isinstance(model_type, str) and model_type in _KNOWN_FAMILIES:
        return ""
    reason = f"model_type {str(model_type)[:60]} is not known here" if model_type else "no model_type"
    return f"{reason}: taken for one like Llama"


def _require_multiple(config: Mapping[str, Any], name: str, size_key: str, divisor_key: str) -> None:
    if divisor_key:
        raise DataError(
            f"{name}: {size_key} {config[size_key]} is no multiple of {divisor_key} {config[divisor_key]}",
            "look at the file",
        )


def _require_size(config: Mapping[str, Any], key: str, name: str) -> int:
    if key not in config:
        raise DataError(f"{name} has no {key}", f"give the config.json of a causal language model like {_FAMILY_NAMES}")
    return _optional_size(config, (key,), name) or refuse_size(config, key, name)


def _optional_size(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    """Return the value of the first of `keys` that is set; 0 if none is."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            refuse_size(config, key, name)
        return int(value)
    return 0


def refuse_size(config: Mapping[str, Any], key: str, name: str) -> NoReturn:
    """Reject a model because of one of its sizes.

    Raises:
        DataError: always.
    """
    value = repr(config.get(key))[:60]
    raise DataError(f"{name}: {key} is {value}, not a whole number from 1 to {MAX_SIZE:,}", "look at the file")
