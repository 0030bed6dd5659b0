"""`anabatic data`: look at rows before a training reads them, measure and check them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import Data, require_setting
from anabatic.config.sections.train_jobs import PictureData, PictureSizes


@dataclass(kw_only=True)
class DataPreviewJob:
    """Show the first rows as the model sees them, with what it learns from marked."""

    inputs: list[str] = field(default_factory=list)
    """Sources, as in data.train: files, folders, globs, built-in sources, data sets of a hub."""
    model: str | None = None
    """Model or tokenizer folder: its tokenizer and chat template render the rows. Without one, rows are text."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name, as in `sft`."""
    train_on_inputs: bool = False
    """Learn from user and system turns as well, as in `sft`."""
    last_turn_only: bool = False
    """Learn from the last turn of the assistant alone, as in `sft`."""
    rows: int = 3
    """Rows of each source."""
    json: bool = False
    """Print one JSON object instead of text."""
    thumbnails: int = 0
    """Longer side in pixels of small copies of pictures in the JSON object, as data URIs; 0: none."""
    data: PictureData = field(default_factory=PictureData)
    vision: PictureSizes = field(default_factory=PictureSizes)

    def __post_init__(self) -> None:
        require_setting(bool(self.inputs), "no data is given", "anabatic data preview FILE")
        require_setting(0 <= self.thumbnails <= 512, f"thumbnails is {self.thumbnails}", "use 0 to 512 pixels")
        both = self.train_on_inputs and self.last_turn_only
        require_setting(not both, "train_on_inputs and last_turn_only are both set", "use one of them")
        require_setting(1 <= self.rows <= 1000, f"rows is {self.rows}", "use 1 to 1000")


@dataclass(kw_only=True)
class DataStatsJob:
    """Measure data: rows, lengths, languages and duplicates of each source."""

    inputs: list[str] = field(default_factory=list)
    """Sources, as in data.train: files, folders, globs, built-in sources, data sets of a hub."""
    model: str | None = None
    """Model or tokenizer folder: lengths are counted in its tokens as well, as its chat template renders them."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name, as in `sft`."""
    seq_len: int | None = None
    """With a model: count the rows that are longer than this many tokens."""
    near: bool = True
    """Look for rows that are nearly the same, too: about 0.6 KiB of memory a row."""
    json: bool = False
    """Print one JSON object instead of text."""
    data: PictureData = field(default_factory=PictureData)

    def __post_init__(self) -> None:
        require_setting(bool(self.inputs), "no data is given", "anabatic data stats FILE")
        require_setting(
            self.seq_len is None or self.model is not None,
            "seq_len is given without a model to count tokens",
            "name its tokenizer as well: --model FOLDER",
        )
        require_setting(self.seq_len is None or self.seq_len >= 2, f"seq_len is {self.seq_len}", "use at least 2")


@dataclass(kw_only=True)
class DataCheckJob:
    """Check data before training: bad rows, duplicates, and held-out rows that the training data gives away.

    Exit status 1 if there are bad rows or leaks.
    """

    inputs: list[str] = field(default_factory=list)
    """Training sources, as in data.train: files, folders, globs, built-in sources, data sets of a hub."""
    near: bool = True
    """Look for training rows that are nearly the same, too: about 0.6 KiB of memory a row."""
    similarity: float = 0.8
    """Two rows are nearly the same from this Jaccard similarity of their 16-byte n-grams, 0.7 to 1."""
    findings: str | None = None
    """Write every finding to this file, one JSON object a line."""
    strict: bool = False
    """Exit status 1 for duplicates and contradictory answers, too."""
    json: bool = False
    """Print one JSON object instead of text."""
    data: PictureData = field(default_factory=PictureData)

    def __post_init__(self) -> None:
        require_setting(bool(self.inputs), "no data is given", "anabatic data check FILE")
        require_setting(
            0.7 <= self.similarity <= 1.0, f"similarity is {self.similarity}", "use a similarity from 0.7 to 1"
        )


@dataclass(kw_only=True)
class DataTokenizeJob:
    """Tokenise training and held-out text before a training, into the cache that the training reads.

    The shards are the same whichever engine tokenises. A training finds them if its tokenizer, `batch.seq_len`, `data`
    and cache are those given here.
    """

    inputs: list[str] = field(default_factory=list)
    """Training sources, as in data.train: files, folders, globs, built-in sources, data sets of a hub."""
    tokenizer: str | None = None
    """Tokenizer folder of the training."""
    seq_len: int = 1024
    """Longest segment in tokens: batch.seq_len of the training."""
    engine: Literal["local", "ray"] = "local"
    """Who tokenises: the cores of this machine, or those of a Ray cluster, while this one reads and writes."""
    address: str = "auto"
    """The Ray cluster; auto: RAY_ADDRESS, else the one that runs on this machine."""
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        require_setting(bool(self.inputs), "no data is given", "anabatic data tokenize FOLDER --tokenizer FOLDER")
        require_setting(self.tokenizer is not None, "no tokenizer is given", "name its folder: --tokenizer FOLDER")
        require_setting(self.seq_len >= 2, f"seq_len is {self.seq_len}", "use at least 2 tokens; 1024 is common")
