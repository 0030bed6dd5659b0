"""`anabatic tokenizer train|eval`."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import Data, require_setting


@dataclass(kw_only=True)
class TokenizerTrainJob:
    """Train a byte-level BPE tokenizer and save it as a Hugging Face folder with a chat template."""

    out: str = "runs/tokenizer"
    """Folder to write."""
    overwrite: bool = False
    """Write into a folder that holds a tokenizer or a model already."""
    vocab_size: int = 32_768
    """Entries, special tokens included."""
    max_chars: int | None = 2_000_000_000
    """Read at most this many characters."""
    max_doc_chars: int = 10_000
    """Take at most this many characters of a document, so that a few long ones do not decide."""
    min_frequency: int = 2
    """Merge only pairs seen at least this often."""
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        require_setting(
            self.vocab_size >= 280, f"vocab_size is {self.vocab_size}", "256 bytes and the special tokens need 280"
        )
        require_setting(self.vocab_size <= 2_000_000, f"vocab_size is {self.vocab_size}", "use at most 2,000,000")
        require_setting(self.max_doc_chars >= 1, f"max_doc_chars is {self.max_doc_chars}", "use 1 or more")
        require_setting(
            self.max_chars is None or self.max_chars >= 1, f"max_chars is {self.max_chars}", "use 1 or more"
        )
        require_setting(
            bool(self.data.train), "data.train is empty", "give --data.train PATH, or `stdlib:` to try it out"
        )


@dataclass(kw_only=True)
class TokenizerEvalJob:
    """Compare how well tokenizers compress several kinds of text."""

    tokenizers: list[str] = field(default_factory=list)
    """Folders (or tokenizer.json files) to compare."""
    data: Data = field(default_factory=Data)
    """More text to measure; built in: English, Chinese, code, maths."""
    json: bool = False
    """Print JSON instead of a table."""

    def __post_init__(self) -> None:
        require_setting(bool(self.tokenizers), "no tokenizer is given", "give --tokenizers FOLDER [FOLDER ...]")
