"""Attention layers other than plain queries, keys and values: latent attention, and linear attention by delta rules.

Sizes, products and saved tensors follow transformers 5.23 (its modeling files), which builds these layers:

- latent attention: DeepSeek-V2, arXiv 2405.04434, section 2.1; its indexer: DeepSeek-V3.2, arXiv 2512.02556, section 2
- gated delta rule: arXiv 2412.06464, in chunks as in arXiv 2406.06484, section 3.3; computed by `device/delta_rule.py`
- Kimi delta attention: arXiv 2510.26692, section 3, with a decay per channel
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

CHUNK = 64
"""Tokens of a chunk of a delta rule (transformers, `torch_chunk_gated_delta_rule`)."""


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


class MixingProduct(NamedTuple):
    """A product between tokens, in operations and elements per token of the forward pass.

    Attributes:
        unit: "half" follows the precision of the products, "single" is always fp32.
    """

    unit: Literal["half", "single"]
    flops: float
    elements: float


class CacheSize(NamedTuple):
    """What a layer keeps of one sequence to generate: elements in the cache's precision, and fp32 elements."""

    elements: float
    state_elements: float = 0.0


class AttentionKind(Protocol):
    """What memory and time need to know of such a layer."""

    @property
    def label(self) -> str:
        """Name for users."""

    @property
    def other_params(self) -> int:
        """Parameters outside linear layers."""

    def list_linears(self, hidden: int) -> list[LinearShape]:
        """Return the linear layers, as transformers names them."""

    def iter_products(self, seq_len: int) -> Iterator[MixingProduct]:
        """Yield the products between tokens of a sequence."""

    def count_saved_bytes(self, width: int, seq_len: int) -> float:
        """Return the bytes per token saved for the backward pass, `width` bytes an element, without layer inputs."""

    def count_vector_elements(self) -> float:
        """Return the elements per token that elementwise operators read and write in the forward pass."""

    def measure_cache(self, tokens: int) -> CacheSize:
        """Return the cache of a sequence."""


