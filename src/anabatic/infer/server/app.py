"""The application: paths, and what happens at each. Shapes and names are OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response

from anabatic import __version__
from anabatic.core.errors import AnabaticError
from anabatic.infer.dialogue import encode_continuation
from anabatic.infer.embeddings import embed_rows
from anabatic.infer.reward_scorer import RewardScorer
from anabatic.infer.server.admission import AdmissionControl
from anabatic.infer.server.api_errors import (
    ApiError,
    describe_unreadable_body,
    from_anabatic_error,
    from_validation_error,
)
from anabatic.infer.server.engine_worker import EngineWorker
from anabatic.infer.server.middleware import GuardMiddleware
from anabatic.infer.server.model_registry import ModelRegistry, ServedModel
from anabatic.infer.server.prometheus_metrics import ServerMetrics
from anabatic.infer.server.request_limits import require_fits_context
from anabatic.infer.server.request_schema import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerationRequest,
    TokenizeRequest,
)
from anabatic.infer.server.response_builder import CompletionBuilder
from anabatic.infer.server.response_stream import ResponseStream, ServerParts
from anabatic.infer.server.responses_events import ResponsesBuilder
from anabatic.infer.server.responses_schema import ResponsesRequest
from anabatic.infer.server.web_files import respond_library
from anabatic.infer.server.weight_routes import WeightRoutes
from anabatic.infer.web import libraries, pages

_TOKENIZER_THREADS = 2
_Made = TypeVar("_Made")
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": about}
    for status, about in {
        400: "The request is wrong.",
        403: "Pages of this origin may not ask.",
        404: "There is no such model.",
        408: "The body came too slowly.",
        413: "The body is too large.",
        421: "The server has another name.",
        429: "Too many requests wait; Retry-After says for how long.",
        504: "The answer took too long.",
    }.items()
}


class ApiRoutes:
    """The paths of the API, over a catalogue and the worker that runs its engines."""

    def __init__(self, catalogue: ModelRegistry, worker: EngineWorker, weights: WeightRoutes | None = None) -> None:
        self._registry, self._worker, self._weights = catalogue, worker, weights
        self.server_metrics = ServerMetrics(catalogue.models, worker)
        self._admission = AdmissionControl(catalogue.limits.queue)
        # Few threads: each keeps memory of the longest texts that it has counted.
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, "anabatic-count")
        self.router = APIRouter(responses=_ERROR_RESPONSES)
        for path, show in (("/", self.show_page), (libraries.PATH_PREFIX + "{name:path}", self.show_library)):
            self.router.add_api_route(path, show, methods=["GET"], response_model=None, include_in_schema=False)
        for path, method, function in (
            ("/health", "GET", self.check_health),
            ("/metrics", "GET", self.show_metrics),
            ("/v1/models", "GET", self.list_models),
            ("/v1/models/{name:path}", "GET", self.retrieve_model),
            ("/v1/chat/completions", "POST", self.create_chat_completion),
            ("/v1/completions", "POST", self.completions),
            ("/v1/responses", "POST", self.responses),
            ("/v1/responses/{name:path}", "GET", self.retrieve_response),
            ("/v1/embeddings", "POST", self.embeddings),
            ("/v1/classify", "POST", self.classify_inputs),
            ("/tokenize", "POST", self.tokenize),
        ):
            self.router.add_api_route(path, function, methods=[method], response_model=None)

    async def show_page(self) -> Response:
        """The chat page."""
        found = pages.chat_page()
        return HTMLResponse(found.html, headers=found.headers)

    async def show_library(self, http: Request) -> Response:
        """The libraries that the chat page loads."""
        return respond_library(http)

    async def check_health(self) -> Response:
        """Say whether requests are answered."""
        if self._worker.failure:
            raise self._engine_stopped_error()
        return JSONResponse({"status": "ok", "version": __version__})

    async def show_metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.server_metrics.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def list_models(self) -> Response:
        """List what is served."""
        return JSONResponse(
            {"object": "list", "data": [self._registry.describe_model(name) for name in self._registry.model_names]}
        )

    async def retrieve_model(self, name: str) -> Response:
        """Describe one model."""
        return JSONResponse(self._registry.describe_model(name))

    async def create_chat_completion(self, body: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        served = self._registry.find_model(body.model)
        requests = await self._run_in_thread(self._registry.make_chat_requests, served, body)
        shape = CompletionBuilder(
            True,
            served.name,
            has_logprobs=bool(body.logprobs),
            has_token_ids=body.return_token_ids,
            make_parser=lambda: served.make_parser(body),
            make_reasoning_parser=served.make_reasoning_parser,
        )
        return await self._answer_requests(served, body, requests, shape, http)

    async def responses(self, body: ResponsesRequest, http: Request) -> Response:
        """Answer what OpenAI calls a response: messages, calls of functions and their results as items."""
        served = self._registry.find_model(body.model)
        try:
            chat_request = body.to_chat_request()
        except ValidationError as error:
            raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error
        except ValueError as error:
            raise ApiError(400, str(error), "input") from error
        requests = await self._run_in_thread(self._registry.make_chat_requests, served, chat_request)
        shape = ResponsesBuilder(
            body, served.name, lambda: served.make_parser(chat_request), served.make_reasoning_parser
        )
        return await self._answer_requests(served, chat_request, requests, shape, http)

    async def retrieve_response(self, name: str) -> Response:
        """Responses are not kept."""
        raise ApiError(404, f"this server stores no responses, {name[:100]!r} among them", None, "response_not_found")

    async def completions(self, body: CompletionRequest, http: Request) -> Response:
        """Continue texts."""
        served = self._registry.find_model(body.model)
        requests = await self._run_in_thread(self._registry.make_completion_requests, served, body)
        echo: list[str] = []
        if body.echo:
            texts = [_decode_prompt(served, prompt) for prompt in body.list_prompts()]
            echo = [text for text in texts for _ in range(body.n)]
        version = self._weights.version if self._weights is not None and body.return_weight_versions else ""
        shape = CompletionBuilder(False, served.name, echo, body.logprobs is not None, body.return_token_ids, version)
        return await self._answer_requests(served, body, requests, shape, http)

    def _engine_stopped_error(self) -> ApiError:
        return ApiError(503, f"the engine has stopped: {self._worker.failure}", None, "engine_stopped")

    async def _answer_requests(
        self,
        served: ServedModel,
        body: GenerationRequest,
        requests: list[Any],
        shape: CompletionBuilder | ResponsesBuilder,
        http: Request,
    ) -> Response:
        if self._worker.failure:
            raise self._engine_stopped_error()
        if self._weights is not None:
            self._weights.require_running()
        usage = body.stream_options is not None and body.stream_options.include_usage
        parts = ServerParts(self._worker, self.server_metrics, self._admission, self._registry.limits.seconds)
        flow = ResponseStream(parts, served, shape, requests, body.n, usage)
        return flow.respond_streaming() if body.stream else await flow.respond_complete(http)

    async def embeddings(self, body: EmbeddingRequest, http: Request) -> Response:
        """Turn texts into vectors: the mean of a model's last hidden states, of length 1."""
        served = self._registry.find_model(body.model)
        texts = body.list_inputs()
        if len(texts) > 2048:
            raise ApiError(400, f"{len(texts)} inputs; at most 2048 at once", "input")
        for text in texts:
            require_fits_context(
                [text] if isinstance(text, str) else [], served.engine.max_len, self._registry.limits, "input"
            )
        tokens = await self._run_in_thread(lambda: [_encode_input(served, text) for text in texts])
        if served.adapter is not None:
            raise ApiError(400, f"{served.name} is an adapter: embeddings are those of a model", "model")
        rows = await self._run_passes(embed_rows(served.model, tokens), http)
        pack = _encode_base64 if body.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": at, "embedding": pack(row)} for at, row in enumerate(rows)]
        total = sum(map(len, tokens))
        used = {"prompt_tokens": total, "total_tokens": total}
        return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": used})

    async def classify_inputs(self, body: ClassifyRequest, http: Request) -> Response:
        """Say which class trajectories are of, or how good a reward model finds conversations."""
        judges = body.messages is not None
        classifier = self._registry.find_classifier(body.model, judges)
        inputs: Sequence[Any] = body.list_conversations() if judges else body.list_inputs()
        if len(inputs) > 2048:
            raise ApiError(400, f"{len(inputs)} inputs; at most 2048 at once", "messages" if judges else "input")
        if isinstance(classifier, RewardScorer):
            tokens = await self._run_in_thread(self._registry.encode_scored_conversations, classifier, inputs)
            rows = await self._run_passes(classifier.score_by_passes(tokens), http)
        else:
            rows = await self._run_passes(classifier.predict_by_passes(inputs), http)
        return JSONResponse({"object": "list", "data": [{"index": at, **row} for at, row in enumerate(rows)]})

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """Count the tokens of a text or a conversation."""
        served = self._registry.find_model(body.model)

        def count_tokens() -> list[int]:
            if body.messages is not None:
                return self._registry.encode_conversation(served, body.messages, None)[0]
            text = body.prompt or ""
            require_fits_context([text], served.engine.max_len, self._registry.limits, "prompt")
            return list(served.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

        tokens = await self._run_in_thread(count_tokens)
        return JSONResponse({"count": len(tokens), "max_model_len": served.engine.max_len, "tokens": tokens})

    async def _run_in_thread(self, function: Callable[..., _Made], *arguments: Any) -> _Made:
        """Run what takes a while in its own thread: the loop continues answering others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _run_passes(self, passes: Iterator[list[Any]], http: Request) -> list[Any]:
        """Return the rows of many forward passes, each of them in the thread of the engines between two of their steps.

        Raises:
            ApiError: the input is wrong, or it took too long.
        """
        seconds, rows = self._registry.limits.seconds, []
        end = time.monotonic() + seconds
        while not await http.is_disconnected():
            if time.monotonic() > end:
                raise ApiError(504, f"the answer took more than {seconds:g} s", None, "timeout")
            try:
                some = await asyncio.wrap_future(self._worker.run_between_steps(lambda: next(passes, None)))
            except AnabaticError as error:
                raise from_anabatic_error(error) from error
            if some is None:
                break
            rows += some
        return rows


def _decode_prompt(served: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(served.engine.tokenizer.decode(prompt))


def _encode_input(served: ServedModel, text: str | list[int]) -> list[int]:
    ids = encode_continuation(served.engine.tokenizer, text) if isinstance(text, str) else text
    if len(ids) > served.engine.max_len:
        raise ApiError(400, f"an input has {len(ids)} tokens; at most {served.engine.max_len} fit", "input")
    if not ids:
        raise ApiError(400, "an input is empty", "input")
    served.require_known_tokens(ids, "input")
    return ids


def _encode_base64(row: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()


def create_app(
    catalogue: ModelRegistry,
    worker: EngineWorker,
    keys: Sequence[str],
    cors: Sequence[str],
    hosts: Collection[str] | None = None,
    weights_folder: Path | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        worker: started.
        keys: requests need one of them; empty: none.
        cors: origins whose pages may ask.
        hosts: names under which it may be asked; None: any.
        weights_folder: below it are weights that requests may load; None: there are no paths for that.
    """
    app = FastAPI(title="anabatic", version=__version__, docs_url=None, redoc_url=None)
    weights = None if weights_folder is None else WeightRoutes(catalogue, worker, weights_folder)
    api = ApiRoutes(catalogue, worker, weights)
    app.include_router(api.router)
    if weights is not None:
        app.include_router(weights.router)

    @app.exception_handler(ApiError)
    async def _handle_api_error(_: Request, error: ApiError) -> Response:
        return error.to_response()

    @app.exception_handler(RequestValidationError)
    async def _handle_validation_error(_: Request, error: RequestValidationError) -> Response:
        return from_validation_error(error).to_response()

    @app.exception_handler(HTTPException)
    async def _handle_http_error(request: Request, error: HTTPException) -> Response:
        what = {
            400: describe_unreadable_body(error.__cause__),
            404: f"there is nothing at {request.url.path[:200]}",
            405: f"{request.method[:20]} is not done here",
        }
        response = ApiError(error.status_code, what.get(error.status_code, str(error.detail))).to_response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def _handle_unexpected_error(_: Request, __: Exception) -> Response:
        return ApiError(500, "the server failed; its log says why").to_response()

    app.add_middleware(
        GuardMiddleware,
        limits=catalogue.limits,
        keys=keys,
        hosts=hosts,
        origins=cors,
        seen=api.server_metrics.count_response,
    )
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["GET", "POST"], allow_headers=["*"])
    return app
