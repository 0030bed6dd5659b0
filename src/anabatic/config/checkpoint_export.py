"""`anabatic checkpoint export`: a model folder from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class CheckpointExportJob:
    """Write the model of a checkpoint as the run would write final_model: a Hugging Face folder, or an adapter's."""

    checkpoint: str = ""
    """Folder of a checkpoint, or a run folder, whose newest whole one is taken."""
    out: str = ""
    """Folder to write; it must not exist yet."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of the weights; auto: as they were trained."""

    def __post_init__(self) -> None:
        require_setting(
            bool(self.checkpoint.strip()), "checkpoint is not given", "name a run folder or a checkpoint in it"
        )
        require_setting(bool(self.out.strip()), "out is not given", "give --out FOLDER")
