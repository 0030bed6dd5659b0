"""What of a model is trained: adapters, a part of it, or all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class Lora:
    """Low-rank adapters, saved in PEFT's format."""

    r: int = 16
    """Rank."""
    alpha: float | None = None
    """The adapter's output is scaled by alpha / r; default: 2 r."""
    dropout: float = 0.0
    """Share of the adapter's inputs that is zeroed in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter, by the end of their name; all-linear: every one but the head."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved beside the adapter, such as embed_tokens and lm_head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train the length of the weights' rows (arXiv 2402.09353)."""
    init: Literal["default", "pissa"] = "default"
    """default: the adapter begins at zero; pissa: with the weights' largest singular vectors (arXiv 2404.02948)."""

    def __post_init__(self) -> None:
        require_setting(self.r >= 1, f"lora.r is {self.r}", "use a rank from 1; 8 to 64 is common")
        require_setting(self.alpha is None or self.alpha > 0, f"lora.alpha is {self.alpha}", "use a positive number")
        require_setting(
            0.0 <= self.dropout < 1.0, f"lora.dropout is {self.dropout}", "use a share from 0 up to, not including, 1"
        )
        require_setting(bool(self.target_modules), "lora.target_modules is empty", "name layers, or all-linear")
        both = self.use_dora and self.init == "pissa"
        require_setting(not both, "lora.use_dora and lora.init pissa are both set", "use one of them")


@dataclass(kw_only=True)
class Freeze:
    """Train a part of the model, leave the rest as it is."""

    last_layers: int = 2
    """Blocks at the end that are trained."""
    train: list[str] = field(default_factory=list)
    """Regular expressions; parameters whose name one of them finds are trained, too."""

    def __post_init__(self) -> None:
        require_setting(self.last_layers >= 0, f"freeze.last_layers is {self.last_layers}", "use 0 or more")
        some = self.last_layers > 0 or bool(self.train)
        require_setting(
            some, "freeze leaves nothing to train", "raise freeze.last_layers, or name parameters in freeze.train"
        )
