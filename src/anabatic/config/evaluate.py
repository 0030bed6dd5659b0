"""`anabatic eval`: bits per byte and tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import Data, DeviceSettings, require_setting
from anabatic.config.sections.sandbox import SandboxSettings


@dataclass(kw_only=True)
class EvalJob:
    """Measure a model: bits per byte on held-out text, tasks compared with a baseline."""

    model: str = ""
    """Hugging Face folder, run folder, or OWNER/NAME of a hub."""
    adapter: list[str] = field(default_factory=list)
    """Adapters to merge into the weights first, one after the other: FOLDER, or FOLDER@0.5 for half of its effect."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name: chatml, llama3, qwen2.5, qwen3,
    mistral, deepseek, gemma, glm4, phi3, phi4, llama2."""
    out: str | None = None
    """Write eval.json, eval.md and samples.jsonl here; default: the model's run folder."""
    data: Data = field(default_factory=Data)
    """Text for bits per byte: `valid`, or the held-out share of `train`."""
    tasks: list[str] = field(default_factory=list)
    """Names (`arc_easy,hellaswag`), YAML files of your own, generated tasks (`task:spelling`); `#200` asks so many."""
    tasks_from: str | None = None
    """Folder with the data sets of tasks; nothing is fetched then. Default, and `hub`: fetched, see HF_ENDPOINT."""
    shots: int | None = None
    """Examples shown before each question; default: as each task says."""
    limit: int | None = None
    """Items of a task at most, spread evenly over its rows; default: all, of generated tasks 200."""
    seed: int = 0
    """Of the examples drawn at random and of the bootstrap."""
    resume: Literal["auto", "never"] = "auto"
    """auto: cached answers of this model are reused; never: recompute."""
    seq_len: int | None = None
    """Longest segment for the loss; default: the model's maximum, at most 2048."""
    tokens: int | None = None
    """Held-out tokens at most; default all."""
    batch_tokens: int = 8192
    """Tokens per forward pass."""
    max_new_tokens: int | None = None
    """Longest reply in tokens; default: as each task says, else 64."""
    batch_size: int = 32
    """Replies generated at once."""
    endpoint: str | None = None
    """Ask a served model at this address (OpenAI's completions); of `model` the tokenizer alone is read then."""
    show: int = 3
    """Replies per task to print."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        require_setting(bool(self.model), "model is not given", "anabatic eval FOLDER --tasks arc_easy")
        require_setting(
            bool(self.tasks or self.data.valid or self.data.train),
            "nothing to measure",
            "give --tasks task:all, or text with --data.valid PATH",
        )
        for name in ("batch_tokens", "batch_size"):
            require_setting(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}", "use 1 or more")
        require_setting(
            not (self.endpoint and (self.adapter or self.data.valid or self.data.train)),
            "endpoint is given, and an adapter or data",
            "adapters and bits per byte of `data` need the model here; leave endpoint out",
        )
        require_setting(
            self.max_new_tokens is None or self.max_new_tokens >= 1,
            f"max_new_tokens is {self.max_new_tokens}",
            "use 1 or more",
        )
        require_setting(self.limit is None or self.limit >= 1, f"limit is {self.limit}", "use 1 or more")
        require_setting(self.shots is None or self.shots >= 0, f"shots is {self.shots}", "use 0 or more")
