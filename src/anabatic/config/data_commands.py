"""`anabatic data`: look at rows before a training reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import Data, require_setting


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
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        require_setting(bool(self.inputs), "no data is given", "anabatic data preview FILE")
        both = self.train_on_inputs and self.last_turn_only
        require_setting(not both, "train_on_inputs and last_turn_only are both set", "use one of them")
        require_setting(1 <= self.rows <= 1000, f"rows is {self.rows}", "use 1 to 1000")
