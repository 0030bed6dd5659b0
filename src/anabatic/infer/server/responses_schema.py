"""`POST /v1/responses`: what may be asked, and how it becomes a conversation.

Nothing is stored: what refers to something stored is refused, and so is every tool but functions. Source of the fields:
openai-python, `types/responses/response_create_params.py` and `response_input_item_param.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, model_validator

from anabatic.infer.server.request_limits import limit_biases, limit_messages
from anabatic.infer.server.request_schema import (
    ChatRequest,
    FailFastList,
    FalseIfNull,
    FiniteNumber,
    FunctionDefinition,
    LogitBias,
    NonEmptyList,
    ReasoningEffort,
    StrictFlag,
    StrictInt,
    StrictModel,
    TokenIdStr,
    Utf8Str,
)

_PASSED_FIELDS = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "presence_penalty", "metadata", "user",
    "parallel_tool_calls", "frequency_penalty", "repetition_penalty", "logit_bias", "chat_template_kwargs",
)  # fmt: skip


class TextContent(StrictModel):
    """A piece of a text: as input, or as an earlier answer's output."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: Utf8Str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ImageContent(StrictModel):
    """A picture, as a data URI."""

    type: Literal["input_image"]
    image_url: Utf8Str
    detail: Utf8Str | None = None


ContentPart = Annotated[TextContent | ImageContent, Field(discriminator="type")]


class InputItem(StrictModel):
    """A message, a call of a function, its result, or the reasoning of the answer behind it."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Utf8Str | FailFastList[ContentPart] | None = None
    call_id: Utf8Str | None = None
    name: Utf8Str | None = None
    arguments: Utf8Str | None = None
    output: Utf8Str | FailFastList[ContentPart] | None = None
    id: Utf8Str | None = None
    status: Utf8Str | None = None
    phase: Utf8Str | None = None
    summary: list[Any] | None = None
    encrypted_content: Utf8Str | None = None

    @model_validator(mode="after")
    def _require_item_fields(self) -> InputItem:
        needed = _REQUIRED_FIELDS[self.type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type} needs {', '.join(missing)}")
        return self


_REQUIRED_FIELDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class FunctionTool(FunctionDefinition):
    """A tool: here a function stands without a frame."""

    type: Literal["function"]


class FlatChoice(StrictModel):
    """The tool that has to be called."""

    type: Literal["function"]
    name: Utf8Str


class TextFormat(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Utf8Str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictFlag | None = None
    description: Utf8Str | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("type json_schema needs schema")
        return self


class TextSettings(StrictModel):
    """Format of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """Only medium: no other is known."""


