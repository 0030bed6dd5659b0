"""Settings of models that see: which of their parts are trained, and how large their pictures become."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import Data, require_setting
from anabatic.config.sections.train_jobs import TuneJob

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

    def __post_init__(self) -> None:
        self.train = [part.strip() for entry in self.train for part in entry.split(",")]
        unknown = next((part for part in self.train if part not in MODEL_PARTS), None)
        require_setting(unknown is None, f'vision.train names "{unknown}"', f"parts are {', '.join(MODEL_PARTS)}")
        low, high = self.min_pixels, self.max_pixels
        for name, pixels in (("max_pixels", high), ("min_pixels", low)):
            require_setting(pixels is None or pixels >= 1, f"vision.{name} is {pixels}", "use 1 or more")
        fits = low is None or high is None or low <= high
        require_setting(fits, f"vision.min_pixels is {low}, vision.max_pixels is {high}", "swap them")


@dataclass(kw_only=True)
class SeeingJob(TuneJob):
    """The training of a model that may see, on rows that may have pictures."""

    data: PictureData = field(default_factory=PictureData)
    vision: Vision = field(default_factory=Vision)
