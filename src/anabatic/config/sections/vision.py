"""Settings of models that see: which of their parts are trained, and how large their pictures become."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import Data

MODEL_PARTS = ("language", "projector", "tower")


@dataclass(kw_only=True)
class PictureData(Data):
    """Sources as in the section `data` of other commands, and the place of their pictures."""

    media: str | None = None
    """Folder that paths of pictures start from; default: the folder of the rows' file."""


@dataclass(kw_only=True)
class Vision:
    """Models that see."""

    train: list[str] = field(default_factory=list)
    """Parts that are trained: language, projector, tower; default: language, and with tuner full the projector too."""
    max_pixels: int | None = None
    """Larger pictures are made smaller; default: what the model's preprocessor_config.json says."""
    min_pixels: int | None = None
    """Smaller pictures are made larger; default: what the model's preprocessor_config.json says."""
