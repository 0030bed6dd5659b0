"""Paths by which a training gives a server new weights: vLLM's, on request of who has a key.

Routes and fields: vLLM 0.23.0 and 0.33.0 (vllm/entrypoints/serve/dev/rpc, serve/lora/api_router.py); a pause is
`/pause?mode=abort`, the default. `/weight_checker` has an answer of our own.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from anabatic.core import log
from anabatic.core.errors import AnabaticError, DataError
from anabatic.infer.server import weight_loading
from anabatic.infer.server.api_errors import ApiError, from_anabatic_error
from anabatic.infer.server.engine_worker import EngineWorker
from anabatic.infer.server.model_registry import ModelRegistry
from anabatic.infer.server.request_schema import StrictFlag, StrictModel, Utf8Str

MAX_ADAPTERS = 16
"""Adapters that are loaded over HTTP at a time."""
_Made = TypeVar("_Made")


class ReloadArguments(StrictModel):
    """Where the weights lie."""

    weights_path: Utf8Str


class CallRequest(StrictModel):
    """`POST /collective_rpc`: the one method that there is."""

    method: Literal["reload_weights"]
    kwargs: ReloadArguments


class LoadAdapterRequest(StrictModel):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Utf8Str
    lora_path: Utf8Str
    load_inplace: StrictFlag = False


class AdapterName(StrictModel):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Utf8Str


class ChecksumRequest(StrictModel):
    """`POST /weight_checker`."""

    action: Literal["checksum"]


class WeightRoutes:
    """New weights for the first model, and adapters for it.

    Args:
        root: folder below which weights are read.

    Attributes:
        is_paused: no request is answered.
        version: of the first model's weights; each loading, and each start of a server, has its own.
    """

    def __init__(self, catalogue: ModelRegistry, worker: EngineWorker, root: Path) -> None:
        self._registry, self._worker, self._root = catalogue, worker, root
        self._served = catalogue.models[0]
        self._loaded: list[str] = []
        self._lock = asyncio.Lock()
        self.is_paused = False
        self.version = uuid.uuid4().hex
        self.router = APIRouter()
        for path, function in (
            ("/collective_rpc", self.reload_weights),
            ("/v1/load_lora_adapter", self.load_adapter),
            ("/v1/unload_lora_adapter", self.unload_adapter),
            ("/pause", self.pause_answers),
            ("/resume", self.resume_answers),
            ("/reset_prefix_cache", self.reset_prefix_cache),
            ("/weight_checker", self.list_checksums),
        ):
            self.router.add_api_route(path, function, methods=["POST"], response_model=None)
        for path, show in (("/is_paused", self.tell_paused), ("/weight_info", self.tell_version)):
            self.router.add_api_route(path, show, methods=["GET"], response_model=None)

    def require_running(self) -> None:
        """Refuse a request while the server is paused.

        Raises:
            ApiError: 503.
        """
        if self.is_paused:
            raise ApiError(503, "the server is paused until POST /resume", None, "paused")

    async def reload_weights(self, body: CallRequest) -> Response:
        """Replace the weights of the first model; answers under way end with `abort`."""
        async with self._lock:
            folder = self._resolve_folder(body.kwargs.weights_path, "kwargs.weights_path")
            model, engine = self._served.model, self._served.engine
            try:
                staged = await asyncio.to_thread(weight_loading.read_staged_weights, model, folder)
            except AnabaticError as error:
                raise from_anabatic_error(error, param="kwargs.weights_path") from error

            def replace_now() -> None:
                self._worker.abort_groups(engine)
                weight_loading.replace_weights(model, staged)
                engine.clear_prefix_cache()
                self.version = uuid.uuid4().hex

            await self._run_between_steps(replace_now)
            log.info(f"{self._served.name}: weights of {folder}")
        return JSONResponse({"results": [None]})

    async def load_adapter(self, body: LoadAdapterRequest) -> Response:
        """Read an adapter, which is then asked by its name."""
        async with self._lock:
            name, again = body.lora_name, body.lora_name in self._loaded
            if name in self._registry.model_names and not (again and body.load_inplace):
                raise ApiError(400, f"there is a model {name[:200]!r} already: unload it first", "lora_name")
            if len(self._loaded) - again >= MAX_ADAPTERS:
                raise ApiError(400, f"{MAX_ADAPTERS} adapters are loaded: unload one", "lora_name")
            folder = self._resolve_folder(body.lora_path, "lora_path")
            engine = self._served.engine

            def load_now() -> None:
                if again:
                    self._worker.abort_groups(engine, name)
                engine.load_adapter(name, folder, replaces=again)

            await self._run_between_steps(load_now, "lora_path")
            if not again:
                self._loaded.append(name)
                made = replace(self._served, name=name, adapter=name, counted_as=self._served.name)
                self._registry.models.append(made)
            log.info(f"{name}: adapter {folder}")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, body: AdapterName) -> Response:
        """Forget an adapter that was loaded here; its answers under way end with `abort`."""
        async with self._lock:
            name, engine = body.lora_name, self._served.engine
            if name not in self._loaded:
                raise ApiError(404, f"no adapter {name[:200]!r} was loaded over HTTP", "lora_name")
            self._loaded.remove(name)
            self._registry.models[:] = [one for one in self._registry.models if one.name != name]

            def unload_now() -> None:
                self._worker.abort_groups(engine, name)
                engine.unload_adapter(name)

            await self._run_between_steps(unload_now)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def pause_answers(self, mode: Literal["abort"] = "abort", clear_cache: bool = True) -> Response:
        """Answer nothing until `/resume`; answers under way end with `abort`."""
        self.is_paused = True
        engine = self._served.engine

        def pause_now() -> None:
            self._worker.abort_groups(engine)
            if clear_cache:
                engine.clear_prefix_cache()

        await self._run_between_steps(pause_now)
        return JSONResponse({"status": "paused"})

    async def resume_answers(self) -> Response:
        """Answer again."""
        self.is_paused = False
        return JSONResponse({"status": "resumed"})

    async def tell_paused(self) -> Response:
        """Say whether the server is paused."""
        return JSONResponse({"is_paused": self.is_paused})

    async def tell_version(self) -> Response:
        """Return the version of the weights."""
        return JSONResponse({"weight_version": self.version})

    async def reset_prefix_cache(self) -> Response:
        """Forget what is kept of earlier requests; blocks of answers under way stay."""
        await self._run_between_steps(self._served.engine.clear_prefix_cache)
        return JSONResponse({"success": True})

    async def list_checksums(self, body: ChecksumRequest) -> Response:
        """Return dtype and SHA-256 of each weight of the first model, without its adapters."""
        found = await self._run_between_steps(lambda: weight_loading.compute_checksums(self._served.model))
        return JSONResponse({"success": True, "checksums": found})

    def _resolve_folder(self, given: str, param: str) -> Path:
        try:
            return weight_loading.resolve_below(self._root, given)
        except DataError as error:
            raise from_anabatic_error(error, param=param) from error

    async def _run_between_steps(self, function: Callable[[], _Made], param: str | None = None) -> _Made:
        if self._worker.failure:
            raise ApiError(503, f"the engine has stopped: {self._worker.failure}", None, "engine_stopped")
        try:
            made: _Made = await asyncio.wrap_future(self._worker.run_between_steps(function))
        except AnabaticError as error:
            raise from_anabatic_error(error, param=param) from error
        return made
