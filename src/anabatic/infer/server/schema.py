"""What may be asked. Names and meanings are those of OpenAI's API (platform.openai.com/docs/api-reference); fields of
vLLM's that OpenAI's has not are marked.

Fields that change an answer and that we do not know how to honour are refused, not ignored.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from anabatic.core import json_text
from anabatic.core.text import utf8
from anabatic.infer.server.bounds import KEPT, LONGEST_STOP, few_biases, few_messages, few_prompts

MOST_FIELDS = 100
"""Of an object whose fields are looked at one by one."""

Text = Annotated[str, StringConstraints(strict=True), AfterValidator(utf8)]
"""Lone surrogates, which JSON can write and UTF-8 cannot, become question marks."""
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Off = Annotated[Flag, BeforeValidator(lambda given: False if given is None else given, Flag | None)]
"""false where it is null, as some clients write what they leave open."""
Count = Annotated[Whole, Field(ge=1, le=128)]
One = Annotated[Count, BeforeValidator(lambda given: 1 if given is None else given, Count | None)]
"""1 where it is null."""

TokenNumber = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NO_THOUGHT = ("none", "minimal")
Row = TypeVar("Row")
Rows = Annotated[list[Row], Field(fail_fast=True)]
Some = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
"""Lists are read up to the first row that is wrong."""


def _short(given: Any) -> Any:
    """Refuse an object of very many fields before all that is wrong with them is listed, which takes seconds."""
    if isinstance(given, dict) and len(given) > MOST_FIELDS:
        raise ValueError(f"an object has {len(given)} fields; at most {MOST_FIELDS} are read")
    return given


class Strict(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")

    _few = model_validator(mode="before")(_short)


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: Text


class Call(BaseModel):
    """What the model asked a tool to do."""

    name: Text
    arguments: Text


class ToolCall(BaseModel):
    """A call, with the identity that its answer names."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: Call

    def plain(self) -> dict[str, Any]:
        """Return the call as chat templates read it: arguments that are a JSON object as such, else as they came."""
        try:
            arguments = json_text.loads(self.function.arguments)
        except ValueError:
            arguments = None
        known = arguments if isinstance(arguments, dict) else self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": known}}


