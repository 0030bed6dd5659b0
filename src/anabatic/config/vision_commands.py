"""`anabatic vision`: pictures that are drawn, a small model that sees them, and how well it answers."""

from __future__ import annotations

from dataclasses import dataclass

from anabatic.config.sections.common import require_setting


@dataclass(kw_only=True)
class VisionDrawJob:
    """Draw pictures with questions: colours, shapes, their number, digits and plots; no two pictures are equal.

    Writes train.jsonl, held_out.jsonl, both also without pictures (train_text.jsonl, held_out_text.jsonl), and the
    pictures.
    """

    out: str = "runs/pictures"
    """Folder to write."""
    train: int = 6000
    """Rows to train on."""
    held_out: int = 400
    """Rows to ask afterwards."""
    side: int = 64
    """Width and height of a picture in pixels."""
    seed: int = 0
    """Seed of the pictures."""

    def __post_init__(self) -> None:
        for name, most in (("train", 1_000_000), ("held_out", 100_000)):
            value = getattr(self, name)
            require_setting(1 <= value <= most, f"{name} is {value}", f"use 1 to {most:,}")
        require_setting(32 <= self.side <= 1024, f"side is {self.side}", "use 32 to 1024 pixels")


@dataclass(kw_only=True)
class VisionBuildJob:
    """Build a model that sees, of the Qwen3-VL kind, untrained: a folder for `sft`, with tokenizer and processor."""

    tokenizer: str = ""
    """Folder with tokenizer.json; the tokens of pictures are added."""
    out: str = "runs/untrained"
    """Folder to write."""
    depth: int = 3
    """Layers of the language model."""
    width: int = 128
    """Its width; heads have 32."""
    tower_depth: int = 3
    """Layers of the tower."""
    tower_width: int = 128
    """Its width; heads have 32."""
    patch: int = 8
    """Side of a patch in pixels; a token of a picture is 2 x 2 of them."""
    seed: int = 0
    """Seed of the weights."""

    def __post_init__(self) -> None:
        require_setting(bool(self.tokenizer), "no tokenizer is given", "name its folder: --tokenizer FOLDER")
        for name in ("width", "tower_width"):
            value = getattr(self, name)
            require_setting(value % 32 == 0 and 32 <= value <= 4096, f"{name} is {value}", "use a multiple of 32")
        for name in ("depth", "tower_depth", "patch"):
            value = getattr(self, name)
            require_setting(1 <= value <= 128, f"{name} is {value}", "use 1 to 128")


@dataclass(kw_only=True)
class VisionScoreJob:
    """Score answers about pictures by kind of question, beside those without the pictures and the most frequent answer.

    Writes eval.json, which the report of a pipeline shows.
    """

    rows: str = ""
    """The rows that were asked, as `vision draw` writes them: `category` is the kind of question."""
    answers: str = ""
    """Their answers, as `infer` writes them."""
    without: str = ""
    """The answers to the same rows without their pictures."""
    out: str = "runs/score"
    """Folder of eval.json."""
    show: int = 6
    """Pictures of each kind that the report shows."""

    def __post_init__(self) -> None:
        for name in ("rows", "answers", "without"):
            require_setting(bool(getattr(self, name)), f"{name} is not given", f"name a file: --{name} FILE")
        require_setting(0 <= self.show <= 100, f"show is {self.show}", "use 0 to 100")
