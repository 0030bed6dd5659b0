"""`anabatic infer`: answer the rows of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.chat import Sampling
from anabatic.config.sections.common import DeviceSettings, require_setting


@dataclass(kw_only=True)
class Batching:
    """How many requests are answered at once, and in how much memory."""

    batch: int = 16
    """Requests that run at once; the others wait."""
    max_len: int | None = None
    """Tokens of a request at most, prompt and answer together; default: the model's positions, at most 8,192."""
    cache_gib: float | None = None
    """Memory for keys and values, allocated at the start; default: what `batch` requests of `max_len` need, at most
    0.4 of what is free."""
    step_tokens: int = 2048
    """Tokens of prompts that are read in one step; longer prompts are read in pieces between the others' tokens."""

    def __post_init__(self) -> None:
        for name in ("batch", "step_tokens"):
            require_setting(getattr(self, name) >= 1, f"batching.{name} is {getattr(self, name)}", "use 1 or more")
        require_setting(
            self.max_len is None or self.max_len >= 2, f"batching.max_len is {self.max_len}", "use 2 or more"
        )
        given = self.cache_gib is None or self.cache_gib > 0
        require_setting(given, f"batching.cache_gib is {self.cache_gib}", "use GiB above 0, such as 2")


def _default_sampling() -> Sampling:
    return Sampling(temperature=0.0, max_new_tokens=512)


@dataclass(kw_only=True)
class InferJob:
    """Generate answers for the rows of files: conversations, questions or texts in, answers out, in the same order.

    A job that was stopped resumes where it was when the same command is given again.
    """

    model: str = ""
    """Hugging Face folder, run folder, or adapter folder, whose base model is found by its adapter_config.json."""
    ckpt_dir: str | None = None
    """Checkpoint instead of a model: an adapter or a model in RUN/checkpoint-N, or what a run of ours saved there."""
    adapter: list[str] = field(default_factory=list)
    """Adapters to merge into the weights first, one after the other: FOLDER, or FOLDER@0.5 for half of its effect."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name: chatml, llama3, qwen2.5, qwen3,
    mistral, deepseek, gemma, glm4, phi3, phi4, llama2."""
    inputs: list[str] = field(default_factory=list)
    """Files of rows: .jsonl[.gz|.zst] with messages, conversations, prompt, query, question, instruction or text, or
    .txt with a prompt a line. Words without an option are inputs."""
    out: str = ""
    """File NAME.jsonl to write, or a folder for answers.jsonl."""
    system: str | None = None
    """System message of the conversations that have none."""
    raw: bool = False
    """Continue prompts as plain text, without the chat template."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Hold the weights of the linear layers in few bits: less memory; slower where the device must widen them."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> its name in the files, for example `{query: question_text}`."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A broken row stops the job, or is left out, counted and reported."""
    long_share: float = 0.05
    """Prompts without room for an answer are skipped, counted and reported; more than this share of them (and more
    than one) stop the job."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue where an earlier run of the same job was stopped; never: start over."""
    batching: Batching = field(default_factory=Batching)
    sampling: Sampling = field(default_factory=_default_sampling)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        both = bool(self.model) != bool(self.ckpt_dir)
        require_setting(both, "give either model or ckpt_dir", "anabatic infer -m FOLDER rows.jsonl -o answers.jsonl")
        require_setting(
            bool(self.inputs),
            "inputs is empty",
            "name files, before options that take several words: anabatic infer rows.jsonl -m FOLDER -o answers.jsonl",
        )
        require_setting(0.0 <= self.long_share <= 1.0, f"long_share is {self.long_share}", "use a share from 0 to 1")
        require_setting(bool(self.out.strip()), "out is not given", "give -o answers.jsonl")
