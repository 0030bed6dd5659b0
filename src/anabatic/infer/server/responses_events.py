"""The objects and events of `/v1/responses`.

Source of the shapes: openai-python, `types/responses/response.py`, `response_output_message.py`,
`response_function_tool_call.py`, `response_reasoning_item.py` and `response_*_event.py`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabatic.infer.reasoning_parser import ReasoningParser
from anabatic.infer.request import Completion, Request
from anabatic.infer.server.api_errors import ApiError
from anabatic.infer.server.engine_worker import TextDelta
from anabatic.infer.server.response_builder import ToolCallDelta, ToolCallStream, count_usage
from anabatic.infer.server.responses_schema import ResponsesRequest
from anabatic.infer.tool_call_parser import ToolCallParser

JsonObject = dict[str, Any]


@dataclass
class ResponsesBuilder:
    """Build the events of one response.

    Attributes:
        request: what was asked; parts of it are repeated.
        model: name of the model that answers.
        make_parser: makes what finds the calls of tools; None: nothing looks for them.
        make_reasoning_parser: makes what finds the reasoning before an answer; None: nothing looks for it.
    """

    request: ResponsesRequest
    model: str
    make_parser: Callable[[], ToolCallParser | None] = lambda: None
    make_reasoning_parser: Callable[[Request], ReasoningParser | None] = lambda request: None
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: float = field(default_factory=time.time)

    def build_response(self, answers: Sequence[Completion], requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the object of a finished response."""
        teller = self.make_formatter(requests, n, False)
        teller.format_delta(TextDelta(0, answers[0].text, len(requests[0].ids), answers[0].finish_reason))
        return teller.build_snapshot()

    def make_formatter(self, requests: Sequence[Request], n: int, usage: bool) -> ResponseEventFormatter:
        """Return what tells the response while it is made."""
        return ResponseEventFormatter(self, requests)

    def build_body(self, status: str, output: list[dict[str, Any]], counts: dict[str, Any] | None) -> dict[str, Any]:
        """Return the object of a response."""
        request = self.request
        body = request.model_dump(mode="json", by_alias=True, exclude_none=True)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text = body.get("text", {})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": body.get("tool_choice", "auto"),
            "tools": [{"strict": None, "parameters": None, **tool} for tool in body.get("tools", [])],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": counts,
            "user": request.user,
        }


