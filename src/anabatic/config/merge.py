"""`anabatic merge`: an adapter and its model become one model."""

from __future__ import annotations

from dataclasses import dataclass

from anabatic.config.shared import require


@dataclass(kw_only=True)
class MergeJob:
    """Write the model that an adapter makes of its base model, as an ordinary Hugging Face folder."""

    model: str = ""
    """Adapter folder, or a run folder that holds one."""
    out: str = ""
    """Folder to write; it must not exist yet."""

    def __post_init__(self) -> None:
        require(bool(self.model), "model is not given", "give --model FOLDER, for example runs/lora")
        require(bool(self.out.strip()), "out is not given", "give --out FOLDER")
