"""The objects that clients get: whole answers, and the chunks of streamed ones.

Source of the shapes: platform.openai.com/docs/api-reference/chat/object and /chat/streaming, /completions/object.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anabatic.infer.request import Completion, Request


def usage(requests: Sequence[Request], n: int) -> dict[str, Any]:
    """Return the counts of tokens; a prompt with n answers counts once."""
    prompt = sum(len(request.prompt) for request in requests[::n])
    answer = sum(len(request.ids) for request in requests)
    cached = sum(request.cached for request in requests[::n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass
class Shape:
    """How one request is answered: its identity, and whether it is a conversation.

    Attributes:
        chat: a conversation; False: a text that goes on.
        model: name as asked.
        echo: texts by which the answers begin.
        logprobs: they are wanted.
    """

    chat: bool
    model: str
    echo: Sequence[str] = ()
    logprobs: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _base(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def whole(self, answers: Sequence[Completion], requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the object of finished answers."""
        choices = [
            self._choice(at, answer, request)
            for at, (answer, request) in enumerate(zip(answers, requests, strict=True))
        ]
        return self._base(False) | {"choices": choices, "usage": usage(requests, n)}

    def _choice(self, at: int, answer: Completion, request: Request) -> dict[str, Any]:
        out: dict[str, Any] = {"index": at, "finish_reason": answer.finish_reason, "logprobs": None}
        if self.chat:
            out["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            out["text"] = (self.echo[at] if self.echo else "") + answer.text
        if self.logprobs:
            out["logprobs"] = self._logprobs(request, 0, len(request.ids))
        return out

    def first(self, at: int) -> dict[str, Any]:
        """Return the chunk that opens an answer."""
        if self.chat:
            return self._chunk(at, {"delta": {"role": "assistant", "content": ""}})
        return self._chunk(at, {"text": self.echo[at] if self.echo else ""})

    def piece(self, at: int, text: str, request: Request, told: int, upto: int) -> dict[str, Any]:
        """Return a chunk with text, and the log-probabilities of tokens `told` to `upto`."""
        body: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        if self.logprobs:
            body["logprobs"] = self._logprobs(request, told, upto)
        return self._chunk(at, body)

    def last(self, at: int, finish_reason: str) -> dict[str, Any]:
        """Return the chunk that closes an answer."""
        return self._chunk(at, {"delta": {}} if self.chat else {"text": ""}, finish_reason)

    def counts(self, requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the chunk with the counts of tokens."""
        return self._base(True) | {"choices": [], "usage": usage(requests, n)}

    def _chunk(self, at: int, body: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": at, "logprobs": None, "finish_reason": finish_reason} | body
        return self._base(True) | {"choices": [choice]}

    def _logprobs(self, request: Request, start: int, end: int) -> dict[str, Any]:
        words = _Words(request)
        top = request.top_logprobs
        rows = range(start, end)
        if self.chat:
            content = [
                words.entry(request.ids[at], request.logprobs[at])
                | {"top_logprobs": [words.entry(*pair) for pair in (top[at] if top else ())]}
                for at in rows
            ]
            return {"content": content, "refusal": None}
        tokens = [words.text(request.ids[at]) for at in rows]
        offsets, place = [], len("".join(words.text(one) for one in request.ids[:start]))
        for token in tokens:
            offsets.append(place)
            place += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [request.logprobs[at] for at in rows],
            "top_logprobs": [{words.text(token): value for token, value in top[at]} for at in rows] if top else None,
            "text_offset": offsets,
        }


class _Words:
    """Tokens as clients read them."""

    def __init__(self, request: Request) -> None:
        self._tokenizer = request.tokenizer

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