def count_attended(seq_len: float, limit: int = 0) -> float:
    """Return the mean number of keys of a causal query: half the sequence, or less if a window of `limit` keys is
    shorter. Of a sequence of s tokens the first w queries see 1 to w keys, the others w.
    """
    if not limit or seq_len <= limit:
        return seq_len / 2
    return limit - limit * limit / (2 * seq_len)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention; with `index_heads` a lightning indexer chooses `index_topk` keys for each query.

    Attributes:
        query_rank: rank of the query projection; 0: one matrix.
        has_indexer: the layer computes its own choice; else it takes that of an earlier layer (GLM-5).
    """

    heads: int
    query_rank: int
    latent_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0
    has_indexer: bool = False

    @property
    def label(self) -> str:
        """Name for users."""
        return "sparse latent attention" if self.index_heads else "latent attention"

    @property
    def query_dim(self) -> int:
        """Size of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    def list_linears(self, hidden: int) -> list[LinearShape]:
        """Return the projections down to the latents and up to the heads, and those of the indexer."""
        queries = self.heads * self.query_dim
        if self.query_rank:
            linears = [
                LinearShape("q_a_proj", hidden, self.query_rank, self.bias),
                LinearShape("q_b_proj", self.query_rank, queries),
            ]
        else:
            linears = [LinearShape("q_proj", hidden, queries)]
        linears += [
            LinearShape("kv_a_proj_with_mqa", hidden, self.latent_rank + self.rope_dim, self.bias),
            LinearShape("kv_b_proj", self.latent_rank, self.heads * (self.nope_dim + self.value_dim)),
            LinearShape("o_proj", self.heads * self.value_dim, hidden, self.bias),
        ]
        return [*linears, *self._list_indexer_linears(hidden)]

    def _list_indexer_linears(self, hidden: int) -> list[LinearShape]:
        if not self.has_indexer:
            return []
        return [
            LinearShape("wq_b", self.query_rank, self.index_heads * self.index_dim),
            LinearShape("wk", hidden, self.index_dim),
            LinearShape("weights_proj", hidden, self.index_heads),
        ]

    @property
    def other_params(self) -> int:
        """Norms of the latents, and of the indexer's keys (with bias)."""
        return self.query_rank + self.latent_rank + 2 * self.index_dim * self.has_indexer

    def iter_products(self, seq_len: int) -> Iterator[MixingProduct]:
        """Yield the scores and their product with the values, and the indexer's scores against all earlier keys.

        Training expands keys and values (arXiv 2405.04434, equations 9 to 19). An indexer's choice counts as skipped
        keys (arXiv 2512.02556, equation 2).
        """
        keys = count_attended(seq_len, self.index_topk)
        yield MixingProduct(
            "half",
            2.0 * keys * self.heads * (self.query_dim + self.value_dim),
            2.0 * self.heads * (self.query_dim + self.value_dim),
        )
        if self.has_indexer:
            scores = 2.0 * count_attended(seq_len) * self.index_heads
            yield MixingProduct("half", scores * (self.index_dim + 1), (self.index_heads + 1.0) * self.index_dim)

    def count_saved_bytes(self, width: int, seq_len: int) -> float:
        """Return the bytes of inputs of the norms and of the products up, queries, keys, values and output.

        The values are a view of the product that also holds the keys before rotation. The indexer has no gradient.
        """
        latents = 2 * (self.query_rank + self.latent_rank) + self.rope_dim  # before and after their norms
        queries = keys = self.heads * self.query_dim
        values = self.heads * (self.nope_dim + self.value_dim)
        norms = 4.0 * ((self.query_rank > 0) + 1)
        return width * (latents + queries + keys + values + self.heads * self.value_dim) + 8.0 * 8 * self.heads + norms

    def count_vector_elements(self) -> float:
        """Return the elements that norms, rotation and the copies to whole heads read and write."""
        queries, values = self.heads * self.query_dim, self.heads * self.value_dim
        return 2.0 * (self.query_rank + self.latent_rank) + 4.0 * queries + 2.0 * values

    def measure_cache(self, tokens: int) -> CacheSize:
        """Return the latent, the rotated part of the key and the indexer's key of each token (arXiv 2405.04434,
        table 1)."""
        return CacheSize(tokens * (self.latent_rank + self.rope_dim + self.index_dim * self.has_indexer))


