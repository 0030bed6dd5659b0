"""The objects that clients get: whole answers, and the chunks of streamed ones.

Source of the shapes: platform.openai.com/docs/api-reference/chat/object and /chat/streaming, /completions/object;
`reasoning_content` is DeepSeek's (api-docs.deepseek.com/guides/reasoning_model), which vLLM has, too.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from anabatic.infer.reasoning_parser import ReasoningParser
from anabatic.infer.request import Completion, Request
from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.server.engine_worker import TextDelta
from anabatic.infer.tool_call_parser import ToolCallParser

_DONE_EVENT = b"data: [DONE]\n\n"


def count_usage(requests: Sequence[Request], n: int) -> dict[str, Any]:
    """Return the counts of tokens; a prompt with n answers counts once."""
    prompt = sum(len(request.prompt) for request in requests[::n])
    answer = sum(len(request.ids) for request in requests)
    cached = sum(request.cached_tokens for request in requests[::n])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


@dataclass
class CompletionBuilder:
    """Build the answer to one request from its identity and kind.

    Attributes:
        is_chat: a conversation; False: a text that continues.
        model: name as asked.
        echo_texts: texts by which the answers begin.
        has_logprobs: they are wanted.
        has_token_ids: prompts and answers are wanted as tokens, too; names and places are vLLM's.
        weight_version: of the weights that answer, for whole answers; empty: not wanted.
        make_parser: makes what finds the calls of tools in one answer; None: nothing looks for them.
        make_reasoning_parser: makes what finds the reasoning before one answer; None: nothing looks for it.
    """

    is_chat: bool
    model: str
    echo_texts: Sequence[str] = ()
    has_logprobs: bool = False
    has_token_ids: bool = False
    weight_version: str = ""
    make_parser: Callable[[], ToolCallParser | None] = lambda: None
    make_reasoning_parser: Callable[[Request], ReasoningParser | None] = lambda request: None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def _base_object(self, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.is_chat else "text_completion"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def build_response(self, answers: Sequence[Completion], requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the object of finished answers."""
        choices = [
            self._build_choice(at, answer, request)
            for at, (answer, request) in enumerate(zip(answers, requests, strict=True))
        ]
        whole = self._base_object(False) | {"choices": choices, "usage": count_usage(requests, n)}
        return whole | ({"prompt_token_ids": requests[0].prompt} if self.has_token_ids and self.is_chat else {})

    def make_formatter(self, requests: Sequence[Request], n: int, usage: bool) -> StreamFormatter:
        """Return what tells the answers while they are made."""
        return ChunkFormatter(self, requests, n, usage)

    def _build_choice(self, at: int, answer: Completion, request: Request) -> dict[str, Any]:
        out: dict[str, Any] = {"index": at, "finish_reason": answer.finish_reason, "logprobs": None}
        if self.is_chat:
            content = answer.text
            out["message"] = {"role": "assistant", "content": content, "refusal": None}
            if (thoughts := self.make_reasoning_parser(request)) is not None:
                reasoning, content = thoughts.push_text(answer.text, True)
                out["message"] |= {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})
            if reader := self.make_parser():
                call_stream = ToolCallStream(reader)
                text, deltas = split_parts(call_stream.push_text(content, True))
                out["finish_reason"] = call_stream.resolve_finish_reason(answer.finish_reason)
                if deltas:
                    out["message"] |= {"content": text or None, "tool_calls": _join_deltas(deltas)}
        else:
            out["text"] = (self.echo_texts[at] if self.echo_texts else "") + answer.text
        if self.has_logprobs:
            out["logprobs"] = self._build_logprobs(request, 0, len(request.ids))
        if self.has_token_ids:
            out |= {"token_ids": request.ids} | ({} if self.is_chat else {"prompt_token_ids": request.prompt})
        if self.weight_version:  # replacing weights ends all answers: one has only one
            out["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": len(request.ids)}]
        return out

    def first_chunk(self, at: int, request: Request) -> dict[str, Any]:
        """Return the chunk that opens an answer."""
        shown = {"prompt_token_ids": request.prompt} if self.has_token_ids else {}
        if self.is_chat:
            return self._build_chunk(at, {"delta": {"role": "assistant", "content": ""}}) | shown
        return self._build_chunk(at, {"text": self.echo_texts[at] if self.echo_texts else ""} | shown)

    def text_chunk(
        self, at: int, text: str, request: Request, sent_tokens: int, upto: int, reasoning: str = ""
    ) -> dict[str, Any]:
        """Return a chunk with text, reasoning, and the log-probabilities of tokens `sent_tokens` to `upto`."""
        body: dict[str, Any] = {"delta": {"content": text}} if self.is_chat else {"text": text}
        if reasoning:
            body["delta"] = {"reasoning_content": reasoning} | ({"content": text} if text else {})
        if self.has_logprobs:
            body["logprobs"] = self._build_logprobs(request, sent_tokens, upto)
        if self.has_token_ids:
            body["token_ids"] = request.ids[sent_tokens:upto]
        return self._build_chunk(at, body)

    def tool_call_chunks(self, at: int, delta: ToolCallDelta) -> list[dict[str, Any]]:
        """Return the chunks of a part of a call: id and name where it begins, then a piece of its arguments.

        Id, type and name are only in the first chunk of a call, as in OpenAI's streams.
        """
        entries: list[dict[str, Any]] = []
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            entries.append({"index": delta.index, "id": delta.id, "type": "function", "function": function})
        if delta.arguments:
            entries.append({"index": delta.index, "function": {"arguments": delta.arguments}})
        return [self._build_chunk(at, {"delta": {"tool_calls": [entry]}}) for entry in entries]

    def last_chunk(self, at: int, finish_reason: str) -> dict[str, Any]:
        """Return the chunk that closes an answer."""
        return self._build_chunk(at, {"delta": {}} if self.is_chat else {"text": ""}, finish_reason)

    def usage_chunk(self, requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the chunk with the counts of tokens."""
        return self._base_object(True) | {"choices": [], "usage": count_usage(requests, n)}

    def _build_chunk(self, at: int, body: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": at, "logprobs": None, "finish_reason": finish_reason} | body
        return self._base_object(True) | {"choices": [choice]}

    def _build_logprobs(self, request: Request, start: int, end: int) -> dict[str, Any]:
        words = _TokenFormatter(request)
        top = request.top_logprobs
        rows = range(start, end)
        if self.is_chat:
            content = [
                words.make_entry(request.ids[at], request.logprobs[at])
                | {"top_logprobs": [words.make_entry(*pair) for pair in (top[at] if top else ())]}
                for at in rows
            ]
            return {"content": content, "refusal": None}
        tokens = [words.decode_token(request.ids[at]) for at in rows]
        offsets, place = [], len("".join(words.decode_token(one) for one in request.ids[:start]))
        for token in tokens:
            offsets.append(place)
            place += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [request.logprobs[at] for at in rows],
            "top_logprobs": [{words.decode_token(token): value for token, value in top[at]} for at in rows]
            if top
            else None,
            "text_offset": offsets,
        }


class StreamFormatter(Protocol):
    """Turns the pieces of an answer into what is sent."""

    def start_stream(self) -> list[bytes]:
        """Return what comes before the first piece."""

    def format_delta(self, piece: TextDelta) -> list[bytes]:
        """Return what a piece becomes."""

    def finish_stream(self) -> list[bytes]:
        """Return what comes behind the last piece."""

    def fail_stream(self, error: ApiError) -> list[bytes]:
        """Return what ends an answer that has failed."""


class ChunkFormatter:
    """The chunks of a streamed answer, as server-sent events.

    Args:
        usage: the last one holds the counts of tokens.
    """

    def __init__(self, shape: CompletionBuilder, requests: Sequence[Request], n: int, usage: bool) -> None:
        self._builder, self._requests, self._n, self._include_usage = shape, requests, n, usage
        self._sent_tokens = [0] * len(requests)
        readers = [shape.make_parser() for _ in requests]
        self._call_streams = [None if reader is None else ToolCallStream(reader) for reader in readers]
        self._reasoning_parsers = [shape.make_reasoning_parser(request) for request in requests]

    def start_stream(self) -> list[bytes]:
        """Return the chunks that open the answers."""
        return [_encode_event(self._builder.first_chunk(at, request)) for at, request in enumerate(self._requests)]

    def format_delta(self, piece: TextDelta) -> list[bytes]:
        """Return the chunks of a piece."""
        shape, at, text, end = self._builder, piece.index, piece.text, piece.finish_reason
        deltas: list[ToolCallDelta] = []
        reasoning = ""
        if (thoughts := self._reasoning_parsers[at]) is not None:
            reasoning, text = thoughts.push_text(text, bool(end))
        if (one := self._call_streams[at]) is not None:
            text, deltas = split_parts(one.push_text(text, bool(end)))
            end = one.resolve_finish_reason(end)
        chunks = []
        if (
            text
            or reasoning
            or ((shape.has_logprobs or shape.has_token_ids) and piece.num_tokens > self._sent_tokens[at])
        ):
            sent, self._sent_tokens[at] = self._sent_tokens[at], piece.num_tokens
            chunks.append(shape.text_chunk(at, text, self._requests[at], sent, piece.num_tokens, reasoning))
        for delta in deltas:
            chunks += shape.tool_call_chunks(at, delta)
        if end:
            chunks.append(shape.last_chunk(at, end))
        return [_encode_event(chunk) for chunk in chunks]

    def finish_stream(self) -> list[bytes]:
        """Return the counts, if they are wanted, and the end."""
        counts = [_encode_event(self._builder.usage_chunk(self._requests, self._n))] if self._include_usage else []
        return [*counts, _DONE_EVENT]

    def fail_stream(self, error: ApiError) -> list[bytes]:
        """Return the error as a chunk."""
        return [_encode_event(error.to_body())]


def _encode_event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass(frozen=True)
class ToolCallDelta:
    """New part of one tool call.

    Attributes:
        index: number of the call within its answer, from 0.
        id: identity of the call.
        name: the tool, where the call begins; None later.
        arguments: a piece of the arguments.
        ends_call: the arguments are complete.
    """

    index: int
    id: str
    name: str | None
    arguments: str
    ends_call: bool


class ToolCallStream:
    """One answer that may call tools, as it comes."""

    def __init__(self, reader: ToolCallParser) -> None:
        self._parser = reader
        self._num_calls = 0
        self._call_id = ""

    def push_text(self, piece: str, last: bool) -> list[str | ToolCallDelta]:
        """Take a piece; return the text and the parts of calls that are certain, in their order.

        Args:
            last: nothing more will come.
        """
        parts: list[str | ToolCallDelta] = []
        for segment in self._parser.push_text(piece) + (self._parser.flush() if last else []):
            if segment.text:
                parts.append(segment.text)
            if segment.name is not None:
                self._num_calls, self._call_id = self._num_calls + 1, f"call_{uuid.uuid4().hex}"
            if segment.name is not None or segment.arguments or segment.ends_call:
                parts.append(
                    ToolCallDelta(
                        self._num_calls - 1, self._call_id, segment.name, segment.arguments, segment.ends_call
                    )
                )
        return parts

    def resolve_finish_reason(self, finish_reason: str) -> str:
        """Return why the answer ended: whoever called has not merely stopped."""
        return "tool_calls" if self._num_calls and finish_reason == "stop" else finish_reason


def split_parts(parts: Sequence[str | ToolCallDelta]) -> tuple[str, list[ToolCallDelta]]:
    """Return the text of an answer's parts, and the parts of its calls."""
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCallDelta)]


def _join_deltas(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Return the calls of a whole answer."""
    calls = [delta for delta in deltas if delta.name is not None]
    arguments: list[list[str]] = [[] for _ in calls]
    for delta in deltas:
        arguments[delta.index].append(delta.arguments)
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(pieces)}}
        for call, pieces in zip(calls, arguments, strict=True)
    ]


class _TokenFormatter:
    """Tokens as clients read them."""

    def __init__(self, request: Request) -> None:
        self._tokenizer = request.tokenizer

    def decode_token(self, token: int) -> str:
        return str(self._tokenizer.decode([token], clean_up_tokenization_spaces=False))

    def make_entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode_token(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}
