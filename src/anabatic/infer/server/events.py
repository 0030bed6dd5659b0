"""The objects and events of `/v1/responses`.

Source of the shapes: openai-python, `types/responses/response.py`, `response_output_message.py`,
`response_function_tool_call.py` and `response_*_event.py`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anabatic.infer.request import Completion, Request
from anabatic.infer.server.answers import Heard, usage
from anabatic.infer.server.errors import ApiError
from anabatic.infer.server.responses import ResponsesRequest
from anabatic.infer.server.worker import Piece
from anabatic.infer.tool_calls import Reader

Event = dict[str, Any]


@dataclass
class ResponseShape:
    """How one response is answered.

    Attributes:
        asked: what was asked; parts of it are told again.
        model: name of the model that answers.
        reader: makes what finds the calls of tools; None: nothing looks for them.
    """

    asked: ResponsesRequest
    model: str
    reader: Callable[[], Reader | None] = lambda: None
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: float = field(default_factory=time.time)

    def whole(self, answers: Sequence[Completion], requests: Sequence[Request], n: int) -> dict[str, Any]:
        """Return the object of a finished response."""
        teller = self.teller(requests, n, False)
        teller.take(Piece(0, answers[0].text, len(requests[0].ids), answers[0].finish_reason))
        return teller.response()

    def teller(self, requests: Sequence[Request], n: int, usage: bool) -> Teller:
        """Return what tells the response while it is made."""
        return Teller(self, requests)

    def body(self, status: str, output: list[dict[str, Any]], counts: dict[str, Any] | None) -> dict[str, Any]:
        """Return the object of a response."""
        asked = self.asked
        told = asked.model_dump(mode="json", by_alias=True, exclude_none=True)
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        text = told.get("text", {})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
            "store": False,
            "temperature": asked.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": told.get("tool_choice", "auto"),
            "tools": [{"strict": None, "parameters": None, **tool} for tool in told.get("tools", [])],
            "top_p": asked.top_p,
            "truncation": "disabled",
            "usage": counts,
            "user": asked.user,
        }


class Teller:
    """One response while it is made: takes pieces, returns the events that they are."""

    def __init__(self, shape: ResponseShape, requests: Sequence[Request]) -> None:
        self._shape, self._requests = shape, requests
        made = shape.reader()
        self._heard = None if made is None else Heard(made)
        self._output: list[dict[str, Any]] = []
        self._text: list[str] = []
        self._message = False  # one is open
        self._status = "in_progress"
        self._number = 0

    def response(self) -> dict[str, Any]:
        """Return the response as it stands."""
        counts = None
        if self._status != "in_progress":
            known = usage(self._requests, 1)
            counts = {
                "input_tokens": known["prompt_tokens"],
                "input_tokens_details": known["prompt_tokens_details"],
                "output_tokens": known["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": known["total_tokens"],
            }
        return self._shape.body(self._status, self._output, counts)

    def begin(self) -> list[bytes]:
        """Return the events before the first piece."""
        return [self._event(f"response.{what}", response=self.response()) for what in ("created", "in_progress")]

    def take(self, piece: Piece) -> list[bytes]:
        """Return the events of a piece."""
        text, end = piece.text, piece.finish_reason
        calls: list[dict[str, Any]] = []
        if self._heard is not None:
            text, calls = self._heard.push(text, bool(end))
        events = self._said(text) if text else []
        if calls:
            events += self._close("completed")
        for call in calls:
            events += self._called(call)
        if end:
            status = "incomplete" if end == "length" else "completed"
            if not self._output:  # a response has a message, though it be empty
                events += self._open()
            events += self._close(status)
            self._status = status
        return events

    def finish(self) -> list[bytes]:
        """Return the event behind the last piece."""
        return [self._event(f"response.{self._status}", response=self.response())]

    def fault(self, error: ApiError) -> list[bytes]:
        """Return the events of a response that has failed."""
        told = error.body()["error"]
        self._status = "failed"
        failed = self.response() | {"error": {"code": "server_error", "message": told["message"]}}
        about = {"code": told["code"], "message": told["message"], "param": told["param"]}
        return [self._event("error", **about), self._event("response.failed", response=failed)]

    def _said(self, text: str) -> list[bytes]:
        events = [] if self._message else self._open()
        self._text.append(text)
        at = self._place()
        return [*events, self._event("response.output_text.delta", **at, content_index=0, delta=text, logprobs=[])]

    def _open(self) -> list[bytes]:
        """Begin a message."""
        item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
        self._output.append(item | {"content": []})
        self._text, self._message = [], True
        added = self._event("response.output_item.added", output_index=len(self._output) - 1, item=self._output[-1])
        part = _part("")
        return [added, self._event("response.content_part.added", **self._place(), content_index=0, part=part)]

    def _close(self, status: str) -> list[bytes]:
        """End the message that is open, if one is."""
        if not self._message:
            return []
        text, self._message = "".join(self._text), False
        at, item = self._place(), self._output[-1]
        item |= {"status": status, "content": [_part(text)]}
        return [
            self._event("response.output_text.done", **at, content_index=0, text=text, logprobs=[]),
            self._event("response.content_part.done", **at, content_index=0, part=_part(text)),
            self._event("response.output_item.done", output_index=at["output_index"], item=item),
        ]

    def _called(self, call: dict[str, Any]) -> list[bytes]:
        """A call comes whole."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "name": name}
        self._output.append(item | {"arguments": "", "status": "in_progress"})
        index, at = len(self._output) - 1, self._place()
        added = self._event("response.output_item.added", output_index=index, item=self._output[-1])
        self._output[-1] = item | {"arguments": arguments, "status": "completed"}
        return [
            added,
            self._event("response.function_call_arguments.delta", **at, delta=arguments),
            self._event("response.function_call_arguments.done", **at, name=name, arguments=arguments),
            self._event("response.output_item.done", output_index=index, item=self._output[-1]),
        ]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _event(self, kind: str, **more: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._number, **more}
        self._number += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()


def _part(text: str) -> Event:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
