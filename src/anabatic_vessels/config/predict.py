"""`anabatic classify predict`: which class segments and vessels belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import DeviceSettings, require_setting
from anabatic_vessels.config.tracks import TrackSettings


@dataclass(kw_only=True)
class ClassifyPredictJob:
    """Say which class segments belong to, and the vessels they are of."""

    model: str = ""
    """Folder of the classifier, or of the run that trained it."""
    inputs: list[str] = field(default_factory=list)
    """Rows of words (.jsonl) or AIS files; their classes are copied, not read. Words without an option are inputs."""
    text: list[str] = field(default_factory=list)
    """Words of one segment, quoted, instead of files; more are more segments."""
    out: str | None = None
    """File NAME.jsonl to write, or a folder for predictions.jsonl; default: to the screen."""
    level: Literal["segment", "vessel"] = "segment"
    """One row for each segment, or one for each vessel: the geometric mean of its segments' probabilities."""
    abstain: float = 0.0
    """Below this confidence no class is named: predicted_class is null, and class_name is ABSTAIN."""
    original_text: bool = True
    """Repeat the words in the rows."""
    batch_tokens: int = 16_384
    """Words per forward pass."""
    tracks: TrackSettings = field(default_factory=TrackSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        require_setting(bool(self.model), "model is not given", "give --model FOLDER, such as runs/classify")
        require_setting(
            bool(self.inputs) != bool(self.text),
            "give either files or text",
            'anabatic classify predict -m FOLDER FILE ... -o rows.jsonl, or --text "DT_NONE SPD_95 ..."',
        )
        require_setting(0 <= self.abstain <= 1, f"abstain is {self.abstain}", "use a confidence from 0 to 1")
        require_setting(self.batch_tokens >= 1, f"batch_tokens is {self.batch_tokens}", "use 1 or more")
        require_setting(self.device.nproc == 1, f"device.nproc is {self.device.nproc}", "predict runs in one process")
        require_setting(
            not self.tracks.keep_class_word, "tracks.keep_class_word is on", "the class word is what is to be found"
        )
