"""`anabatic chat`: talk to a model in the terminal."""

from __future__ import annotations

from dataclasses import dataclass, field

from anabatic.config.sections.common import DeviceSettings, require_setting
from anabatic.config.sections.sandbox import SandboxSettings
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import parse_whole


@dataclass(kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.7
    """0 takes the likeliest token."""
    top_k: int | None = 50
    """Only the k likeliest tokens."""
    top_p: float = 1.0
    """Only the likeliest tokens that hold this share of the probability."""
    min_p: float = 0.0
    """Only tokens that are at least this share as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1: tokens of the prompt and of the answer so far become less likely."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the answer holds already; from -2 to 2, as OpenAI has it."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token as often as the answer holds it already; from -2 to 2, as OpenAI has it."""
    logit_bias: dict[str, float] = field(default_factory=dict)
    """Number of a token -> what is added to its logit, for example `{1234: -100}` against it."""
    max_new_tokens: int = 256
    """Longest answer in tokens."""
    seed: int | None = None
    """Seed of the draws; default: another answer each time."""
    stop: list[str] = field(default_factory=list)
    """Texts that end the answer; they are no part of it."""
    top_logprobs: int = 0
    """Log-probabilities of so many of the likeliest tokens are kept in addition to those of the chosen ones."""
    choices: list[str] = field(default_factory=list)
    """The answer is one of these texts."""
    json_schema: str | None = None
    """The answer is JSON of this schema, itself JSON; `{}` allows any."""
    regex: str | None = None
    """The answer as a whole matches this regular expression."""

    def __post_init__(self) -> None:
        require_setting(self.temperature >= 0, f"temperature is {self.temperature}", "use 0 or more")
        require_setting(self.top_k is None or self.top_k >= 1, f"top_k is {self.top_k}", "use 1 or more")
        require_setting(0 < self.top_p <= 1, f"top_p is {self.top_p}", "use a share above 0, at most 1")
        require_setting(
            self.seed is None or 0 <= self.seed < 2**63, f"seed is {self.seed}", "use a whole number from 0"
        )
        require_setting(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}", "use 1 or more")
        require_setting(0 <= self.min_p <= 1, f"min_p is {self.min_p}", "use a share from 0 to 1; 0.05 is common")
        require_setting(
            self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}", "use 1 or more; 1.1"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require_setting(-2 <= value <= 2, f"{name} is {value}", "use a number from -2 to 2")
        for token, bias in self.logit_bias.items():
            require_setting(
                parse_whole(token) is not None,
                f"logit_bias names {token!r}",
                "name tokens by their numbers, as the tokenizer gives them",
            )
            require_setting(abs(bias) <= 100, f"logit_bias of {token} is {bias}", "use a number from -100 to 100")
        require_setting(all(self.stop), "a text of stop is empty", "leave it out")
        require_setting(0 <= self.top_logprobs <= 20, f"top_logprobs is {self.top_logprobs}", "use 0 to 20")
        require_setting(all(self.choices), "a text of choices is empty", "leave it out")
        forms = [name for name in ("choices", "json_schema", "regex") if getattr(self, name)]
        require_setting(len(forms) <= 1, f"{' and '.join(forms)} are given", "give one form of the answer")
        try:
            json_reader.loads(self.json_schema or "null")
        except ValueError as error:
            raise ConfigError(f"json_schema is no JSON: {error}", 'give a schema such as {"type": "object"}') from error


@dataclass(kw_only=True)
class ChatJob:
    """Talk to a model."""

    model: str = ""
    """Hugging Face folder or run folder."""
    adapter: list[str] = field(default_factory=list)
    """Adapters to merge into the weights first, one after the other: FOLDER, or FOLDER@0.5 for half of its effect."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name: chatml, llama3, qwen2.5, qwen3,
    mistral, deepseek, gemma, glm4, phi3, phi4, llama2."""
    prompt: list[str] = field(default_factory=list)
    """One-shot: say these lines one after another, print the answers and leave."""
    system: str | None = None
    """System message."""
    out: str | None = None
    """Append the conversation to chat.jsonl in this folder."""
    python: bool = True
    """Run the code that answers hold between <|python_start|> and <|python_end|>, and give them its output."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    history: bool = True
    """Keep the lines typed at a terminal for the next time, in a file that only you can read."""
    sampling: Sampling = field(default_factory=Sampling)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        require_setting(
            bool(self.model), "model is not given", "anabatic chat FOLDER, for example: anabatic chat runs/demo/sft"
        )
        require_setting(
            all(line.strip() for line in self.prompt), "a line of prompt is empty", "say something with -p 'TEXT'"
        )
