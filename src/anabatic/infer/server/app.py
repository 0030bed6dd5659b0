"""The application: paths, and what happens at each. Shapes and names are OpenAI's."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from anabatic import __version__
from anabatic.core.errors import AnabaticError
from anabatic.infer.dialogue import continuation
from anabatic.infer.embed import embed
from anabatic.infer.score import Scorer
from anabatic.infer.server.admission import Admission
from anabatic.infer.server.answers import Shape
from anabatic.infer.server.bounds import require_room
from anabatic.infer.server.errors import ApiError, from_ours, from_validation, unreadable
from anabatic.infer.server.events import ResponseShape
from anabatic.infer.server.flow import Flow
from anabatic.infer.server.gate import Gate
from anabatic.infer.server.metrics import Metrics
from anabatic.infer.server.responses import ResponsesRequest
from anabatic.infer.server.runs import RunsApi
from anabatic.infer.server.schema import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    Generation,
    TokenizeRequest,
)
from anabatic.infer.server.served import Catalogue, Served
from anabatic.infer.server.worker import Worker
from anabatic.infer.web import page
from anabatic.infer.web.runs import Runs

_COUNTERS = 2
_Made = TypeVar("_Made")
_ERRORS: dict[int | str, dict[str, Any]] = {
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


class Api:
    """The paths of the API, over a catalogue and the worker that runs its engines."""

    def __init__(self, catalogue: Catalogue, worker: Worker, runs: bool = False) -> None:
        self._catalogue, self._worker, self._runs = catalogue, worker, runs
        self.figures = Metrics(catalogue.models, worker)
        self._admission = Admission(catalogue.limits.queue)
        # Few threads: each keeps memory of the longest texts that it has counted.
        self._threads = ThreadPoolExecutor(_COUNTERS, "anabatic-count")
        self.router = APIRouter(responses=_ERRORS)
        self.router.add_api_route("/", self.page, methods=["GET"], response_model=None, include_in_schema=False)
        for path, method, function in (
            ("/health", "GET", self.health),
            ("/metrics", "GET", self.metrics),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/v1/chat/completions", "POST", self.chat),
            ("/v1/completions", "POST", self.completions),
            ("/v1/responses", "POST", self.responses),
            ("/v1/responses/{name:path}", "GET", self.response),
            ("/v1/embeddings", "POST", self.embeddings),
            ("/v1/classify", "POST", self.classify),
            ("/tokenize", "POST", self.tokenize),
        ):
            self.router.add_api_route(path, function, methods=[method], response_model=None)

    async def page(self) -> Response:
        """The chat page; where nobody can chat, the page of runs."""
        if self._runs and not self._catalogue.models:
            return RedirectResponse("runs")
        found = page.chat(self._runs)
        return HTMLResponse(found.html, headers=found.headers)

    async def health(self) -> Response:
        """Say whether requests are answered."""
        if self._worker.failure:
            raise self._stopped()
        return JSONResponse({"status": "ok", "version": __version__})

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self.figures.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Response:
        """List what is served."""
        return JSONResponse(
            {"object": "list", "data": [self._catalogue.describe(name) for name in self._catalogue.names]}
        )

    async def model(self, name: str) -> Response:
        """Describe one model."""
        return JSONResponse(self._catalogue.describe(name))

    async def chat(self, asked: ChatRequest, http: Request) -> Response:
        """Answer a conversation."""
        served = self._catalogue.model(asked.model)
        requests = await self._apart(self._catalogue.chat, served, asked)
        shape = Shape(True, served.name, (), bool(asked.logprobs), lambda: served.reader(asked))
        return await self._answer(served, asked, requests, shape, http)

    async def responses(self, body: ResponsesRequest, http: Request) -> Response:
        """Answer what OpenAI calls a response: messages, calls of functions and their results as items."""
        served = self._catalogue.model(body.model)
        try:
            asked = body.as_chat()
        except ValidationError as error:
            raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in error.errors()]) from error
        requests = await self._apart(self._catalogue.chat, served, asked)
        shape = ResponseShape(body, served.name, lambda: served.reader(asked))
        return await self._answer(served, asked, requests, shape, http)

    async def response(self, name: str) -> Response:
        """Responses are not kept."""
        raise ApiError(404, f"this server stores no responses, {name[:100]!r} among them", None, "response_not_found")

    async def completions(self, asked: CompletionRequest, http: Request) -> Response:
        """Continue texts."""
        served = self._catalogue.model(asked.model)
        requests = await self._apart(self._catalogue.completion, served, asked)
        echo: list[str] = []
        if asked.echo:
            texts = [_text(served, prompt) for prompt in asked.prompts()]
            echo = [text for text in texts for _ in range(asked.n)]
        shape = Shape(False, served.name, echo, asked.logprobs is not None)
        return await self._answer(served, asked, requests, shape, http)

    def _stopped(self) -> ApiError:
        return ApiError(503, f"the engine has stopped: {self._worker.failure}", None, "engine_stopped")

    async def _answer(
        self, served: Served, asked: Generation, requests: list[Any], shape: Shape | ResponseShape, http: Request
    ) -> Response:
        limits = self._catalogue.limits
        if self._worker.failure:
            raise self._stopped()
        usage = asked.stream_options is not None and asked.stream_options.include_usage
        flow = Flow(
            self._worker, self.figures, self._admission, served, shape, requests, asked.n, usage, limits.seconds
        )
        return flow.stream() if asked.stream else await flow.answer(http)

    async def embeddings(self, asked: EmbeddingRequest, http: Request) -> Response:
        """Turn texts into vectors: the mean of a model's last hidden states, of length 1."""
        served = self._catalogue.model(asked.model)
        texts = asked.inputs()
        if len(texts) > 2048:
            raise ApiError(400, f"{len(texts)} inputs; at most 2048 at once", "input")
        for text in texts:
            require_room(
                [text] if isinstance(text, str) else [], served.engine.max_len, self._catalogue.limits, "input"
            )
        tokens = await self._apart(lambda: [_tokens(served, text) for text in texts])
        if served.adapter is not None:
            raise ApiError(400, f"{served.name} is an adapter: embeddings are those of a model", "model")
        rows = await self._by_passes(embed(served.model, tokens), http)
        pack = _base64 if asked.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": at, "embedding": pack(row)} for at, row in enumerate(rows)]
        total = sum(map(len, tokens))
        used = {"prompt_tokens": total, "total_tokens": total}
        return JSONResponse({"object": "list", "data": data, "model": served.name, "usage": used})

    async def classify(self, asked: ClassifyRequest, http: Request) -> Response:
        """Say which class trajectories are of, or how good a reward model finds conversations."""
        judges = asked.messages is not None
        classifier = self._catalogue.classifier(asked.model, judges)
        inputs: Sequence[Any] = asked.conversations() if judges else asked.inputs()
        if len(inputs) > 2048:
            raise ApiError(400, f"{len(inputs)} inputs; at most 2048 at once", "messages" if judges else "input")
        if isinstance(classifier, Scorer):
            tokens = await self._apart(self._catalogue.judged, classifier, inputs)
            rows = await self._by_passes(classifier.scores_by_passes(tokens), http)
        else:
            rows = await self._by_passes(classifier.predict_by_passes(inputs), http)
        return JSONResponse({"object": "list", "data": [{"index": at, **row} for at, row in enumerate(rows)]})

    async def tokenize(self, asked: TokenizeRequest) -> Response:
        """Count the tokens of a text or a conversation."""
        served = self._catalogue.model(asked.model)

        def count() -> list[int]:
            if asked.messages is not None:
                return self._catalogue.conversation(served, asked.messages, None)
            text = asked.prompt or ""
            require_room([text], served.engine.max_len, self._catalogue.limits, "prompt")
            return list(served.engine.tokenizer(text, add_special_tokens=False)["input_ids"])

        tokens = await self._apart(count)
        return JSONResponse({"count": len(tokens), "max_model_len": served.engine.max_len, "tokens": tokens})

    async def _apart(self, function: Callable[..., _Made], *arguments: Any) -> _Made:
        """Run what takes a while in a thread of its own: the loop goes on answering others."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _by_passes(self, passes: Iterator[list[Any]], http: Request) -> list[Any]:
        """Return the rows of many forward passes, each of them in the thread of the engines between two of their steps.

        Raises:
            ApiError: the input is wrong, or it took too long.
        """
        seconds, rows = self._catalogue.limits.seconds, []
        end = time.monotonic() + seconds
        while not await http.is_disconnected():
            if time.monotonic() > end:
                raise ApiError(504, f"the answer took more than {seconds:g} s", None, "timeout")
            try:
                some = await asyncio.wrap_future(self._worker.ask(lambda: next(passes, None)))
            except AnabaticError as error:
                raise from_ours(error) from error
            if some is None:
                break
            rows += some
        return rows


def _text(served: Served, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else str(served.engine.tokenizer.decode(prompt))


def _tokens(served: Served, text: str | list[int]) -> list[int]:
    ids = continuation(served.engine.tokenizer, text) if isinstance(text, str) else text
    if len(ids) > served.engine.max_len:
        raise ApiError(400, f"an input has {len(ids)} tokens; at most {served.engine.max_len} fit", "input")
    if not ids:
        raise ApiError(400, "an input is empty", "input")
    served.require_tokens(ids, "input")
    return ids


def _base64(row: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()


def make_app(
    catalogue: Catalogue,
    worker: Worker,
    keys: Sequence[str],
    cors: Sequence[str],
    runs: Runs | None = None,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """Return the application.

    Args:
        worker: started.
        keys: requests need one of them; empty: none.
        cors: origins whose pages may ask.
        runs: training runs that may be looked at.
        hosts: names under which it may be asked; None: any.
    """
    app = FastAPI(title="anabatic", version=__version__, docs_url=None, redoc_url=None)
    api = Api(catalogue, worker, runs is not None)
    app.include_router(api.router)
    if runs is not None:
        app.include_router(RunsApi(runs, bool(catalogue.models)).router)

    @app.exception_handler(ApiError)
    async def _api(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def _wrong(_: Request, error: RequestValidationError) -> Response:
        return from_validation(error).response()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        what = {
            400: unreadable(error.__cause__),
            404: f"there is nothing at {request.url.path[:200]}",
            405: f"{request.method[:20]} is not done here",
        }
        made = ApiError(error.status_code, what.get(error.status_code, str(error.detail))).response()
        made.headers.update(error.headers or {})
        return made

    @app.exception_handler(Exception)
    async def _fault(_: Request, __: Exception) -> Response:
        return ApiError(500, "the server failed; its log says why").response()

    app.add_middleware(
        Gate, limits=catalogue.limits, keys=keys, hosts=hosts, origins=cors, seen=api.figures.status
    )  # fmt: skip
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["GET", "POST"], allow_headers=["*"])
    return app
