"""A model from one dial, `depth`: width, heads and inner size follow, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from anabatic.config.pretrain import PretrainModel as ModelConfig
from anabatic.core.errors import ConfigError

HEAD_LADDER = ((1024, 128), (128, 64), (0, 32))
"""(smallest width, head size): small models keep several heads."""


@dataclass
class DerivedSizes:
    """Values derived from the dial and why; the user's own values come first and say so."""

    values: dict[str, float | int | bool] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add_value(self, name: str, given: float | None, derived: float, reason: str) -> None:
        """Take `given` where the user set it, else `derived`."""
        self.values[name] = derived if given is None else given
        self.reasons[name] = reason if given is None else "given"

    def get_int(self, name: str) -> int:
        """A value as an int."""
        return int(self.values[name])

    def format_lines(self) -> list[str]:
        """One printable line a value."""
        return [f"  {name} = {_format_value(value)} ({self.reasons[name]})" for name, value in self.values.items()]


def _format_value(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def derive_model_sizes(model: ModelConfig, vocab_size: int) -> DerivedSizes:
    """Derive the model's shape from its depth.

    Raises:
        ConfigError: the given sizes do not divide one another.
    """
    plan = DerivedSizes()
    plan.add_value("depth", None, model.depth, "the dial")
    rough = 64 * model.depth
    head_dim = next(size for width, size in HEAD_LADDER if (model.width or rough) >= width)
    head_dim = min(head_dim, model.head_dim)
    width = math.ceil(rough / head_dim) * head_dim
    plan.add_value("width", model.width, width, f"64 x depth, a multiple of the head size {head_dim}")
    width = plan.get_int("width")
    heads = model.heads or max(1, width // head_dim)
    plan.add_value("heads", model.heads, heads, f"width / {head_dim}")
    if model.heads is None and width % head_dim:
        raise ConfigError(
            f"model.width {width} is not a multiple of the head size {head_dim}",
            f"set model.width to {math.ceil(width / head_dim) * head_dim}, or model.heads",
        )
    if model.heads is not None:
        head_dim = _divide_evenly("model.width", width, "model.heads", heads)
    plan.add_value("head_dim", None, head_dim, "128 from width 1024, 64 from 128, else 32")
    plan.add_value("kv_heads", model.kv_heads, heads, "as many as query heads")
    _divide_evenly("model.heads", heads, "model.kv_heads", plan.get_int("kv_heads"))
    inner = math.ceil(width * 8 / 3 / 64) * 64
    plan.add_value("intermediate", model.intermediate, inner, "8/3 x width, a multiple of 64 (arXiv 2002.05202)")
    blocks = model.depth * (width * head_dim * 2 * (heads + plan.get_int("kv_heads")) + 3 * width * inner)
    share = 2 * vocab_size * width / (2 * vocab_size * width + blocks)
    tied = bool(share > 1 / 3) if model.tie_embeddings is None else model.tie_embeddings
    plan.values["tie_embeddings"] = tied
    plan.reasons["tie_embeddings"] = (
        f"embedding and head would be {share:.0%} of the weights" if model.tie_embeddings is None else "given"
    )
    return plan


def _divide_evenly(name: str, value: int, by: str, divisor: int) -> int:
    if value % divisor:
        raise ConfigError(f"{name} {value} is not a multiple of {by} {divisor}", f"choose {by} among its divisors")
    return value // divisor
