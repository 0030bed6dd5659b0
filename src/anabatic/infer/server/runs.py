"""Paths of the page of runs: `/runs`, and what it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from anabatic.core import jsonl
from anabatic.core.errors import AnabaticError
from anabatic.infer.server.errors import ApiError, from_ours
from anabatic.infer.web import page
from anabatic.infer.web.runs import Runs


class RunsApi:
    """The paths, over the runs of one folder."""

    def __init__(self, runs: Runs, chats: bool) -> None:
        self._runs, self._chats = runs, chats
        # One question at a time: reading files must not take the threads that count tokens.
        self._thread = ThreadPoolExecutor(1, "anabatic-runs")
        self.router = APIRouter(include_in_schema=False)
        for path, function in (
            ("/runs", self.page),
            ("/runs/list", self.listing),
            ("/runs/{key}/curves", self.curves),
            ("/runs/{key}/about", self.about),
            ("/runs/{key}/log/{rank}", self.log),
            ("/runs/{key}/report", self.report),
        ):
            self.router.add_api_route(path, function, methods=["GET"], response_model=None)

    async def page(self) -> Response:
        """The page."""
        found = page.runs(self._chats)
        return HTMLResponse(found.html, headers=found.headers)

    async def listing(self) -> Response:
        """All runs."""
        return _json(await self._ask(self._runs.listing))

    async def curves(self, key: str, have: str = "") -> Response:
        """The curves of a run."""
        return _json(await self._ask(lambda: self._runs.curves(key, have)))

    async def about(self, key: str) -> Response:
        """What else a run has written."""
        return _json(await self._ask(lambda: self._runs.about(key)))

    async def log(self, key: str, rank: int) -> Response:
        """The end of a rank's log."""
        return _json({"text": await self._ask(lambda: self._runs.log(key, rank))})

    async def report(self, key: str) -> Response:
        """The report of a run, to be kept."""
        return _json({"html": await self._ask(lambda: self._runs.report(key))})

    async def _ask(self, function: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except KeyError as error:
            raise ApiError(404, "there is no such run, or it has no such log", None, "run_not_found") from error
        except AnabaticError as error:
            raise from_ours(error) from error
        except OSError as error:
            raise ApiError(503, f"the run cannot be read: {error.strerror}") from error


def _json(value: Any) -> Response:
    # Half characters, which UTF-8 cannot hold, stay JSON escapes.
    text = json.dumps(jsonl.finite(value), separators=(",", ":"))
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})
