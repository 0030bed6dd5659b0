"""The sizes of a decoder model, read from its config.json. No torch, no weights.

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

ADAPTER = "adapter_config.json"

_ATTENTION_BIAS = frozenset({"qwen2", "qwen2_moe"})
"""Families whose queries, keys and values have a bias that config.json does not name (their modeling files)."""
_HEAD_NORMS = frozenset({"qwen3", "qwen3_moe", "gemma3_text", "gemma3"})
"""Families that norm every query and key head."""
_FOUR_NORMS = frozenset({"gemma2", "gemma3_text", "gemma3", "glm4"})
"""Families with a norm behind attention and MLP, too."""
_TIED = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3", "cohere", "cohere2"})
"""Families whose embedding is the head unless config.json says otherwise."""
_OTHER_ATTENTION = ("kv_lora_rank", "linear_num_value_heads", "state_size", "attn_layer_period")
"""Keys of models whose blocks are not (only) attention with queries, keys and values."""
_PLAIN = frozenset(
    ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3")
    + ("gemma3_text", "cohere", "cohere2", "glm", "glm4", "phi3", "olmo2", "granite")
)
"""Families whose blocks are as `Shape` has them."""
_KINDS = "Qwen2, Qwen3, Llama, Mistral, Gemma, GLM or Phi-3"
MOST = 10**9
"""No size of a model is greater."""


@dataclass(frozen=True)
class Linear:
    """A matrix of a block."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def params(self) -> int:
        """Weight and bias."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Shape:
    """What memory and time depend on."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    head_norms: bool = False
    norms: int = 2
    """Norms of a block over the hidden size."""
    experts: int = 0
    """Experts of a block; 0: one MLP."""
    chosen: int = 0
    """Experts that see a token."""
    expert_inner: int = 0
    shared_inner: int = 0
    """Inner size of the expert that sees every token."""
    positions: int = 0
    """Longest segment that the model was made for; 0: not said."""

    @property
    def attention(self) -> list[Linear]:
        """Queries, keys, values, output."""
        h, d = self.hidden, self.head_dim
        return [
            Linear("q_proj", h, self.heads * d, self.qkv_bias),
            Linear("k_proj", h, self.kv_heads * d, self.qkv_bias),
            Linear("v_proj", h, self.kv_heads * d, self.qkv_bias),
            Linear("o_proj", self.heads * d, h, self.out_bias),
        ]

    @property
    def mlp(self) -> list[Linear]:
        """Gate, up and down of the MLP, or of the expert that sees every token; none where there is neither."""
        inner = self.shared_inner if self.experts else self.inner
        h = self.hidden
        return [Linear("gate_proj", h, inner), Linear("up_proj", h, inner), Linear("down_proj", inner, h)] * (inner > 0)

    @property
    def linears(self) -> list[Linear]:
        """What `all-linear` adapters reach."""
        return [*self.attention, *self.mlp]

    @property
    def expert_params(self) -> int:
        """All experts of a block, and the router."""
        return self.experts * (3 * self.hidden * self.expert_inner + self.hidden)

    @property
    def norm_params(self) -> int:
        """Of a block."""
        return self.norms * self.hidden + (2 * self.head_dim if self.head_norms else 0)

    @property
    def block(self) -> int:
        """Parameters of a block."""
        return sum(linear.params for linear in self.linears) + self.expert_params + self.norm_params

    @property
    def embedding(self) -> int:
        """Parameters of one matrix over the vocabulary."""
        return self.vocab * self.hidden

    @property
    def outside(self) -> int:
        """Parameters outside the blocks: embedding, head, last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def params(self) -> int:
        """All parameters."""
        return self.layers * self.block + self.outside

    @property
    def multiplying(self) -> int:
        """Parameters that multiply a token: all but the input embedding and the experts that do not see it."""
        idle = self.layers * (self.experts - self.chosen) * 3 * self.hidden * self.expert_inner
        return self.params - (0 if self.tied else self.embedding) - idle


def folder_of(path: Path) -> Path:
    """Return the folder of a model or an adapter: `path`, or the model of a run folder."""
    run = RunFolder(path)
    inside = (path, run.best_model, run.final_model)
    return next((one for one in inside if any((one / name).is_file() for name in ("config.json", ADAPTER))), path)


def read(config: Mapping[str, Any], name: str) -> Shape:
    """Return the shape that a config.json describes.

    Args:
        name: of the file, for errors.

    Raises:
        DataError: sizes are missing or no positive numbers, or the blocks are of another kind.
    """
    kind = str(config.get("model_type", ""))
    if isinstance(config.get("text_config"), Mapping):
        return read({**config["text_config"], "model_type": config["text_config"].get("model_type", kind)}, name)
    strange = [key for key in _OTHER_ATTENTION if config.get(key)]
    if strange:
        raise DataError(
            f"{name} describes blocks of another kind ({', '.join(strange)}), whose memory is not known here",
            f"plan a model of the kind of {_KINDS}",
        )
    hidden, heads = _size(config, "hidden_size", name), _size(config, "num_attention_heads", name)
    experts = _optional(config, ("num_experts", "num_local_experts", "n_routed_experts"), name)
    own = _optional(config, ("intermediate_size",), name)
    shared = _optional(config, ("shared_expert_intermediate_size",), name)
    kv_heads = _optional(config, ("num_key_value_heads",), name) or heads
    head_dim = _optional(config, ("head_dim",), name)
    _require_multiple(config, name, "num_attention_heads", "num_key_value_heads" if heads % kv_heads else "")
    _require_multiple(config, name, "hidden_size", "num_attention_heads" if hidden % heads and not head_dim else "")
    return Shape(
        vocab=_size(config, "vocab_size", name),
        hidden=hidden,
        layers=_size(config, "num_hidden_layers", name),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        inner=own if experts else _size(config, "intermediate_size", name),
        tied=bool(config.get("tie_word_embeddings", kind in _TIED)),
        qkv_bias=bool(config.get("attention_bias", kind in _ATTENTION_BIAS)),
        out_bias=bool(config.get("attention_bias", False)) and kind not in _ATTENTION_BIAS,
        head_norms=kind in _HEAD_NORMS,
        norms=4 if kind in _FOUR_NORMS else 2,
        experts=experts,
        chosen=_optional(config, ("num_experts_per_tok",), name) if experts else 0,
        expert_inner=(_optional(config, ("moe_intermediate_size",), name) or own) if experts else 0,
        shared_inner=shared if experts else 0,
        positions=_optional(config, ("max_position_embeddings",), name),
    )


def strange(config: Mapping[str, Any]) -> str:
    """Return what is to be minded of the family that a config.json names; empty where its blocks are known."""
    inner = config.get("text_config")
    kind = (inner if isinstance(inner, Mapping) else config).get("model_type") or config.get("model_type")
    if isinstance(kind, str) and kind in _PLAIN:
        return ""
    return f"{f'model_type {str(kind)[:60]} is not known here' if kind else 'no model_type'}: taken for one like Llama"


def _require_multiple(config: Mapping[str, Any], name: str, whole: str, part: str) -> None:
    if part:
        raise DataError(f"{name}: {whole} {config[whole]} is no multiple of {part} {config[part]}", "look at the file")


def _size(config: Mapping[str, Any], key: str, name: str) -> int:
    if key not in config:
        raise DataError(f"{name} has no {key}", f"give the config.json of a causal language model like {_KINDS}")
    return _optional(config, (key,), name) or refuse_size(config, key, name)


def _optional(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    """The first of `keys` that is there; 0 where none is."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
            refuse_size(config, key, name)
        return int(value)
    return 0


def refuse_size(config: Mapping[str, Any], key: str, name: str) -> NoReturn:
    """Refuse a model for one of its sizes.

    Raises:
        DataError: always.
    """
    shown = repr(config.get(key))[:60]
    raise DataError(f"{name}: {key} is {shown}, not a whole number from 1 to {MOST:,}", "look at the file")
