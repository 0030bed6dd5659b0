"""What the model says to `eval.sample_prompts` while it trains, so that a reader sees it learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anabatic.config.chat import Sampling
from anabatic.core.errors import DataError
from anabatic.core.formatting import to_valid_utf8
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.infer.engine import Engine
from anabatic.models.forward import ModelRoot
from anabatic.parallel.sharding import reshard_weights
from anabatic.train.metrics.recorder import MetricsRecorder

_MAX_ANSWER_TOKENS = 60
"""Tokens of an answer."""


@dataclass
class SamplePrompts:
    """Prompts, tokenised.

    Attributes:
        texts: as the user wrote them.
        prompts: their tokens.
        seq_len: tokens of prompt and answer at most.
        is_chat: the prompts are a user's turns; else beginnings of a text.
    """

    texts: list[str]
    prompts: list[list[int]]
    tokenizer: Any
    seq_len: int
    is_chat: bool

    def log_samples(self, root: ModelRoot, sharded: bool, step: int, metrics: MetricsRecorder) -> None:
        """Let the model answer each prompt, and record it; all ranks of a sharded one call this."""
        was_training = root.training
        root.eval()
        longest = max(map(len, self.prompts))
        engine = Engine(
            root.model,
            self.tokenizer,
            max_batch=len(self.prompts),
            max_len=min(self.seq_len, longest + _MAX_ANSWER_TOKENS + 4),
            root=root if sharded else None,
        )
        answers = engine.generate(self.prompts, Sampling(max_new_tokens=_MAX_ANSWER_TOKENS, seed=0))
        for text, answer in zip(self.texts, answers, strict=True):
            metrics.log_sample(step, text, answer.text, between="\n" if self.is_chat else "")
        reshard_weights(root)
        root.train(was_training)


def encode_sample_prompts(texts: list[str], tokenizer: Any, eot: int, seq_len: int, chat: bool) -> SamplePrompts | None:
    """Tokenise the prompts; before the training, because a wrong one must not end it. None: there are none.

    Args:
        eot: the token that begins a document.
        chat: put them through the tokenizer's chat template.

    Raises:
        DataError: a prompt is longer than a segment, or the template refuses it.
    """
    prompts = [_encode_prompt(to_valid_utf8(text), tokenizer, eot, chat) for text in texts]
    longest = max(map(len, prompts), default=0)
    if longest + 1 > seq_len:
        raise DataError(
            f"a prompt of eval.sample_prompts has {longest} tokens, batch.seq_len is {seq_len}", "use shorter prompts"
        )
    return SamplePrompts(texts, prompts, tokenizer, seq_len, chat) if prompts else None


def _encode_prompt(text: str, tokenizer: Any, eot: int, chat: bool) -> list[int]:
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": text}])
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return [eot, *ids]
