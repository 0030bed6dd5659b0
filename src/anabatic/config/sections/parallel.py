"""How a model is divided over the processes of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anabatic.config.sections.common import require_setting

Strategy = Literal["auto", "single", "ddp", "zero2", "zero3"]
Recompute = Literal["none", "selective", "full"]
"""What the backward pass makes anew: nothing, all but matrix products and attention, or whole blocks."""


@dataclass(kw_only=True)
class Parallel:
    """What each process holds of the model."""

    strategy: Strategy = "auto"
    """ddp: all of it; zero2: gradients and optimizer are shared out; zero3: the weights too; auto: ddp."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: with zero2 and zero3, weights, gradients and optimizer wait in the host's memory."""
    tensor: int = 1
    """Processes that share attention heads and MLPs and work on the same data; the others divide the data."""
    deepspeed: str | None = None
    """DeepSpeed's JSON file, or zero0, zero1, zero2, zero3, zero2-offload, zero3-offload: translated into settings."""

    def __post_init__(self) -> None:
        require_setting(self.tensor >= 1, f"parallel.tensor is {self.tensor}", "use 1 or more")
        sharded = self.strategy in ("zero2", "zero3")
        require_setting(
            self.offload == "none" or sharded or self.deepspeed is not None,
            f"parallel.offload is {self.offload}, parallel.strategy is {self.strategy}",
            "use zero2 or zero3 with it",
        )
