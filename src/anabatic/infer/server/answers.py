"""The objects that clients get: whole answers, and the chunks of streamed ones.

Source of the shapes: platform.openai.com/docs/api-reference/chat/object and /chat/streaming, /completions/object.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabatic.infer.request import Completion, Request
from anabatic.infer.server.errors import ApiError
from anabatic.infer.server.worker import Piece
from anabatic.infer.tool_calls import Reader

_DONE = b"data: [DONE]\n\n"


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
        reader: makes what finds the calls of tools in one answer; None: nothing looks for them.
    """

    chat: bool
    model: str
    echo: Sequence[str] = ()
    logprobs: bool = False
    reader: Callable[[], Reader | None] = lambda: None
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

    def teller(self, requests: Sequence[Request], n: int, usage: bool) -> Teller:
        """Return what tells the answers while they are made."""
        return Chunks(self, requests, n, usage)

    def _choice(self, at: int, answer: Completion, request: Request) -> dict[str, Any]:
        out: dict[str, Any] = {"index": at, "finish_reason": answer.finish_reason, "logprobs": None}
        if self.chat:
            out["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
            if reader := self.reader():
                heard = Heard(reader)
                text, calls = heard.push(answer.text, True)
                out["finish_reason"] = heard.end(answer.finish_reason)
                if calls:
                    out["message"] |= {"content": text or None, "tool_calls": [_unnumbered(call) for call in calls]}
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

    def call(self, at: int, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk with calls of tools, each whole."""
        return self._chunk(at, {"delta": {"tool_calls": list(calls)}})

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


class Teller(Protocol):
    """Turns the pieces of an answer into what is sent."""

    def begin(self) -> list[bytes]:
        """Return what comes before the first piece."""

    def take(self, piece: Piece) -> list[bytes]:
        """Return what a piece becomes."""

    def finish(self) -> list[bytes]:
        """Return what comes behind the last piece."""

    def fault(self, error: ApiError) -> list[bytes]:
        """Return what ends an answer that has failed."""


class Chunks:
    """The chunks of a streamed answer, as server-sent events.

    Args:
        usage: the last one holds the counts of tokens.
    """

    def __init__(self, shape: Shape, requests: Sequence[Request], n: int, usage: bool) -> None:
        self._shape, self._requests, self._n, self._usage = shape, requests, n, usage
        self._told = [0] * len(requests)
        readers = [shape.reader() for _ in requests]
        self._heard = [None if reader is None else Heard(reader) for reader in readers]

    def begin(self) -> list[bytes]:
        """Return the chunks that open the answers."""
        return [_event(self._shape.first(at)) for at in range(len(self._requests))]

    def take(self, piece: Piece) -> list[bytes]:
        """Return the chunks of a piece."""
        shape, at, text, end = self._shape, piece.index, piece.text, piece.finish_reason
        calls: list[dict[str, Any]] = []
        if (one := self._heard[at]) is not None:
            text, calls = one.push(text, bool(end))
            end = one.end(end)
        chunks = []
        if text or (shape.logprobs and piece.tokens > self._told[at]):
            chunks.append(shape.piece(at, text, self._requests[at], self._told[at], piece.tokens))
            self._told[at] = piece.tokens
        if calls:
            chunks.append(shape.call(at, calls))
        if end:
            chunks.append(shape.last(at, end))
        return [_event(chunk) for chunk in chunks]

    def finish(self) -> list[bytes]:
        """Return the counts, if they are wanted, and the end."""
        counts = [_event(self._shape.counts(self._requests, self._n))] if self._usage else []
        return [*counts, _DONE]

    def fault(self, error: ApiError) -> list[bytes]:
        """Return the error as a chunk."""
        return [_event(error.body())]


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _unnumbered(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call as whole answers have it: only streamed ones are numbered."""
    return {key: value for key, value in call.items() if key != "index"}


class Heard:
    """One answer that may call tools, as it comes."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._calls = 0

    def push(self, piece: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take a piece; return the text and the calls that are certain.

        Args:
            last: nothing more will come.
        """
        events = self._reader.push(piece) + (self._reader.finish() if last else [])
        calls = []
        for call in [event.call for event in events if event.call is not None]:
            function = {"name": call.name, "arguments": call.arguments}
            calls.append({"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function})
        first, self._calls = self._calls, self._calls + len(calls)
        numbered = [{"index": first + at} | call for at, call in enumerate(calls)]
        return "".join(event.text for event in events), numbered

    def end(self, finish_reason: str) -> str:
        """Return why the answer ended: whoever called has not merely stopped."""
        return "tool_calls" if self._calls and finish_reason == "stop" else finish_reason


class _Words:
    """Tokens as clients read them."""

    def __init__(self, request: Request) -> None:
        self._tokenizer = request.tokenizer

    def text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
