"""`POST /v1/responses`: what may be asked, and how it becomes a conversation.

Nothing is stored: what refers to something stored is refused, and so is every tool but functions. Source of the fields:
openai-python, `types/responses/response_create_params.py` and `response_input_item_param.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from anabatic.infer.server.bounds import few_biases, few_messages
from anabatic.infer.server.schema import (
    Bias,
    ChatRequest,
    Effort,
    Flag,
    Function,
    Number,
    Off,
    Rows,
    Some,
    Strict,
    Text,
    TokenNumber,
    Whole,
)

_PASSED = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "presence_penalty", "metadata", "user",
    "parallel_tool_calls", "frequency_penalty", "repetition_penalty", "logit_bias", "chat_template_kwargs",
)  # fmt: skip


class Part(Strict):
    """A piece of a text: as input, or as an earlier answer's output."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Strict):
    """A message, a call of a function, or its result."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | Rows[Part] | None = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Text | Rows[Part] | None = None
    id: Text | None = None
    status: Text | None = None
    phase: Text | None = None

    @model_validator(mode="after")
    def _whole(self) -> Item:
        needed = _NEEDED[self.type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type} needs {', '.join(missing)}")
        return self


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class FlatFunction(Function):
    """A tool: here a function stands without a frame."""

    type: Literal["function"]


class FlatChoice(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Text


class TextFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: Flag | None = None
    description: Text | None = None

    @model_validator(mode="after")
    def _whole(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type json_schema needs schema")
        return self


class TextSettings(Strict):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Only medium: no other is known."""


class Reasoning(Strict):
    """How much is thought."""

    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    """Only auto, which may be none: thoughts are not summed up."""


class StreamSettings(BaseModel):
    """How an answer is streamed: not used."""

    include_obfuscation: Flag | None = None


class ResponsesRequest(Strict):
    """`POST /v1/responses`."""

    input: Annotated[Text | Some[Item], BeforeValidator(few_messages)]
    model: Text | None = None
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    stream: Off = False
    stream_options: StreamSettings | None = None
    tools: Annotated[Rows[FlatFunction], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Of what there is none."""
    truncation: Literal["disabled"] | None = None
    """Only disabled: the setting too_long of the server decides."""
    top_logprobs: Annotated[Whole, Field(ge=0, le=0)] | None = None
    """Only 0."""
    metadata: dict[Text, Text] | None = None
    service_tier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    safety_identifier: Text | None = None
    user: Text | None = None
    """The last five are not used."""
    store: Flag | None = None
    background: Flag | None = None
    previous_response_id: Text | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    """These are refused: nothing is stored, and functions are called by the client."""
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Rows[Text] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenNumber, Bias], BeforeValidator(few_biases)] | None = None
    chat_template_kwargs: dict[Text, Any] | None = None
    """From `top_k` on: as with the other paths."""

    @model_validator(mode="after")
    def _without_store(self) -> ResponsesRequest:
        if self.store:
            raise ValueError("store: this server stores no responses; send store: false")
        if self.background:
            raise ValueError("background: this server stores no responses; leave it out")
        for name in ("previous_response_id", "conversation", "prompt", "max_tool_calls"):
            if getattr(self, name) is not None:
                why = "send the earlier items again in input" if name != "max_tool_calls" else "leave it out"
                raise ValueError(f"{name} is not supported, this server stores nothing: {why}")
        return self

    def as_chat(self) -> ChatRequest:
        """Return the same as a request for a conversation.

        Raises:
            pydantic.ValidationError: the fields do not fit together.
        """
        body: dict[str, Any] = {name: value for name in _PASSED if (value := getattr(self, name)) is not None}
        body |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        choice = self.tool_choice
        named = isinstance(choice, FlatChoice)
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if named else choice  # type: ignore[union-attr]
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        form = self.text.format if self.text is not None else None
        if form is not None:
            told = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
            body["response_format"] = {"type": form.type} | ({"json_schema": told} if form.schema_ is not None else {})
        return ChatRequest.model_validate(body)

    def _messages(self) -> list[dict[str, Any]]:
        """Return the turns: calls join the answer before them, the system's texts at the beginning become one."""
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            turn = _turn(item)
            before: dict[str, Any] = turns[-1] if turns else {"role": ""}
            if turn["role"] == "system" == before["role"] and len(turns) == 1:
                before["content"] += "\n\n" + turn["content"]
            elif "tool_calls" in turn and before["role"] == "assistant":
                before.setdefault("tool_calls", []).extend(turn["tool_calls"])
            else:
                turns.append(turn)
        return turns


def _turn(item: Item) -> dict[str, Any]:
    if item.type == "function_call":
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _text(item.content)}


def _text(content: str | list[Part] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or [])