class ReasoningSettings(StrictModel):
    """Amount of reasoning."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto"] | None = None
    """Only auto, which may be none: thoughts are not summed up."""


class StreamSettings(BaseModel):
    """Options of a streamed answer; not used."""

    include_obfuscation: StrictFlag | None = None


class ResponsesRequest(StrictModel):
    """`POST /v1/responses`."""

    input: Annotated[Utf8Str | NonEmptyList[InputItem], BeforeValidator(limit_messages)]
    model: Utf8Str | None = None
    instructions: Utf8Str | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[FiniteNumber, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteNumber, Field(gt=0, le=1)] | None = None
    stream: FalseIfNull = False
    stream_options: StreamSettings | None = None
    tools: Annotated[FailFastList[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: StrictFlag | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Of what there is none."""
    truncation: Literal["disabled"] | None = None
    """Only disabled: the setting too_long of the server decides."""
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=0)] | None = None
    """Only 0."""
    metadata: dict[Utf8Str, Utf8Str] | None = None
    service_tier: Utf8Str | None = None
    prompt_cache_key: Utf8Str | None = None
    prompt_cache_retention: Utf8Str | None = None
    safety_identifier: Utf8Str | None = None
    user: Utf8Str | None = None
    """The last five are not used."""
    store: StrictFlag | None = None
    background: StrictFlag | None = None
    previous_response_id: Utf8Str | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    """These are refused: nothing is stored, and functions are called by the client."""
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[FiniteNumber, Field(ge=0, le=1)] | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Utf8Str | FailFastList[Utf8Str] | None = None
    presence_penalty: Annotated[FiniteNumber, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteNumber, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[FiniteNumber, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[TokenIdStr, LogitBias], BeforeValidator(limit_biases)] | None = None
    chat_template_kwargs: dict[Utf8Str, Any] | None = None
    """From `top_k` on: as with the other paths."""

    @model_validator(mode="after")
    def _refuse_storage(self) -> ResponsesRequest:
        if self.store:
            raise ValueError("store: this server stores no responses; send store: false")
        if self.background:
            raise ValueError("background: this server stores no responses; leave it out")
        for name in ("previous_response_id", "conversation", "prompt", "max_tool_calls"):
            if getattr(self, name) is not None:
                hint = "send the earlier items again in input" if name != "max_tool_calls" else "leave it out"
                raise ValueError(f"{name} is not supported, this server stores nothing: {hint}")
        return self

    def to_chat_request(self) -> ChatRequest:
        """Return the same as a request for a conversation.

        Raises:
            pydantic.ValidationError: the fields do not fit together.
        """
        body: dict[str, Any] = {name: value for name in _PASSED_FIELDS if (value := getattr(self, name)) is not None}
        body |= {"messages": self._build_messages(), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            tools = [tool.model_dump(exclude_none=True, exclude={"type"}) for tool in self.tools]
            body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        choice = self.tool_choice
        is_named = isinstance(choice, FlatChoice)
        body["tool_choice"] = {"type": "function", "function": {"name": choice.name}} if is_named else choice  # type: ignore[union-attr]
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        form = self.text.format if self.text is not None else None
        if form is not None:
            json_schema = {"name": form.name or "answer", "schema": form.schema_, "strict": form.strict}
            body["response_format"] = {"type": form.type} | (
                {"json_schema": json_schema} if form.schema_ is not None else {}
            )
        return ChatRequest.model_validate(body)

    def _build_messages(self) -> list[dict[str, Any]]:
        """Return the turns: calls join the answer before them, the system's texts at the beginning become one."""
        turns: list[dict[str, Any]] = []
        if self.instructions:
            turns.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        reasoning = ""
        for item in items:
            if item.type == "reasoning":
                reasoning = _join_text(item.content)
                continue
            turn = _item_to_turn(item)
            if reasoning and turn["role"] == "assistant":
                turn["reasoning_content"], reasoning = reasoning, ""
            before: dict[str, Any] = turns[-1] if turns else {"role": ""}
            if turn["role"] == "system" == before["role"] and len(turns) == 1:
                before["content"] += "\n\n" + turn["content"]
            elif "tool_calls" in turn and before["role"] == "assistant":
                before.setdefault("tool_calls", []).extend(turn["tool_calls"])
            else:
                turns.append(turn)
        return turns


def _item_to_turn(item: InputItem) -> dict[str, Any]:
    if item.type == "function_call":
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _join_text(item.output)}
    role = "system" if item.role == "developer" else item.role
    if role == "user" and any(isinstance(part, ImageContent) for part in item.content or []):
        return {"role": role, "content": [_read_part(part) for part in item.content or [] if not isinstance(part, str)]}
    return {"role": role, "content": _join_text(item.content)}


def _read_part(part: TextContent | ImageContent) -> dict[str, Any]:
    if isinstance(part, ImageContent):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text}


def _join_text(content: str | list[TextContent | ImageContent] | None) -> str:
    """Return the text of parts.

    Raises:
        ValueError: one is a picture, which only a message of the user shows.
    """
    parts = [content] if isinstance(content, str) else content or []
    if any(isinstance(part, ImageContent) for part in parts):
        raise ValueError("pictures stand in messages of the user alone")
    return "".join(part if isinstance(part, str) else part.text for part in parts)  # type: ignore[union-attr]
