"""Paths of the page of runs: `/runs`, and what it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

from anabatic.core import json_lines
from anabatic.core.errors import AnabaticError
from anabatic.infer.server.api_errors import ApiError, from_anabatic_error
from anabatic.infer.web import pages
from anabatic.infer.web.run_browser import RunBrowser


class RunsApi:
    """The paths, over the runs of one folder."""

    def __init__(self, runs: RunBrowser, chats: bool) -> None:
        self._runs, self._has_chat = runs, chats
        # One question at a time: reading files must not take the threads that count tokens.
        self._thread = ThreadPoolExecutor(1, "anabatic-runs")
        self.router = APIRouter(include_in_schema=False)
        for path, function in (
            ("/runs", self.show_page),
            ("/runs/list", self.list_runs),
            ("/runs/{key}/curves", self.get_curves),
            ("/runs/{key}/about", self.get_details),
            ("/runs/{key}/log/{rank}", self.get_log),
            ("/runs/{key}/report", self.get_report),
        ):
            self.router.add_api_route(path, function, methods=["GET"], response_model=None)

    async def show_page(self) -> Response:
        """The page."""
        found = pages.runs_page(self._has_chat)
        return HTMLResponse(found.html, headers=found.headers)

    async def list_runs(self) -> Response:
        """All runs."""
        return _json_response(await self._run_in_thread(self._runs.list_runs))

    async def get_curves(self, key: str, have: str = "") -> Response:
        """The curves of a run."""
        return _json_response(await self._run_in_thread(lambda: self._runs.get_curves(key, have)))

    async def get_details(self, key: str) -> Response:
        """What else a run has written."""
        return _json_response(await self._run_in_thread(lambda: self._runs.get_details(key)))

    async def get_log(self, key: str, rank: int) -> Response:
        """The end of a rank's log."""
        return _json_response({"text": await self._run_in_thread(lambda: self._runs.read_log(key, rank))})

    async def get_report(self, key: str) -> Response:
        """The report of a run, to be kept."""
        return _json_response({"html": await self._run_in_thread(lambda: self._runs.render_report(key))})

    async def _run_in_thread(self, function: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function)
        except KeyError as error:
            raise ApiError(404, "there is no such run, or it has no such log", None, "run_not_found") from error
        except AnabaticError as error:
            raise from_anabatic_error(error) from error
        except OSError as error:
            raise ApiError(503, f"the run cannot be read: {error.strerror}") from error


def _json_response(value: Any) -> Response:
    # Half characters, which UTF-8 cannot hold, stay JSON escapes.
    text = json.dumps(json_lines.replace_nonfinite(value), separators=(",", ":"))
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})
