"""Served models by name, and the conversion of client requests to requests of an engine."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from transformers import PreTrainedModel

from anabatic.config.chat import Sampling
from anabatic.config.serve import ServerLimits
from anabatic.core import json_reader
from anabatic.core.errors import AnabaticError, ChatTemplateError
from anabatic.core.formatting import did_you_mean, to_valid_utf8
from anabatic.data.tokenizer.hf_folder import encode_chat
from anabatic.infer import reasoning_parser, tool_call_parser
from anabatic.infer.dialogue import encode_continuation
from anabatic.infer.engine import Engine
from anabatic.infer.request import Request
from anabatic.infer.reward_scorer import RewardScorer, ScoredRow
from anabatic.infer.server.api_errors import ApiError, from_anabatic_error, template_error
from anabatic.infer.server.request_limits import require_few_choices, require_fits_context, require_short_grammar
from anabatic.infer.server.request_schema import (
    ChatMessage,
    ChatRequest,
    ChatTool,
    CompletionRequest,
    GenerationRequest,
    NamedTool,
)

if TYPE_CHECKING:
    from anabatic.infer.picture_prompts import PictureReader
    from anabatic.models.vision.prompt_pictures import PromptPictures

_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


@dataclass(frozen=True)
class ServedModel:
    """A name that clients may ask.

    Attributes:
        name: as clients type it.
        engine: answers; several names may share one.
        model: what the engine runs.
        adapter: of the engine; None: the model itself.
        pictures: reads those of conversations; None: the model sees none.
        counted_as: its name in the metrics; empty: its own.
    """

    name: str
    engine: Engine
    model: PreTrainedModel
    adapter: str | None = None
    pictures: PictureReader | None = None
    counted_as: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def tool_call_style(self) -> tool_call_parser.ToolCallStyle | None:
        """Format of tool calls; None if it is unknown."""
        return tool_call_parser.detect_style(self.engine.tokenizer)

    @functools.cached_property
    def writes_reasoning(self) -> bool:
        """True when the model was taught to reason before it answers."""
        return reasoning_parser.writes_reasoning(self.engine.tokenizer)

    def make_reasoning_parser(self, request: Request) -> reasoning_parser.ReasoningParser | None:
        """Return what finds the reasoning in the answer to a request; None: there is none to find."""
        if not self.writes_reasoning:
            return None
        inside = reasoning_parser.begins_in_reasoning(self.engine.tokenizer, request.prompt)
        return reasoning_parser.ReasoningParser(inside)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """True when the chat template shows tools to the model."""
        return tool_call_parser.shows_tools(self.engine.tokenizer)

    def make_parser(self, body: ChatRequest) -> tool_call_parser.ToolCallParser | None:
        """Return what finds the calls in an answer; None: there are none to find, or they come as text."""
        names = [tool.function.name for tool in body.offered_tools()]
        if not names:
            return None
        if body.is_call_forced():
            choice = body.tool_choice
            tool_name = choice.function.name if isinstance(choice, NamedTool) else None
            return tool_call_parser.make_forced_parser(names, tool_name)
        several = body.parallel_tool_calls is not False
        return (
            None if self.tool_call_style is None else tool_call_parser.make_parser(self.tool_call_style, names, several)
        )

    def require_known_tokens(self, ids: Sequence[int], param: str) -> None:
        """Refuse tokens that the model has not.

        Raises:
            ApiError: 400.
        """
        entries = self.model.config.get_text_config().vocab_size
        wrong = next((one for one in ids if not 0 <= one < entries), None)
        if wrong is not None:
            raise ApiError(400, f"token {wrong} is not among the {entries} of {self.name}", param)

    def as_json(self) -> dict[str, Any]:
        """Return the object of `/v1/models`."""
        kinds = ["text"] if self.pictures is None else ["text", "image"]
        return _model_object(self.name, self.created) | {
            "max_model_len": self.engine.max_len,
            "root": self.name if self.adapter is None else None,
            "architecture": {"input_modalities": kinds, "output_modalities": ["text"]},  # OpenRouter's names
        }


def _model_object(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "anabatic"}


class InputClassifier(Protocol):
    """Handler of `POST /v1/classify`: a class and its probability for each input."""

    def predict_by_passes(self, texts: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield once after every forward pass; the last one has all answers."""
        ...