@dataclass(frozen=True)
class DeltaAttention:
    """Linear attention by the gated delta rule, after a short convolution.

    Attributes:
        layout: "qkvz": one projection of queries, keys, values and gate, one of the two gates of a head (Qwen3-Next);
            "split": four of these (Qwen3.5); "kimi": six, with a decay per channel through a low rank.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    layout: Literal["qkvz", "split", "kimi"] = "split"

    @property
    def label(self) -> str:
        """Name for users."""
        return "Kimi delta attention" if self.layout == "kimi" else "gated delta rule"

    @property
    def keys(self) -> int:
        """Elements of the keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of the values of a token."""
        return self.value_heads * self.value_dim

    def copy_keys(self, context: int, tensor: int = 1) -> DeltaAttention:
        """Return the layer with the key heads that all ranks compute together, some of them more than once
        (`models/linear_attention/delta_heads.py`)."""
        return replace(self, key_heads=math.lcm(self.key_heads // tensor, context) * tensor)

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    def list_linears(self, hidden: int) -> list[LinearShape]:
        """Return the projections."""
        if self.layout == "qkvz":
            return [
                LinearShape("in_proj_qkvz", hidden, 2 * self.keys + 2 * self.values),
                LinearShape("in_proj_ba", hidden, 2 * self.value_heads),
                LinearShape("out_proj", self.values, hidden),
            ]
        if self.layout == "split":
            return [
                LinearShape("in_proj_qkv", hidden, self.conv_channels),
                LinearShape("in_proj_z", hidden, self.values),
                LinearShape("in_proj_b", hidden, self.value_heads),
                LinearShape("in_proj_a", hidden, self.value_heads),
                LinearShape("out_proj", self.values, hidden),
            ]
        return [
            LinearShape("q_proj", hidden, self.keys),
            LinearShape("k_proj", hidden, self.keys),
            LinearShape("v_proj", hidden, self.values),
            LinearShape("f_a_proj", hidden, self.value_dim),
            LinearShape("f_b_proj", self.value_dim, self.values),
            LinearShape("b_proj", hidden, self.value_heads),
            LinearShape("g_a_proj", hidden, self.value_dim),
            LinearShape("g_b_proj", self.value_dim, self.values),
            LinearShape("o_proj", self.values, hidden),
        ]

    @property
    def other_params(self) -> int:
        """The convolution, the decay (a factor per head, a bias per head or channel) and the norm of the output."""
        decay_bias = self.values if self.layout == "kimi" else self.value_heads
        return self.conv_channels * self.kernel + self.value_heads + decay_bias + self.value_dim

    def iter_products(self, seq_len: int) -> Iterator[MixingProduct]:
        """Yield the products of a chunk of C tokens, in fp32, for heads of k keys and v values.

        Within a chunk (arXiv 2406.06484, equations 8 to 11): keys with keys and queries with keys, 2 C k each, once for
        each key head; the triangular systems of values and decayed keys, C (k + v); scores with values, 2 C v. Between
        chunks: the old state read by keys and queries and the new one written, 2 k v each.
        """
        k, v = self.key_dim, self.value_dim
        flops = self.key_heads * CHUNK * 4.0 * k + self.value_heads * (CHUNK * (k + 3.0 * v) + 6.0 * k * v)
        yield MixingProduct("single", flops, self.value_heads * (6.0 * k + 5.0 * v))
        yield MixingProduct("single", 2.0 * self.kernel * self.conv_channels, 2.0 * self.conv_channels)

    def count_saved_bytes(self, width: int, seq_len: int) -> float:
        """Return the bytes that the rule in plain torch saves: of `width` bytes an element around it, in fp32 within.

        Counted in `device/delta_rule.py` and `models/linear_attention/delta_net.py`: inputs and outputs of the
        convolution; six copies
        of the keys or queries of key heads; queries, keys and the solved system of value heads; six tensors of values
        in fp32 and two in the precision around the rule; four score matrices of a chunk of value heads and two of key
        heads; a state per chunk; decays and factors.

        Kimi's is counted in transformers' function: the decays between two tokens of a chunk are a tensor per key
        element, kept three times, and the inverse is built row by row.
        """
        k, v, heads = self.key_dim, self.value_dim, self.value_heads
        outside, state = width * 2.0 * self.conv_channels, k * v / CHUNK
        if self.layout == "kimi":
            rows = (CHUNK - 1) * (2 * CHUNK - 1) / 6  # squares of 1 to C - 1, per token
            return outside + 4.0 * heads * (3.0 * CHUNK * k + rows + 2.5 * CHUNK + 24.0 * k + state)
        outside += 2.0 * width * self.values
        # queries and keys in fp32 before their norms: views of the convolution's output, or copies
        read = 4.0 * (self.conv_channels if width == 4 else 2 * self.keys)
        of_keys = self.key_heads * (6.0 * k + 2.0 * CHUNK + 2.0)
        of_values = heads * (3.0 * k + 7.0 * v + 4.0 * CHUNK + 8.0 + state)
        return outside + read + 4.0 * (of_keys + of_values)

    def count_vector_elements(self) -> float:
        """Return the elements that copies to chunks, norms of queries and keys, gates and decays read and write."""
        return self.value_heads * (12.0 * self.key_dim + 8.0 * self.value_dim) + 4.0 * self.conv_channels

    def measure_cache(self, tokens: int) -> CacheSize:
        """Return the last inputs of the convolution, and the fp32 state of each head, whatever the tokens."""
        return CacheSize(self.conv_channels * self.kernel, float(self.value_heads * self.key_dim * self.value_dim))
