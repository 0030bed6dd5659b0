"""Sizes of a decoder that memory and time depend on: of equal blocks, or of blocks of several kinds in an order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from anabatic.plan.shapes.attention_kinds import AttentionKind, CacheSize, LinearShape, count_attended
from anabatic.plan.shapes.tower_sizes import TowerShape


@dataclass(frozen=True)
class DecoderShape:
    """The sizes that memory and time depend on.

    A model with blocks of several kinds lists them in `kinds`, each a shape of equal blocks, and which block is of
    which kind in `order`; its own sizes are those of the largest kind.
    """

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
    attention: AttentionKind | None = None
    """Attention without queries, keys and values of one size; the sizes of heads then say nothing."""
    gates_output: bool = False
    """The query projection also makes a gate of the attention's output (Qwen3-Next)."""
    window: int = 0
    """A query attends to this many keys; 0: all."""
    has_sinks: bool = False
    """A learned score per head takes part in the softmax (gpt-oss)."""
    expert_bias: bool = False
    """Router and experts have biases."""
    shared_gate: bool = False
    """A linear layer of one output weighs the shared expert."""
    tower_params: int = 0
    """Parameters of the tower of a model that sees, with its projector."""
    tower: TowerShape | None = None
    """Sizes of that tower; None: not known, or text alone."""
    kinds: tuple[DecoderShape, ...] = ()
    order: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    """What of the published model is not as trained here."""

    @cached_property
    def attention_linears(self) -> list[LinearShape]:
        """Projections of the attention."""
        h, d = self.hidden, self.head_dim
        if self.attention is not None:
            return self.attention.list_linears(h)
        return [
            LinearShape("q_proj", h, self.heads * d * (2 if self.gates_output else 1), self.qkv_bias),
            LinearShape("k_proj", h, self.kv_heads * d, self.qkv_bias),
            LinearShape("v_proj", h, self.kv_heads * d, self.qkv_bias),
            LinearShape("o_proj", self.heads * d, h, self.out_bias),
        ]

    @cached_property
    def mlp_linears(self) -> list[LinearShape]:
        """Gate, up and down projection of the MLP or of the shared expert; empty if there is neither."""
        inner = self.shared_inner if self.experts else self.inner
        h = self.hidden
        linears = [
            LinearShape("gate_proj", h, inner),
            LinearShape("up_proj", h, inner),
            LinearShape("down_proj", inner, h),
        ] * (inner > 0)
        return linears + [LinearShape("shared_expert_gate", h, 1)] * (self.shared_gate and inner > 0)

    @cached_property
    def linears(self) -> list[LinearShape]:
        """The linear layers of a block that `all-linear` adapters cover; of several kinds each layer once."""
        if self.kinds:
            return list(dict.fromkeys(layer for kind in self.kinds for layer in kind.linears))
        return [*self.attention_linears, *self.mlp_linears]

    @cached_property
    def expert_params(self) -> int:
        """Parameters of all experts of a block, and of the router."""
        bias = 2 * self.expert_inner + self.hidden + 1 if self.expert_bias else 0
        return self.experts * (3 * self.hidden * self.expert_inner + self.hidden + bias)

    @cached_property
    def stacked_params(self) -> int:
        """Parameters of all experts of a block, without the router: those that expert ranks divide."""
        bias = 2 * self.expert_inner + self.hidden if self.expert_bias else 0
        return self.experts * (3 * self.hidden * self.expert_inner + bias)

    @cached_property
    def norm_params(self) -> int:
        """Parameters of a block outside its linear layers and experts: norms, and what an attention has besides."""
        if self.attention is not None:
            return self.norms * self.hidden + self.attention.other_params
        head_norms = 2 * self.head_dim if self.head_norms else 0
        return self.norms * self.hidden + head_norms + (self.heads if self.has_sinks else 0)

    @cached_property
    def block_params(self) -> int:
        """Parameters of a block; of several kinds the largest."""
        if self.kinds:
            return max(kind.block_params for kind in self.kinds)
        return sum(linear.params for linear in self.linears) + self.expert_params + self.norm_params

    @cached_property
    def idle_params(self) -> int:
        """Parameters of a block that take no part in a token: experts that were not chosen."""
        return (self.experts - self.experts_per_token) * self.stacked_params // max(1, self.experts)

    def count_kinds(self, blocks: int | None = None, from_end: bool = True) -> list[tuple[DecoderShape, int]]:
        """Return the kinds among the last (or first) `blocks` blocks, and how many there are of each."""
        count = self.layers if blocks is None else min(blocks, self.layers)
        if not self.kinds:
            return [(self, count)]
        chosen = self.order[self.layers - count :] if from_end else self.order[:count]
        return [(self.kinds[kind], number) for kind, number in sorted(Counter(chosen).items())]

    @cached_property
    def embedding_params(self) -> int:
        """Parameters of one matrix over the vocabulary."""
        return self.vocab * self.hidden

    @cached_property
    def outside_params(self) -> int:
        """Parameters outside the blocks: embedding, head, last norm."""
        return self.embedding_params * (1 if self.is_tied else 2) + self.hidden

    @cached_property
    def params(self) -> int:
        """All parameters."""
        return sum(count * kind.block_params for kind, count in self.count_kinds()) + self.outside_params

    @cached_property
    def multiplying_params(self) -> int:
        """Parameters used in products for one token: all but the input embedding and the inactive experts."""
        idle = sum(count * kind.idle_params for kind, count in self.count_kinds())
        return self.params - (0 if self.is_tied else self.embedding_params) - idle

    @cached_property
    def active_params(self) -> int:
        """Parameters that a token reads, embedding and head included: the "A" in names like 30B-A3B."""
        return self.params - sum(count * kind.idle_params for kind, count in self.count_kinds())

    def count_mixing_flops(self, seq_len: int) -> float:
        """Return the operations between tokens of one block, per token of the forward pass.

        Attention: two products of 2 head_dim operations for each key that a query sees (arXiv 2205.05198, appendix A).
        """
        if self.attention is not None:
            return sum(product.flops for product in self.attention.iter_products(seq_len))
        return 4.0 * count_attended(seq_len, self.window) * self.heads * self.head_dim

    def measure_cache(self, tokens: int) -> CacheSize:
        """Return what a sequence of `tokens` tokens leaves in the caches of all blocks (transformers, cache_utils)."""
        sizes = [(_measure_block_cache(kind, tokens), count) for kind, count in self.count_kinds()]
        elements = sum(count * size.elements for size, count in sizes)
        return CacheSize(elements, sum(count * size.state_elements for size, count in sizes))

    def describe_kinds(self) -> str:
        """Return how many blocks are of which attention and of which MLP; empty if all are plain and alike."""
        attentions: Counter[str] = Counter()
        mlps: Counter[str] = Counter()
        for kind, count in self.count_kinds():
            attentions[_name_attention(kind)] += count
            mlps[f"{kind.experts} experts" if kind.experts else "one MLP"] += count
        if len(attentions) == len(mlps) == 1 and "full attention" in attentions and "one MLP" in mlps:
            return ""
        return "; ".join(
            ", ".join(f"{count} with {name}" for name, count in counter.items()) for counter in (attentions, mlps)
        )


def _name_attention(kind: DecoderShape) -> str:
    if kind.attention is not None:
        return kind.attention.label
    return f"attention in windows of {kind.window:,}" if kind.window else "full attention"


def _measure_block_cache(kind: DecoderShape, tokens: int) -> CacheSize:
    if kind.attention is not None:
        return kind.attention.measure_cache(tokens)
    # transformers keeps one key less than the window, as the next one is added before it attends
    kept = min(tokens, kind.window - 1) if kind.window else tokens
    return CacheSize(2.0 * kept * kind.kv_heads * kind.head_dim)