class ResponseEventFormatter:
    """One response while it is made: takes pieces, returns the events that they are."""

    def __init__(self, shape: ResponsesBuilder, requests: Sequence[Request]) -> None:
        self._builder, self._requests = shape, requests
        parser = shape.make_parser()
        self._call_stream = None if parser is None else ToolCallStream(parser)
        self._reasoning_parser = shape.make_reasoning_parser(requests[0])
        self._reasoning: list[str] = []  # of the item that is open
        self._num_reasoning_tokens = 0
        self._output: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._has_open_message = False  # one is open
        self._arguments: list[str] = []  # of the last call
        self._status = "in_progress"
        self._sequence_number = 0

    def build_snapshot(self) -> dict[str, Any]:
        """Return the response as it stands."""
        counts = None
        if self._status != "in_progress":
            known = count_usage(self._requests, 1)
            counts = {
                "input_tokens": known["prompt_tokens"],
                "input_tokens_details": known["prompt_tokens_details"],
                "output_tokens": known["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": known["total_tokens"],
            }
        return self._builder.build_body(self._status, self._output, counts)

    def start_stream(self) -> list[bytes]:
        """Return the events before the first piece."""
        return [
            self._encode_event(f"response.{what}", response=self.build_snapshot())
            for what in ("created", "in_progress")
        ]

    def format_delta(self, piece: TextDelta) -> list[bytes]:
        """Return the events of a piece."""
        text, end = piece.text, piece.finish_reason
        reasoning = ""
        if self._reasoning_parser is not None:
            reasoning, text = self._reasoning_parser.push_text(text, bool(end))
        parts: list[str | ToolCallDelta] = [text] if text else []
        if self._call_stream is not None:
            parts = self._call_stream.push_text(text, bool(end))
        events = self._add_reasoning(reasoning) if reasoning else []
        if parts or end:
            events += self._close_reasoning("incomplete" if end == "length" and not parts else "completed")
        for part in parts:
            events += self._add_text(part) if isinstance(part, str) else self._add_call_delta(part)
        return events + (self._end_output(end) if end else [])

    def _end_output(self, finish_reason: str) -> list[bytes]:
        status = "incomplete" if finish_reason == "length" else "completed"
        events = self._close_call("incomplete")
        if all(one["type"] == "reasoning" for one in self._output):  # a response has a message, even an empty one
            events += self._open_message()
        events += self._close_message(status)
        self._status = status
        return events

    def finish_stream(self) -> list[bytes]:
        """Return the event behind the last piece."""
        return [self._encode_event(f"response.{self._status}", response=self.build_snapshot())]

    def fail_stream(self, error: ApiError) -> list[bytes]:
        """Return the events of a response that has failed."""
        error_body = error.to_body()["error"]
        self._status = "failed"
        failed = self.build_snapshot() | {"error": {"code": "server_error", "message": error_body["message"]}}
        about = {"code": error_body["code"], "message": error_body["message"], "param": error_body["param"]}
        return [self._encode_event("error", **about), self._encode_event("response.failed", response=failed)]

    def _add_reasoning(self, text: str) -> list[bytes]:
        events = []
        if not self._reasoning:
            item = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "status": "in_progress"}
            self._output.append(item | {"content": []})
            index, at = len(self._output) - 1, self._item_position()
            events = [
                self._encode_event("response.output_item.added", output_index=index, item=self._output[-1]),
                self._encode_event("response.content_part.added", **at, content_index=0, part=_reasoning_text_part("")),
            ]
        self._reasoning.append(text)
        at = self._item_position()
        return [*events, self._encode_event("response.reasoning_text.delta", **at, content_index=0, delta=text)]

    def _close_reasoning(self, status: str) -> list[bytes]:
        """End the reasoning that is open, if there is one."""
        if not self._reasoning:
            return []
        text, self._reasoning = "".join(self._reasoning), []
        tokens = self._requests[0].tokenizer(text, add_special_tokens=False)["input_ids"]
        self._num_reasoning_tokens = len(tokens)  # without the tags
        at, item, part = self._item_position(), self._output[-1], _reasoning_text_part(text)
        item |= {"status": status, "content": [part]}
        return [
            self._encode_event("response.reasoning_text.done", **at, content_index=0, text=text),
            self._encode_event("response.content_part.done", **at, content_index=0, part=part),
            self._encode_event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _add_text(self, text: str) -> list[bytes]:
        events = [] if self._has_open_message else [*self._close_call("incomplete"), *self._open_message()]
        self._text.append(text)
        at = self._item_position()
        return [
            *events,
            self._encode_event("response.output_text.delta", **at, content_index=0, delta=text, logprobs=[]),
        ]

    def _open_message(self) -> list[bytes]:
        """Begin a message."""
        item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
        self._output.append(item | {"content": []})
        self._text, self._has_open_message = [], True
        added = self._encode_event(
            "response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1]
        )
        part = _output_text_part("")
        return [
            added,
            self._encode_event("response.content_part.added", **self._item_position(), content_index=0, part=part),
        ]

    def _close_message(self, status: str) -> list[bytes]:
        """End the message that is open, if one is."""
        if not self._has_open_message:
            return []
        text, self._has_open_message = "".join(self._text), False
        at, item = self._item_position(), self._output[-1]
        item |= {"status": status, "content": [_output_text_part(text)]}
        return [
            self._encode_event("response.output_text.done", **at, content_index=0, text=text, logprobs=[]),
            self._encode_event("response.content_part.done", **at, content_index=0, part=_output_text_part(text)),
            self._encode_event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _add_call_delta(self, delta: ToolCallDelta) -> list[bytes]:
        events = []
        if delta.name is not None:
            events += [*self._close_message("completed"), *self._close_call("incomplete")]
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": delta.id, "name": delta.name}
            self._output.append(item | {"arguments": "", "status": "in_progress"})
            self._arguments = []
            index = len(self._output) - 1
            events.append(self._encode_event("response.output_item.added", output_index=index, item=self._output[-1]))
        if delta.arguments:
            self._arguments.append(delta.arguments)
            at = self._item_position()
            events.append(self._encode_event("response.function_call_arguments.delta", **at, delta=delta.arguments))
        return events + (self._close_call("completed") if delta.ends_call else [])

    def _close_call(self, status: str) -> list[bytes]:
        """End the call that is open, if one is. A call that is cut off has the arguments that came."""
        if not self._output or (item := self._output[-1])["type"] != "function_call" or item["status"] != "in_progress":
            return []
        arguments = "".join(self._arguments)
        item |= {"arguments": arguments, "status": status}
        at, name = self._item_position(), item["name"]
        return [
            self._encode_event("response.function_call_arguments.done", **at, name=name, arguments=arguments),
            self._encode_event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _item_position(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _encode_event(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence_number, **more}
        self._sequence_number += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()


def _reasoning_text_part(text: str) -> JsonObject:
    return {"type": "reasoning_text", "text": text}


def _output_text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
