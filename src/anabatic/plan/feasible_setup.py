"""Which setups a training would reject after loading its model: the plan rejects them at once, with the numbers."""

from __future__ import annotations

import math

from anabatic.core.errors import ConfigError
from anabatic.plan.attention_kinds import DeltaAttention, LatentAttention
from anabatic.plan.training_setup import TrainingSetup


def require_feasible(setup: TrainingSetup) -> None:
    """Reject a setup that the training would reject after loading its model.

    Raises:
        ConfigError: tensor ranks cannot divide the heads, the segments are too long, or quantized weights would be
            trained.
    """
    s, tensor_ranks = setup.shape, setup.tensor
    others = [kind.attention for kind, _ in s.count_kinds() if kind.attention]
    delta = [kind for kind in others if isinstance(kind, DeltaAttention) and kind.layout != "kimi"]
    if tensor_ranks > 1 and len(delta) < len(others):
        other = next(kind for kind in others if kind not in delta)
        raise ConfigError(
            f"parallel.tensor is {tensor_ranks}, and {other.label} is not divided among tensor ranks",
            "use --parallel.tensor 1; zero3 divides its weights",
        )
    sizes = {
        "attention heads": s.heads,
        "key/value heads": s.kv_heads,
        "key heads of linear attention": math.gcd(*(kind.key_heads for kind in delta)),
        "inner neurons": s.mlp_linears[0].outputs if s.mlp_linears else 0,
    }
    if any(size % tensor_ranks for size in sizes.values()):
        message = ", ".join(f"{size} {name}" for name, size in sizes.items() if size)
        max_degree = math.gcd(*sizes.values())
        degrees = " or ".join(str(degree) for degree in range(1, max_degree + 1) if max_degree % degree == 0)
        raise ConfigError(
            f"parallel.tensor is {tensor_ranks}, which does not divide all of {message}", f"use {degrees}"
        )
    if setup.expert > 1:
        _require_divisible_experts(setup)
    if setup.context > 1:
        _require_divisible_tokens(setup)
    heads = s.heads // tensor_ranks
    if heads % setup.context and setup.context_method == "ulysses":
        degrees = " or ".join(str(degree) for degree in range(1, heads + 1) if heads % degree == 0)
        each = f" on each of {tensor_ranks} tensor ranks" if tensor_ranks > 1 else ""
        raise ConfigError(
            f"parallel.context is {setup.context}, which does not divide {heads} attention heads{each}",
            f"use {degrees}, or --parallel.context-method ring",
        )
    if 0 < s.max_positions < setup.seq_len:
        message = f"batch.seq_len is {setup.seq_len}, the model was made for {s.max_positions} positions"
        raise ConfigError(message, f"use --batch.seq-len {s.max_positions} or less")
    if setup.quantize != "none" and setup.tuner != "lora":
        message = f"quantize is {setup.quantize}, and the model itself is trained"
        raise ConfigError(message, "use --tuner lora, or --quantize none")
    if setup.quantize != "none" and (setup.is_sharded or tensor_ranks > 1):
        message = (
            f"quantize is {setup.quantize}, and {setup.strategy if setup.is_sharded else 'parallel.tensor'} divides it"
        )
        raise ConfigError(message, "packed weights are whole on every device: use ddp, or --quantize none")


def _require_divisible_experts(setup: TrainingSetup) -> None:
    """Check that expert ranks can divide the experts of every block (`models/experts/expert_parallel.py`).

    Raises:
        ConfigError: they cannot.
    """
    counts = sorted({kind.experts for kind, _ in setup.shape.count_kinds() if kind.experts})
    if not counts:
        raise ConfigError(
            f"parallel.expert is {setup.expert}, and the model has no experts",
            "leave parallel.expert at 1; --parallel.strategy zero3 divides every model",
        )
    if any(count % setup.expert for count in counts):
        common = math.gcd(*counts)
        degrees = [str(degree) for degree in range(2, common + 1) if common % degree == 0]
        raise ConfigError(
            f"parallel.expert is {setup.expert}, which does not divide {' and '.join(map(str, counts))} experts",
            f"use {' or '.join(degrees)}" if degrees else "leave parallel.expert at 1",
        )


def _require_divisible_tokens(setup: TrainingSetup) -> None:
    """Check that context ranks can exchange what the attention of every block needs (`parallel/context_ring.py`).

    Raises:
        ConfigError: they cannot.
    """
    for kind, count in setup.shape.count_kinds():
        attention = kind.attention
        if isinstance(attention, DeltaAttention):
            _require_divisible_states(setup, attention, count)
        reason = (
            f"attention in windows of {kind.window:,} tokens"
            if 0 < kind.window < setup.seq_len
            else "attention with sinks"
            if kind.has_sinks
            else f"{attention.label} with values of {attention.value_dim} elements and keys of {attention.query_dim}"
            if isinstance(attention, LatentAttention) and attention.value_dim != attention.query_dim
            else ""
        )
        if reason and setup.context_method == "ring":
            raise ConfigError(
                f"parallel.context-method is ring, which has no {reason}", "use --parallel.context-method ulysses"
            )


def _require_divisible_states(setup: TrainingSetup, attention: DeltaAttention, blocks: int) -> None:
    """Check that context ranks can divide the heads of linear attention (`models/delta_heads.py`).

    Raises:
        ConfigError: they cannot.
    """
    if attention.layout == "kimi":
        raise ConfigError(
            f"parallel.context is {setup.context}, and {attention.label} ({blocks} blocks) reads tokens in order",
            "use --parallel.context 1",
        )
    heads = attention.value_heads // setup.tensor
    if heads % setup.context:
        common = heads if setup.context_method == "ring" else math.gcd(heads, setup.shape.heads // setup.tensor)
        each = f" on each of {setup.tensor} tensor ranks" if setup.tensor > 1 else ""
        raise ConfigError(
            f"parallel.context is {setup.context}, which does not divide {heads} value heads of the"
            f" {attention.label}{each}",
            f"use {' or '.join(str(degree) for degree in range(1, common + 1) if common % degree == 0)}",
        )
