"""Schemas of requests. Names and meanings are those of OpenAI's API (platform.openai.com/docs/api-reference); fields of
vLLM's that OpenAI's has not are marked.

Fields that change an answer and that we do not know how to honour are refused, not ignored.
"""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from anabatic.core import json_reader
from anabatic.core.formatting import to_valid_utf8
from anabatic.infer.server.request_limits import (
    MAX_STOP_CHARS,
    RESERVED_TEMPLATE_VARIABLES,
    limit_biases,
    limit_messages,
    limit_prompts,
)

MAX_FIELDS = 100
"""Of an object whose fields are looked at one by one."""

Utf8Str = Annotated[str, StringConstraints(strict=True), AfterValidator(to_valid_utf8)]
"""Lone surrogates, which JSON can write and UTF-8 cannot, become question marks."""
StrictInt = Annotated[int, Field(strict=True)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False, strict=True)]
StrictFlag = Annotated[bool, Field(strict=True)]
FalseIfNull = Annotated[StrictFlag, BeforeValidator(lambda given: False if given is None else given, StrictFlag | None)]
"""false where it is null, as some clients write what they leave open."""
AnswerCount = Annotated[StrictInt, Field(ge=1, le=128)]
OneIfNull = Annotated[AnswerCount, BeforeValidator(lambda given: 1 if given is None else given, AnswerCount | None)]
"""1 where it is null."""

