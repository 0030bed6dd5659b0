"""What is served under which name, and how a request of a client becomes requests of an engine."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from anabatic.config.chat import Sampling
from anabatic.config.serve import Limits
from anabatic.core import json_text
from anabatic.core.errors import AnabaticError, TemplateRefuses
from anabatic.core.text import did_you_mean, utf8
from anabatic.data.tokenizer import chat_prompt
from anabatic.infer import tool_calls
from anabatic.infer.classify import TrajectoryClassifier
from anabatic.infer.dialogue import continuation
from anabatic.infer.engine import Engine
from anabatic.infer.request import Request
from anabatic.infer.score import Scorer
from anabatic.infer.server.bounds import require_choices, require_form, require_room
from anabatic.infer.server.errors import ApiError, from_ours, refused
from anabatic.infer.server.schema import ChatRequest, CompletionRequest, Generation, Message, NamedTool, Tool

_SAMPLED = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


@dataclass(frozen=True)
class Served:
    """A name that clients may ask.

    Attributes:
        name: as clients type it.
        engine: answers; several names may share one.
        model: what the engine runs.
        adapter: of the engine; None: the model itself.
    """

    name: str
    engine: Engine
    model: PreTrainedModel
    adapter: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @functools.cached_property
    def style(self) -> tool_calls.Style | None:
        """How calls of tools are written; None: in no way that is known."""
        return tool_calls.style(self.engine.tokenizer)

    @functools.cached_property
    def shows_tools(self) -> bool:
        """True when the model is told of tools."""
        return tool_calls.shows_tools(self.engine.tokenizer)

    def reader(self, asked: ChatRequest) -> tool_calls.Reader | None:
        """Return what finds the calls in an answer; None: there are none to find, or they come as text."""
        names = [tool.function.name for tool in asked.offered()]
        if not names:
            return None
        if asked.forced():
            choice = asked.tool_choice
            return tool_calls.Forced(names, choice.function.name if isinstance(choice, NamedTool) else None)
        several = asked.parallel_tool_calls is not False
        return None if self.style is None else tool_calls.reader(self.style, names, several)

    def require_tokens(self, ids: Sequence[int], param: str) -> None:
        """Refuse tokens that the model has not.

        Raises:
            ApiError: 400.
        """
        entries = self.model.config.vocab_size
        wrong = next((one for one in ids if not 0 <= one < entries), None)
        if wrong is not None:
            raise ApiError(400, f"token {wrong} is not among the {entries} of {self.name}", param)

    def as_json(self) -> dict[str, Any]:
        """Return the object of `/v1/models`."""
        base = _model(self.name, self.created)
        return base | {"max_model_len": self.engine.max_len, "root": self.name if self.adapter is None else None}


def _model(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "anabatic"}


@dataclass
class Catalogue:
    """All that is served.

    Attributes:
        models: the first one answers where no name is given.
        classifiers: name -> classifier of trajectories, or reward model.
        sampling: what requests leave open.
        cut: prompts that are too long lose their beginning instead of being refused.
    """

    models: Sequence[Served]
    classifiers: dict[str, TrajectoryClassifier | Scorer]
    sampling: Sampling
    limits: Limits
    cut: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def engines(self) -> list[Engine]:
        """Each engine once."""
        return list(dict.fromkeys(served.engine for served in self.models))

    @property
    def names(self) -> list[str]:
        """What is served, in the order in which it is listed."""
        return [*(served.name for served in self.models), *self.classifiers]

    def describe(self, name: str) -> dict[str, Any]:
        """Return the object of `/v1/models/NAME`.

        Raises:
            ApiError: 404, nothing of this name is served.
        """
        if name in self.classifiers:
            return _model(name, self.created)
        found = next((served for served in self.models if served.name == name), None)
        if found is None:
            raise self._missing(name, self.names)
        return found.as_json()

    def model(self, name: str | None) -> Served:
        """Return the model of a name.

        Raises:
            ApiError: 404, there is none.
        """
        if name is None and self.models:
            return self.models[0]
        for served in self.models:
            if served.name == name:
                return served
        raise self._missing(name, [served.name for served in self.models])

    def classifier(self, name: str | None, judges: bool = False) -> TrajectoryClassifier | Scorer:
        """Return the classifier of a name.

        Args:
            judges: conversations are to be judged, which a reward model does.

        Raises:
            ApiError: 404, there is none; 400, it is of the other kind.
        """
        of_kind = [one for one, found in self.classifiers.items() if isinstance(found, Scorer) == judges]
        known = next(iter(of_kind), None) if name is None else name
        if known is None or known not in self.classifiers:
            raise self._missing(name, of_kind)
        if known not in of_kind:
            wrong, right = ("input", "messages") if judges is False else ("messages", "input")
            kind = "a classifier of trajectories" if judges else "a reward model"
            raise ApiError(400, f"{known} is {kind}: give {right}", wrong)
        return self.classifiers[known]

    def judged(self, scorer: Scorer, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Return the tokens of conversations as a reward model reads them.

        Raises:
            ApiError: 400, the chat template refuses one, or it is too long.
        """
        made = []
        for at, messages in enumerate(conversations):
            plain = [_clean(message.plain()) for message in messages]
            require_room(plain, scorer.max_len, self.limits, "messages")
            param = f"messages[{at}]" if len(conversations) > 1 else "messages"
            try:
                made.append(scorer.ids(plain))
            except TemplateRefuses as error:
                raise refused(error, "the model", param) from error
            except AnabaticError as error:
                raise from_ours(error, param=param) from error
        return made

    def _missing(self, name: str | None, names: list[str]) -> ApiError:
        there = ", ".join(names) or "none"
        what = "no model of this kind is served" if name is None else f"there is no model {utf8(name)[:200]!r}"
        return ApiError(404, f"{what}.{did_you_mean(name or '', names)} Served: {there}", "model", "model_not_found")

    def chat(self, served: Served, asked: ChatRequest) -> list[Request]:
        """Return the requests of a conversation, one for each of its n answers."""
        tools = asked.offered()
        if tools and not served.shows_tools:
            raise ApiError(400, f"the chat template of {served.name} does not tell the model of tools", "tools")
        ids = self.conversation(served, asked.messages, tools, asked.variables())
        sampling = self._sampling(asked, asked.tokens())
        if asked.logprobs:
            sampling = replace(sampling, top_logprobs=asked.top_logprobs or 0)
        kind = asked.response_format
        if kind is not None and kind.type != "text":
            schema = kind.json_schema.schema_ if kind.json_schema is not None else {"type": "object"}
            sampling = self._formed(sampling, "json", schema)
        if asked.forced():
            choice = asked.tool_choice
            named = choice.function.name if isinstance(choice, NamedTool) else None
            several = asked.parallel_tool_calls is not False
            shape = tool_calls.schema([tool.model_dump(exclude_none=True) for tool in tools], named, several)
            sampling = self._formed(sampling, "json", shape, "tool_choice")
        return self._requests(served, [ids], sampling, asked)

    def completion(self, served: Served, asked: CompletionRequest) -> list[Request]:
        """Return the requests of the prompts, n for each."""
        tokenizer = served.engine.tokenizer
        prompts = []
        self._require_answers(len(asked.prompts()) * asked.n)
        for prompt in asked.prompts():
            require_room([prompt] if isinstance(prompt, str) else [], served.engine.max_len, self.limits, "prompt")
            ids = continuation(tokenizer, prompt) if isinstance(prompt, str) else prompt
            served.require_tokens(ids, "prompt")
            prompts.append(ids)
        sampling = replace(self._sampling(asked, asked.tokens()), top_logprobs=asked.logprobs or 0)
        return self._requests(served, prompts, sampling, asked)

    def conversation(
        self,
        served: Served,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a conversation, ready for an answer.

        Args:
            variables: of the chat template.

        Raises:
            ApiError: 400, the model has no chat template, or it refuses the conversation.
        """
        tokenizer = served.engine.tokenizer
        if not tokenizer.chat_template:
            raise ApiError(
                400,
                f"{served.name} has no chat template (no chat_template.jinja): it continues texts at /v1/completions",
                "model",
            )
        plain = [_clean(message.plain()) for message in messages]
        shown = [_clean(tool.model_dump(exclude_none=True)) for tool in tools] if tools else None
        require_room([plain, shown], served.engine.max_len, self.limits, "messages")
        try:
            return chat_prompt(tokenizer, plain, shown, variables=_clean(dict(variables or {})))
        except TemplateRefuses as error:
            raise refused(error, served.name, "messages") from error
        except AnabaticError as error:
            raise from_ours(error, param="messages") from error

    def _sampling(self, asked: Generation, tokens: int | None) -> Sampling:
        """Return how an answer is sampled: as asked, else as the server's settings say."""
        most = self.limits.new_tokens
        if tokens is not None and tokens > most:
            raise ApiError(400, f"{tokens} tokens are asked for; this server writes at most {most}", "max_tokens")
        given = {key: value for key in _SAMPLED if (value := getattr(asked, key)) is not None}
        if asked.top_k is not None:
            given["top_k"] = asked.top_k if asked.top_k > 0 else None
        if asked.seed is not None:
            given["seed"] = asked.seed % 2**63
        given["max_new_tokens"] = min(tokens or self.sampling.max_new_tokens, most)
        sampling = replace(self.sampling, **given, stop=asked.stops() or self.sampling.stop)
        for kind, value in (asked.structured_outputs or {}).items():
            sampling = self._formed(sampling, kind, value)
        return sampling

    def _formed(self, sampling: Sampling, kind: str, value: Any, param: str = "structured_outputs") -> Sampling:
        """Return a sampling whose answers have a form."""
        value = _clean(value)
        try:
            if kind == "choice":
                if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                    raise ApiError(400, "choice is no list of texts", "structured_outputs")
                require_choices(value, self.limits)
                return replace(sampling, choices=value)
            if kind == "regex":
                if not isinstance(value, str):
                    raise ApiError(400, "regex is no text", "structured_outputs")
                require_form(value, "regex")
                return replace(sampling, regex=value)
            schema = value if isinstance(value, str) else json.dumps(value)
            require_form(schema, "the schema", param)
            return replace(sampling, json_schema=schema)
        except AnabaticError as error:
            raise from_ours(error, param=param) from error

    def _require_answers(self, answers: int) -> None:
        if answers > self.limits.answers:
            raise ApiError(400, f"{answers} answers are asked for; at most {self.limits.answers} at once", "n")

    def _requests(
        self, served: Served, prompts: list[list[int]], sampling: Sampling, asked: Generation
    ) -> list[Request]:
        self._require_answers(len(prompts) * asked.n)
        engine = served.engine
        made = []
        for at, prompt in enumerate(prompts):
            ids = prompt
            room = engine.max_len - min(sampling.max_new_tokens, engine.max_len // 2)
            if self.cut and len(ids) > room:
                ids = ids[-room:]
            elif len(ids) >= engine.max_len:
                message = f"the prompt has {len(ids)} tokens; with an answer at most {engine.max_len} fit"
                raise ApiError(400, message, "messages", "context_length_exceeded")
            for which in range(asked.n):
                seed = sampling.seed
                one = sampling if seed is None else replace(sampling, seed=(seed + at * asked.n + which) % 2**63)
                try:
                    made.append(engine.request(ids, one, adapter=served.adapter))
                except AnabaticError as error:
                    raise from_ours(error) from error
        return made


def _clean(value: Any) -> Any:
    """Lone surrogates, which JSON can write and no tokenizer reads, become question marks.

    Raises:
        ApiError: 400, it is nested more deeply than anybody writes.
    """
    try:
        return json.loads(utf8(json.dumps(json_text.require_shallow(value), ensure_ascii=False)))
    except ValueError as error:
        raise ApiError(400, f"the body is {error}") from error
