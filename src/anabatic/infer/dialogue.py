"""A conversation that fits into the engine: turns in, prompt tokens out, the oldest turns dropped first."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from anabatic.core.errors import DataError, UserError
from anabatic.data.tokenizer import chat_prompt
from anabatic.infer.engine import Engine, Request
from anabatic.infer.sampling import Sampling

Message = dict[str, str]


@dataclass
class Dialogue:
    """Who said what so far, and how the next answer is made.

    A model without a chat template has no turns: every line is continued alone.

    Attributes:
        engine: writes the answers.
        sampling: how; with a seed, every answer has a seed of its own that follows from it.
        system: system message, or None.
        messages: the turns, without the system message.
        dropped: messages that no longer fit, dropped for the latest answer.
        request: the latest answer's request.
    """

    engine: Engine
    sampling: Sampling
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    dropped: int = 0
    request: Request | None = None
    answers: int = 0

    @property
    def has_turns(self) -> bool:
        """True when the tokenizer has a chat template."""
        return bool(self.engine.tokenizer.chat_template)

    def transcript(self) -> list[Message]:
        """The system message and all turns that are still remembered."""
        start = [{"role": "system", "content": self.system}] if self.system else []
        return [*start, *self.messages]

    def forget(self) -> None:
        """Start over; the system message stays."""
        self.messages.clear()

    def say_again(self) -> Generator[str, None, None]:
        """Return another answer to the last message; it takes the place of the one before, as `say` does it.

        Raises:
            DataError: there is no message, or it is too long by now; what was said stays.
        """
        last = next((at for at in range(len(self.messages) - 1, -1, -1) if self.messages[at]["role"] == "user"), None)
        if last is None:
            raise DataError("there is no message to answer anew", "say something first")
        return self._said(self.messages[last]["content"], self.messages[:last])

    def say(self, text: str) -> Generator[str, None, None]:
        """Return the answer to `text`, which comes piece by piece; both are remembered.

        When the loop is left early, what was said so far is remembered.

        Raises:
            DataError: `text` alone is too long; nothing is remembered then.
            ConfigError: the form of the answer cannot be used; nothing is remembered then.
        """
        return self._said(text, list(self.messages))

    def _said(self, text: str, earlier: list[Message]) -> Generator[str, None, None]:
        before = list(self.messages)
        self.messages[:] = [*earlier, {"role": "user", "content": text}]
        try:
            request = self.engine.request(self._fit(text), self._next_sampling(), name=self._name())
        except UserError:
            self.messages[:] = before
            raise
        self.request = request
        self.answers += 1
        self.engine.submit([request])
        said: list[str] = []
        try:
            for piece in self.engine.follow(request):
                said.append(piece)
                yield piece
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})

    def _name(self) -> str:
        return "the system message with the question" if self.system and self.has_turns else "the message"

    def _next_sampling(self) -> Sampling:
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + self.answers)

    def _fit(self, text: str) -> list[int]:
        """Return the prompt; drop the oldest question and its answer until the new answer has room."""
        self.dropped = 0
        if not self.has_turns:
            self.messages[:] = self.messages[-1:]
            return continuation(self.engine.tokenizer, text)
        room = self.engine.max_len - min(self.sampling.max_new_tokens, self.engine.max_len // 2)
        prompt = self._prompt()
        while len(prompt) > room and len(self.messages) > 1:
            count = next((n for n, m in enumerate(self.messages[1:], 1) if m["role"] == "user"), 1)
            del self.messages[:count]
            self.dropped += count
            prompt = self._prompt()
        return prompt

    def _prompt(self) -> list[int]:
        return chat_prompt(self.engine.tokenizer, self.transcript())


def continuation(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of plain text as a document's beginning: behind the token that separates documents."""
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return ids if start is None else [start, *ids]