@dataclass
class ModelRegistry:
    """All that is served.

    Attributes:
        models: the first one answers where no name is given.
        classifiers: name -> classifier of trajectories, or reward model.
        sampling: what requests leave open.
        truncate_prompts: prompts that are too long lose their beginning instead of being refused.
    """

    models: list[ServedModel]
    classifiers: dict[str, InputClassifier | RewardScorer]
    sampling: Sampling
    limits: ServerLimits
    truncate_prompts: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engines(self) -> list[Engine]:
        """Each engine once."""
        return list(dict.fromkeys(served.engine for served in self.models))

    @property
    def model_names(self) -> list[str]:
        """Names of served models, in the order of the list."""
        return [*(served.name for served in self.models), *self.classifiers]

    def describe_model(self, name: str) -> dict[str, Any]:
        """Return the object of `/v1/models/NAME`.

        Raises:
            ApiError: 404, nothing of this name is served.
        """
        if name in self.classifiers:
            return _model_object(name, self.created)
        found = next((served for served in self.models if served.name == name), None)
        if found is None:
            raise self._not_found_error(name, self.model_names)
        return found.as_json()

    def find_model(self, name: str | None) -> ServedModel:
        """Return the model of a name.

        Raises:
            ApiError: 404, there is none.
        """
        if name is None and self.models:
            return self.models[0]
        for served in self.models:
            if served.name == name:
                return served
        raise self._not_found_error(name, [served.name for served in self.models])

    def find_classifier(self, name: str | None, judges: bool = False) -> InputClassifier | RewardScorer:
        """Return the classifier of a name.

        Args:
            judges: conversations are to be judged, which a reward model does.

        Raises:
            ApiError: 404, there is none; 400, it is of the other kind.
        """
        of_kind = [one for one, found in self.classifiers.items() if isinstance(found, RewardScorer) == judges]
        known = next(iter(of_kind), None) if name is None else name
        if known is None or known not in self.classifiers:
            raise self._not_found_error(name, of_kind)
        if known not in of_kind:
            wrong, right = ("input", "messages") if judges is False else ("messages", "input")
            kind = "a classifier of trajectories" if judges else "a reward model"
            raise ApiError(400, f"{known} is {kind}: give {right}", wrong)
        return self.classifiers[known]

    def encode_scored_conversations(
        self, scorer: RewardScorer, conversations: Sequence[Sequence[ChatMessage]]
    ) -> list[ScoredRow]:
        """Return conversations as a reward model reads them.

        Raises:
            ApiError: 400, the chat template refuses one, it is too long, or its pictures cannot be read.
        """
        encoded = []
        shown = [[image for message in messages for image in message.list_pictures()] for messages in conversations]
        mark = self._require_visible("the reward model", scorer.pictures, sum(map(len, shown)))
        for at, (messages, images) in enumerate(zip(conversations, shown, strict=True)):
            plain = [_replace_surrogates(message.to_template_dict(mark)) for message in messages]
            require_fits_context(plain, scorer.max_len, self.limits, "messages")
            param = f"messages[{at}]" if len(conversations) > 1 else "messages"
            try:
                encoded.append(scorer.encode_conversation(plain, images))
            except ChatTemplateError as error:
                raise template_error(error, "the model", param) from error
            except AnabaticError as error:
                raise from_anabatic_error(error, param=param) from error
        return encoded

    def _require_visible(self, name: str, reader: PictureReader | None, pictures: int) -> str:
        """Return what stands for a picture in turns; refuse pictures that are too many, or not seen."""
        if pictures and reader is None:
            raise ApiError(400, f"{name} sees no pictures", "messages")
        if pictures > self.limits.pictures:
            what = f"{pictures} pictures are given; this server reads at most {self.limits.pictures}"
            raise ApiError(400, what, "messages")
        return "" if reader is None else reader.picture_text

    def _not_found_error(self, name: str | None, names: list[str]) -> ApiError:
        served_names = ", ".join(names) or "none"
        what = "no model of this kind is served" if name is None else f"there is no model {to_valid_utf8(name)[:200]!r}"
        return ApiError(
            404, f"{what}.{did_you_mean(name or '', names)} Served: {served_names}", "model", "model_not_found"
        )

    def make_chat_requests(self, served: ServedModel, body: ChatRequest) -> list[Request]:
        """Return the requests of a conversation, one for each of its n answers."""
        tools = body.offered_tools()
        if tools and not served.shows_tools:
            raise ApiError(400, f"the chat template of {served.name} does not tell the model of tools", "tools")
        ids, pictures = self.encode_conversation(served, body.messages, tools, body.template_variables())
        sampling = self._make_sampling(body, body.requested_tokens())
        if body.logprobs:
            sampling = replace(sampling, top_logprobs=body.top_logprobs or 0)
        kind = body.response_format
        if kind is not None and kind.type != "text":
            schema = kind.json_schema.schema_ if kind.json_schema is not None else {"type": "object"}
            sampling = self._constrain_sampling(sampling, "json", schema)
        if body.is_call_forced():
            choice = body.tool_choice
            tool_name = choice.function.name if isinstance(choice, NamedTool) else None
            several = body.parallel_tool_calls is not False
            shape = tool_call_parser.build_call_schema(
                [tool.model_dump(exclude_none=True) for tool in tools], tool_name, several
            )
            sampling = self._constrain_sampling(sampling, "json", shape, "tool_choice")
        return self._make_requests(served, [ids], sampling, body, pictures)

    def make_completion_requests(self, served: ServedModel, body: CompletionRequest) -> list[Request]:
        """Return the requests of the prompts, n for each."""
        tokenizer = served.engine.tokenizer
        prompts = []
        self._require_few_answers(len(body.list_prompts()) * body.n)
        for prompt in body.list_prompts():
            require_fits_context(
                [prompt] if isinstance(prompt, str) else [], served.engine.max_len, self.limits, "prompt"
            )
            ids = encode_continuation(tokenizer, prompt) if isinstance(prompt, str) else prompt
            served.require_known_tokens(ids, "prompt")
            prompts.append(ids)
        sampling = replace(self._make_sampling(body, body.requested_tokens()), top_logprobs=body.logprobs or 0)
        return self._make_requests(served, prompts, sampling, body)

    def encode_conversation(
        self,
        served: ServedModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatTool] | None,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], PromptPictures | None]:
        """Return the tokens of a conversation, ready for an answer, and its pictures.

        Args:
            variables: of the chat template.

        Raises:
            ApiError: 400, the model has no chat template, or it refuses the conversation; it sees no pictures, or one
                cannot be read.
        """
        tokenizer = served.engine.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(
                400,
                f"{served.name} has no chat template (no chat_template.jinja): it continues texts at /v1/completions",
                "model",
            )
        images = [image for message in messages for image in message.list_pictures()]
        mark = self._require_visible(served.name, served.pictures, len(images))
        plain = [_replace_surrogates(message.to_template_dict(mark)) for message in messages]
        tool_schemas = [_replace_surrogates(tool.model_dump(exclude_none=True)) for tool in tools] if tools else None
        require_fits_context([plain, tool_schemas], served.engine.max_len, self.limits, "messages")
        filled = _replace_surrogates(dict(variables or {}))
        try:
            if served.pictures is not None:
                return served.pictures.encode_turns(plain, images, "the request", tools=tool_schemas, variables=filled)
            return encode_chat(tokenizer, plain, tool_schemas, variables=filled), None
        except ChatTemplateError as error:
            raise template_error(error, served.name, "messages") from error
        except AnabaticError as error:
            raise from_anabatic_error(error, param="messages") from error

    def _make_sampling(self, body: GenerationRequest, tokens: int | None) -> Sampling:
        """Return how an answer is sampled: as asked, else as the server's settings say."""
        max_tokens = self.limits.new_tokens
        if tokens is not None and tokens > max_tokens:
            raise ApiError(400, f"{tokens} tokens are asked for; this server writes at most {max_tokens}", "max_tokens")
        given = {key: value for key in _SAMPLING_FIELDS if (value := getattr(body, key)) is not None}
        if body.top_k is not None:
            given["top_k"] = body.top_k if body.top_k > 0 else None
        if body.seed is not None:
            given["seed"] = body.seed % 2**63
        given["max_new_tokens"] = min(tokens or self.sampling.max_new_tokens, max_tokens)
        sampling = replace(self.sampling, **given, stop=body.stop_texts() or self.sampling.stop)
        for kind, value in (body.structured_outputs or {}).items():
            sampling = self._constrain_sampling(sampling, kind, value)
        return sampling

    def _constrain_sampling(
        self, sampling: Sampling, kind: str, value: Any, param: str = "structured_outputs"
    ) -> Sampling:
        """Return a sampling whose answers have a form."""
        value = _replace_surrogates(value)
        try:
            if kind == "choice":
                if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                    raise ApiError(400, "choice is no list of texts", "structured_outputs")
                require_few_choices(value, self.limits)
                return replace(sampling, choices=value)
            if kind == "regex":
                if not isinstance(value, str):
                    raise ApiError(400, "regex is no text", "structured_outputs")
                require_short_grammar(value, "regex")
                return replace(sampling, regex=value)
            schema = value if isinstance(value, str) else json.dumps(value)
            require_short_grammar(schema, "the schema", param)
            return replace(sampling, json_schema=schema)
        except AnabaticError as error:
            raise from_anabatic_error(error, param=param) from error

    def _require_few_answers(self, answers: int) -> None:
        if answers > self.limits.answers:
            raise ApiError(400, f"{answers} answers are asked for; at most {self.limits.answers} at once", "n")

    def _make_requests(
        self,
        served: ServedModel,
        prompts: list[list[int]],
        sampling: Sampling,
        body: GenerationRequest,
        pictures: PromptPictures | None = None,
    ) -> list[Request]:
        self._require_few_answers(len(prompts) * body.n)
        engine = served.engine
        requests = []
        stops = engine.stop_ids | frozenset(body.stop_token_ids or ())
        for at, prompt in enumerate(prompts):
            ids = prompt
            room = engine.max_len - min(sampling.max_new_tokens, engine.max_len // 2)
            if self.truncate_prompts and len(ids) > room and pictures is None:
                ids = ids[-room:]
            elif len(ids) >= engine.max_len:
                message = f"the prompt has {len(ids)} tokens; with an answer at most {engine.max_len} fit"
                raise ApiError(400, message, "messages", "context_length_exceeded")
            for which in range(body.n):
                seed = sampling.seed
                one = sampling if seed is None else replace(sampling, seed=(seed + at * body.n + which) % 2**63)
                try:
                    requests.append(engine.request(ids, one, stops, adapter=served.adapter, pictures=pictures))
                except AnabaticError as error:
                    raise from_anabatic_error(error) from error
        return requests


def _replace_surrogates(value: Any) -> Any:
    """Lone surrogates, which JSON can write and no tokenizer reads, become question marks.

    Raises:
        ApiError: 400, it is nested more deeply than anybody writes.
    """
    try:
        return json.loads(to_valid_utf8(json.dumps(json_reader.require_shallow(value), ensure_ascii=False)))
    except ValueError as error:
        raise ApiError(400, f"the body is {error}") from error
