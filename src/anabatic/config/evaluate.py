"""`anabatic eval`: bits per byte and generated tasks."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.shared import Data, Device, require


@dataclass(kw_only=True)
class EvalJob:
    """Measure a model: bits per byte on held-out text, accuracy on tasks beside chance."""

    model: str = ""
    """Hugging Face folder or run folder."""
    adapter: list[str] = field(default_factory=list)
    """Adapters that become part of the weights first, one after the other: FOLDER, or FOLDER@0.5 to count by half."""
    out: str | None = None
    """Write eval.json here; default: the model's run folder."""
    data: Data = field(default_factory=Data)
    """Text for bits per byte: `valid`, or the held-out share of `train`."""
    tasks: list[str] = field(default_factory=list)
    """Task sources, such as `task:spelling#200`; their test split is used."""
    seq_len: int | None = None
    """Longest segment for the loss; default: the model's maximum, at most 2048."""
    tokens: int | None = None
    """Held-out tokens at most; default all."""
    batch_tokens: int = 8192
    """Tokens per forward pass."""
    max_new_tokens: int = 64
    """Longest answer to a task."""
    batch_size: int = 32
    """Answers generated at once."""
    show: int = 3
    """Answers per task to print."""
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        require(bool(self.model), "model is not given", "give --model FOLDER")
        require(
            bool(self.tasks or self.data.valid or self.data.train),
            "nothing to measure",
            "give --tasks task:all, or text with --data.valid PATH",
        )
        for name in ("batch_tokens", "max_new_tokens", "batch_size"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}", "use 1 or more")