TokenIdStr = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
LogitBias = Annotated[FiniteNumber, Field(ge=-100, le=100)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NO_THINKING_EFFORTS = ("none", "minimal")
Row = TypeVar("Row")
FailFastList = Annotated[list[Row], Field(fail_fast=True)]
NonEmptyList = Annotated[list[Row], Field(min_length=1, fail_fast=True)]
"""Lists are read up to the first row that is wrong."""


def _limit_fields(given: Any) -> Any:
    """Refuse an object of very many fields before all that is wrong with them is listed, which takes seconds."""
    if isinstance(given, dict) and len(given) > MAX_FIELDS:
        raise ValueError(f"an object has {len(given)} fields; at most {MAX_FIELDS} are read")
    return given


class StrictModel(BaseModel):
    """Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")

    _limit_field_count = model_validator(mode="before")(_limit_fields)


class TextPart(StrictModel):
    """A piece of a message."""

    type: Literal["text"]
    text: Utf8Str


class ImageAddress(BaseModel):
    """A picture in a data URI; what else clients write beside it, such as `detail`, has no counterpart here."""

    url: Utf8Str


class ImagePart(StrictModel):
    """A picture in a message."""

    type: Literal["image_url"]
    image_url: ImageAddress

    @field_validator("image_url", mode="after")
    @classmethod
    def _require_data(cls, address: ImageAddress) -> ImageAddress:
        if address.url[:5].lower() != "data:":
            raise ValueError("a picture is a data URI (data:image/png;base64,...): nothing is fetched")
        return address


class FunctionCall(BaseModel):
    """A tool call's function and arguments."""

    name: Utf8Str
    arguments: Utf8Str


class ToolCall(BaseModel):
    """A call, with the identity that its answer names."""

    id: Utf8Str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def to_template_dict(self) -> dict[str, Any]:
        """Return the call as chat templates read it: arguments that are a JSON object as such, else as they came."""
        try:
            arguments = json_reader.loads(self.function.arguments)
        except ValueError:
            arguments = None
        known = arguments if isinstance(arguments, dict) else self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": known}}


class ChatMessage(StrictModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Utf8Str | FailFastList[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: Utf8Str | None = None
    tool_calls: FailFastList[ToolCall] | None = None
    tool_call_id: Utf8Str | None = None
    refusal: Utf8Str | None = None
    reasoning_content: Utf8Str | None = None
    """Of an earlier answer, as this server gives it; the chat template decides what it shows of it."""

    def list_pictures(self) -> list[str]:
        """Return the data URIs of the pictures, in order."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.image_url.url for part in parts if isinstance(part, ImagePart)]

    def to_template_dict(self, picture_text: str = "") -> dict[str, Any]:
        """Return the message as chat templates read it.

        Args:
            picture_text: stands for a picture.
        """
        content = self.content
        texts = (
            content
            if isinstance(content, str) or content is None
            else "".join(picture_text if isinstance(part, ImagePart) else part.text for part in content)
        )
        out: dict[str, Any] = {"role": self.role, "content": texts or ""}
        if self.tool_calls:
            out["tool_calls"] = [call.to_template_dict() for call in self.tool_calls]
        if self.tool_call_id is not None:
            out["tool_call_id"] = self.tool_call_id
        if self.reasoning_content:
            out["reasoning_content"] = self.reasoning_content
        return out


class FunctionDefinition(BaseModel):
    """A tool, as chat templates show it to the model."""

    name: Annotated[Utf8Str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Utf8Str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictFlag | None = None


class ChatTool(StrictModel):
    """A tool."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    """Name of a function."""

    name: Utf8Str


class NamedTool(StrictModel):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(BaseModel):
    """The schema of an answer. `schema` is a word of pydantic's own."""

    name: Utf8Str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    strict: StrictFlag | None = None
    description: Utf8Str | None = None


class ResponseFormat(StrictModel):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _require_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("type json_schema needs json_schema")
        return self


class StreamOptions(StrictModel):
    """Options of a streamed answer."""

    include_usage: FalseIfNull = False
    include_obfuscation: StrictFlag | None = None


class GenerationRequest(StrictModel):
    """Fields that all requests for text share."""

    model: Utf8Str | None = None
    temperature: Annotated[FiniteNumber, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteNumber, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=2**31)] | None = None
    """vLLM's; 0 or -1: all tokens."""
    min_p: Annotated[FiniteNumber, Field(ge=0, le=1)] | None = None
    """vLLM's."""
    repetition_penalty: Annotated[FiniteNumber, Field(gt=0, le=10)] | None = None
    """vLLM's."""
    n: OneIfNull = 1
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Utf8Str | FailFastList[Utf8Str] | None = None
    stop_token_ids: Annotated[FailFastList[StrictInt], Field(max_length=1024)] | None = None
    """vLLM's: tokens that end the answer, beside the model's own."""
    return_token_ids: FalseIfNull = False
    """vLLM's: prompts and answers come as tokens, too."""
    stream: FalseIfNull = False
    stream_options: StreamOptions | None = None
    structured_outputs: (
        Annotated[dict[Literal["choice", "regex", "json"], Any], BeforeValidator(_limit_fields)] | None
    ) = None
    """vLLM's: the answer is one of some texts, matches an expression, or is JSON of a schema."""
    presence_penalty: Annotated[FiniteNumber, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteNumber, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[TokenIdStr, LogitBias], BeforeValidator(limit_biases)] | None = None
    user: Utf8Str | None = None
    """Not used."""

    def stop_texts(self) -> list[str]:
        """Return the texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @model_validator(mode="after")
    def _check_stop_texts(self) -> GenerationRequest:
        if len(self.stop_texts()) > 16:
            raise ValueError(f"stop has {len(self.stop_texts())} texts; at most 16 are allowed")
        if not all(self.stop_texts()):
            raise ValueError("a text of stop is empty")
        if max(map(len, self.stop_texts()), default=0) > MAX_STOP_CHARS:
            raise ValueError(f"a text of stop has more than {MAX_STOP_CHARS} characters")
        return self


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[NonEmptyList[ChatMessage], BeforeValidator(limit_messages)]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictFlag | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ReasoningEffort | None = None
    """Given to the chat template; `none` and `minimal` turn thinking off where it can be turned off."""
    chat_template_kwargs: Annotated[dict[Utf8Str, Any], BeforeValidator(_limit_fields)] | None = None
    """vLLM's: variables of the chat template, such as enable_thinking."""
    tools: Annotated[FailFastList[ChatTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictFlag | None = None
    metadata: Annotated[dict[Utf8Str, Utf8Str], Field(max_length=16), BeforeValidator(_limit_fields)] | None = None
    store: StrictFlag | None = None
    service_tier: Utf8Str | None = None
    """The last three are not used."""

    def requested_tokens(self) -> int | None:
        """Return how many tokens are asked for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template."""
        effort = self.reasoning_effort
        reserved = (
            {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort not in NO_THINKING_EFFORTS}
        )
        return reserved | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _check_template_variables(self) -> ChatRequest:
        for name in self.chat_template_kwargs or {}:
            if name in RESERVED_TEMPLATE_VARIABLES or not name.isidentifier():
                raise ValueError(f"chat_template_kwargs may not set {name[:100]!r}")
        return self

    def offered_tools(self) -> list[ChatTool]:
        """Return the tools that may be called."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    def is_call_forced(self) -> bool:
        """True when a call is all that may come."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        name, count = next(iter(Counter(names).most_common(1)), ("", 0))
        if count > 1:
            raise ValueError(f"two tools are called {name}")
        if self.is_call_forced() and not names:
            raise ValueError("tool_choice asks for a call, and tools are not given")
        if self.is_call_forced() and (
            self.structured_outputs or (self.response_format and self.response_format.type != "text")
        ):
            raise ValueError("tool_choice asks for a call, and another form of the answer is given: give one form")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, which is not among the tools")
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


TokenIds = NonEmptyList[StrictInt]


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Annotated[
        Utf8Str | NonEmptyList[Utf8Str] | TokenIds | NonEmptyList[TokenIds], BeforeValidator(limit_prompts)
    ]
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=5)] | None = None
    echo: FalseIfNull = False
    best_of: Annotated[StrictInt, Field(ge=1, le=1)] | None = None
    """Only 1."""
    return_weight_versions: FalseIfNull = False
    """vLLM's: answers say which weights they are of, where a server can load others."""
    suffix: Annotated[Utf8Str, StringConstraints(max_length=0)] | None = None
    """Only empty."""

    def list_prompts(self) -> list[str | list[int]]:
        """Return the prompts one by one."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)

    def requested_tokens(self) -> int | None:
        """Return how many tokens are asked for."""
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default here

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: logprobs are those of the answer")
        return self


class EmbeddingRequest(StrictModel):
    """`POST /v1/embeddings`."""

    model: Utf8Str | None = None
    input: Utf8Str | NonEmptyList[Utf8Str] | TokenIds | NonEmptyList[TokenIds]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    """As many as the model has."""
    user: Utf8Str | None = None

    def list_inputs(self) -> list[str | list[int]]:
        """Return the texts one by one."""
        given: Any = self.input
        return [given] if isinstance(given, str) or isinstance(given[0], int) else list(given)


MessageList = NonEmptyList[ChatMessage]


class ClassifyRequest(StrictModel):
    """`POST /v1/classify`: trajectories as words, for a classifier; conversations, for a reward model."""

    model: Utf8Str | None = None
    input: Utf8Str | NonEmptyList[Utf8Str] | None = None
    messages: Annotated[MessageList | NonEmptyList[MessageList] | None, BeforeValidator(limit_messages)] = None

    @model_validator(mode="after")
    def _require_one_input(self) -> ClassifyRequest:
        if (self.input is None) == (self.messages is None):
            raise ValueError("give either input or messages")
        return self

    def list_inputs(self) -> list[str]:
        """Return the texts one by one."""
        return [self.input] if isinstance(self.input, str) else self.input or []

    def list_conversations(self) -> list[list[ChatMessage]]:
        """Return the conversations one by one."""
        found: list[list[ChatMessage]] = []
        for one in self.messages or []:
            if isinstance(one, list):
                found.append(one)
            else:
                found = found or [[]]
                found[0].append(one)
        return found


class TokenizeRequest(StrictModel):
    """`POST /tokenize`, as vLLM has it: a text or a conversation."""

    model: Utf8Str | None = None
    prompt: Utf8Str | None = None
    messages: Annotated[NonEmptyList[ChatMessage] | None, BeforeValidator(limit_messages)] = None

    @model_validator(mode="after")
    def _require_one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self