class Message(Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Rows[TextPart] | None = None
    name: Text | None = None
    tool_calls: Rows[ToolCall] | None = None
    tool_call_id: Text | None = None
    refusal: Text | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        content = self.content
        parts = content if isinstance(content, str) or content is None else "".join(part.text for part in content)
        out: dict[str, Any] = {"role": self.role, "content": parts or ""}
        if self.tool_calls:
            out["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        return out


class Function(BaseModel):
    """A tool, as chat templates show it to the model."""

    name: Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    """Which function."""

    name: Text


class NamedTool(Strict):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(BaseModel):
    """The schema of an answer. `schema` is a word of pydantic's own."""

    name: Text = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: Flag | None = None
    description: Text | None = None


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema")
        return self


class StreamOptions(Strict):
    """How an answer is streamed."""

    include_usage: Off = False
    include_obfuscation: Flag | None = None


class Generation(Strict):
    """What all requests for text share."""

    model: Text | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=2**31)] | None = None
    """vLLM's; 0 or -1: all tokens."""
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    """vLLM's."""
    repetition_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    """vLLM's."""
    n: One = 1
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Rows[Text] | None = None
    stream: Off = False
    stream_options: StreamOptions | None = None
    structured_outputs: Annotated[dict[Literal["choice", "regex", "json"], Any], BeforeValidator(_short)] | None = None
    """vLLM's: the answer is one of some texts, matches an expression, or is JSON of a schema."""
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenNumber, Bias], BeforeValidator(few_biases)] | None = None
    user: Text | None = None
    """Not used."""

    def stops(self) -> list[str]:
        """Return the texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @model_validator(mode="after")
    def _stops(self) -> Generation:
        if len(self.stops()) > 16:
            raise ValueError(f"stop has {len(self.stops())} texts; at most 16 are allowed")
        if not all(self.stops()):
            raise ValueError("a text of stop is empty")
        if max(map(len, self.stops()), default=0) > LONGEST_STOP:
            raise ValueError(f"a text of stop has more than {LONGEST_STOP} characters")
        return self


class ChatRequest(Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Some[Message], BeforeValidator(few_messages)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    """Given to the chat template; `none` and `minimal` turn thinking off where it can be turned off."""
    chat_template_kwargs: Annotated[dict[Text, Any], BeforeValidator(_short)] | None = None
    """vLLM's: variables of the chat template, such as enable_thinking."""
    tools: Annotated[Rows[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: Flag | None = None
    metadata: Annotated[dict[Text, Text], Field(max_length=16), BeforeValidator(_short)] | None = None
    store: Flag | None = None
    service_tier: Text | None = None
    """The last three are not used."""

    def tokens(self) -> int | None:
        """Return how many tokens are asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        effort = self.reasoning_effort
        own = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort not in NO_THOUGHT}
        return own | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _variables(self) -> ChatRequest:
        for name in self.chat_template_kwargs or {}:
            if name in KEPT or not name.isidentifier():
                raise ValueError(f"chat_template_kwargs may not set {name[:100]!r}")
        return self

    def offered(self) -> list[Tool]:
        """Return the tools that may be called."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    def forced(self) -> bool:
        """True when a call is all that may come."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        name, count = next(iter(Counter(names).most_common(1)), ("", 0))
        if count > 1:
            raise ValueError(f"two tools are called {name}")
        if self.forced() and not names:
            raise ValueError("tool_choice asks for a call, and tools are not given")
        if self.forced() and (
            self.structured_outputs or (self.response_format and self.response_format.type != "text")
        ):
            raise ValueError("tool_choice asks for a call, and another form of the answer is given: give one form")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        return self

    @model_validator(mode="after")
    def _logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


Ids = Some[Whole]


class CompletionRequest(Generation):
    """`POST /v1/completions`."""

    prompt: Annotated[Text | Some[Text] | Ids | Some[Ids], BeforeValidator(few_prompts)]
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    echo: Off = False
    best_of: Annotated[Whole, Field(ge=1, le=1)] | None = None
    """Only 1."""
    suffix: Annotated[Text, StringConstraints(max_length=0)] | None = None
    """Only empty."""

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    def tokens(self) -> int | None:
        """Return how many tokens are asked for."""
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default here

    @model_validator(mode="after")
    def _echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: logprobs are those of the answer")
        return self


class EmbeddingRequest(Strict):
    """`POST /v1/embeddings`."""

    model: Text | None = None
    input: Text | Some[Text] | Ids | Some[Ids]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    """As many as the model has."""
    user: Text | None = None

    def inputs(self) -> list[str | list[int]]:
        """Return the texts one by one."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


Conversation = Some[Message]


class ClassifyRequest(Strict):
    """`POST /v1/classify`: trajectories as words, for a classifier; conversations, for a reward model."""

    model: Text | None = None
    input: Text | Some[Text] | None = None
    messages: Annotated[Conversation | Some[Conversation] | None, BeforeValidator(few_messages)] = None

    @model_validator(mode="after")
    def _one(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        return self

    def inputs(self) -> list[str]:
        """Return the texts one by one."""
        return [self.input] if isinstance(self.input, str) else self.input or []

    def conversations(self) -> list[list[Message]]:
        """Return the conversations one by one."""
        found: list[list[Message]] = []
        for one in self.messages or []:
            if isinstance(one, list):
                found.append(one)
            else:
                found = found or [[]]
                found[0].append(one)
        return found


class TokenizeRequest(Strict):
    """`POST /tokenize`, as vLLM has it: a text or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[Some[Message] | None, BeforeValidator(few_messages)] = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
