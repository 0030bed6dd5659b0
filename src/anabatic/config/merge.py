"""`anabatic merge`: adapters and their model become one model."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class MergeJob:
    """Write the model that adapters make of their base model, as an ordinary Hugging Face folder."""

    model: str = ""
    """Adapter folder, or a run folder that holds one; with `adapter` also the base model."""
    adapter: list[str] = field(default_factory=list)
    """Adapters that become part of the weights first, one after the other: FOLDER, or FOLDER@0.5 to count by half."""
    out: str = ""
    """Folder to write; it must not exist yet."""

    def __post_init__(self) -> None:
        require_setting(bool(self.model), "model is not given", "give --model FOLDER, for example runs/lora")
        require_setting(bool(self.out.strip()), "out is not given", "give --out FOLDER")
