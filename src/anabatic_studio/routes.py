"""The studio's paths: pages, runs, recipes, the queue, devices, served models. All state changes are POSTs of JSON."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from anabatic import __version__
from anabatic.core import json_reader
from anabatic.core.errors import AnabaticError
from anabatic.core.formatting import parse_whole
from anabatic.device import table
from anabatic.infer.server.api_errors import ApiError, from_anabatic_error
from anabatic.infer.server.web_files import respond_library
from anabatic.infer.web import libraries
from anabatic.monitor.sources.selection import DeviceSource
from anabatic.recipes import plan_command
from anabatic_studio import forms, pages, pickers, planning, proxy, recipe_sources
from anabatic_studio.access import AccessMiddleware, LoginCookie, is_same_text
from anabatic_studio.jobs.job_queue import JobQueue
from anabatic_studio.jobs.model_servers import ModelServers
from anabatic_studio.jobs.store import JobRecord, RunNote, StudioStore
from anabatic_studio.preview_process import preview_rows
from anabatic_studio.run_browser import RunBrowser
from anabatic_studio.settings import StudioJob

MAX_NOTE_CHARS = 20_000
MAX_TAGS, MAX_TAG_CHARS = 20, 40
MAX_COMPARED = 8
DEVICE_SECONDS = 2.0
_THREADS = 4


@dataclass(frozen=True)
class StudioParts:
    """Parts that the paths use."""

    job: StudioJob
    root: Path
    store: StudioStore
    queue: JobQueue
    servers: ModelServers
    runs: RunBrowser
    devices: DeviceSource


class StudioApi:
    """Handlers of the paths; each that reads files runs in a thread."""

    def __init__(self, parts: StudioParts, token: str, login: LoginCookie) -> None:
        self._parts, self._token, self._login = parts, token, login
        # Reading runs is one request at a time: the browser of runs keeps state between requests.
        self._runs_thread = ThreadPoolExecutor(1, "anabatic-runs")
        self._threads = ThreadPoolExecutor(_THREADS, "anabatic-studio")
        self._devices_lock = threading.Lock()
        self._devices: tuple[float, dict[str, Any]] = (float("-inf"), {})

    def list_routes(self) -> list[BaseRoute]:
        """Return all paths."""
        read = partial(self._make_route, methods=["GET"])
        write = partial(self._make_route, methods=["POST"])
        return [
            Route("/", self._show_studio),
            Route("/chat", self._show_chat),
            Route(libraries.PATH_PREFIX + "{name:path}", self._show_library),
            Route("/health", self._answer_health),
            Route("/api/login", self._log_in, methods=["POST"]),
            read("/api/state", self._get_state),
            read("/api/runs", lambda request: self._list_runs(), runs=True),
            read("/api/compare", self._compare_runs, runs=True),
            read("/api/runs/{key}/curves", self._get_curves, runs=True),
            read("/api/runs/{key}/about", self._get_details, runs=True),
            read("/api/runs/{key}/log/{rank:int}", self._get_run_log, runs=True),
            read("/api/runs/{key}/report", self._get_report, runs=True),
            read("/api/runs/{key}/recipe", self._get_run_recipe, runs=True),
            write("/api/runs/{key}/note", self._set_note, runs=True),
            read("/api/form", lambda request: forms.describe_form(request.query_params.get("command", ""))),
            read("/api/recipes", lambda request: self._list_recipes()),
            write("/api/recipes/read", self._read_recipe),
            write("/api/recipe", self._check_recipe),
            write("/api/plan", self._plan_recipe),
            read("/api/models", lambda request: self._list_models()),
            read("/api/files", lambda request: self._list_files()),
            write("/api/preview", self._preview_data),
            read("/api/jobs", lambda request: self._list_jobs()),
            write("/api/jobs", self._submit_job),
            read("/api/jobs/{job:int}/log", self._get_job_log),
            read("/api/jobs/{job:int}/recipe", self._get_job_recipe),
            write("/api/jobs/{job:int}/{action}", self._change_job),
            read("/api/devices", lambda request: self._get_devices()),
            read("/api/servers", lambda request: {"servers": self._parts.servers.list_servers()}),
            write("/api/servers/start", self._start_server),
            write("/api/servers/stop", self._stop_server),
            Route("/v1/{path:path}", self._proxy, methods=["GET", "POST"]),
        ]

    def _make_route(self, path: str, function: Callable[..., Any], methods: list[str], runs: bool = False) -> BaseRoute:
        takes_body = methods == ["POST"]
        executor = self._runs_thread if runs else self._threads

        async def answer(request: Request) -> Response:
            arguments = (request, await _read_json(request)) if takes_body else (request,)
            loop = asyncio.get_running_loop()
            return _json_response(await loop.run_in_executor(executor, lambda: function(*arguments)))

        return Route(path, _translate_errors(answer), methods=methods)

    async def _show_studio(self, request: Request) -> Response:
        return await self._show_page(request, pages.studio_page())

    async def _show_chat(self, request: Request) -> Response:
        return await self._show_page(request, pages.chat_page())

    async def _show_library(self, request: Request) -> Response:
        try:
            return respond_library(request)
        except ApiError as error:
            return error.to_response()

    async def _show_page(self, request: Request, page: pages.WebPage) -> Response:
        given = request.query_params.get("token")
        if given is not None:
            response: Response = RedirectResponse(request.url.path.rpartition("/")[2] or ".", 303)
            if self._token and is_same_text(given, self._token):
                self._set_cookie(response)
            return response
        return HTMLResponse(page.html, headers=page.headers)

    async def _log_in(self, request: Request) -> Response:
        try:
            given = _get_text(await _read_json(request), "token")
        except ApiError as error:
            return error.to_response()
        if not is_same_text(given.strip(), self._token):
            return ApiError(
                401, "the token is wrong: the studio printed it at its start", None, "no_token"
            ).to_response()
        response = JSONResponse({})
        self._set_cookie(response)
        return response

    def _set_cookie(self, response: Response) -> None:
        name, secret = self._login.name, self._login.secret
        response.set_cookie(name, secret, max_age=30 * 86400, httponly=True, samesite="strict")

    async def _answer_health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _proxy(self, request: Request) -> Response:
        try:
            return await proxy.forward(request, self._parts.servers)
        except ApiError as error:
            return error.to_response()

    def _get_state(self, request: Request) -> dict[str, Any]:
        return {
            "version": __version__,
            "runs": pickers.format_path(self._parts.root),
            "commands": forms.list_commands(),
            "chips": list_training_chips(),
        }

    def _list_runs(self) -> dict[str, Any]:
        listed = self._parts.runs.list_runs()
        notes = self._parts.store.get_notes()
        for row in listed["runs"]:
            note = notes.get(row["name"], RunNote())
            row.update(note=note.text, tags=note.tags)
        return listed

    def _get_curves(self, request: Request) -> dict[str, Any]:
        return self._parts.runs.get_curves(request.path_params["key"], request.query_params.get("have", ""))

    def _compare_runs(self, request: Request) -> dict[str, Any]:
        return self._parts.runs.compare_runs(request.query_params.get("ids", "").split(",")[:MAX_COMPARED])

    def _get_details(self, request: Request) -> dict[str, Any]:
        return self._parts.runs.get_details(request.path_params["key"])

    def _get_run_log(self, request: Request) -> dict[str, Any]:
        return {"text": self._parts.runs.read_log(request.path_params["key"], request.path_params["rank"])}

    def _get_report(self, request: Request) -> dict[str, Any]:
        return {"html": self._parts.runs.render_report(request.path_params["key"])}

    def _set_note(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        text, tags = _get_text(body, "text", MAX_NOTE_CHARS), body.get("tags", [])
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ApiError(400, "tags is not a list of texts", "tags")
        tags = list(dict.fromkeys(tag.strip()[:MAX_TAG_CHARS] for tag in tags if tag.strip()))[:MAX_TAGS]
        name = self._parts.runs.get_name(request.path_params["key"])
        self._parts.store.set_note(name, RunNote(text.strip(), tuple(tags)))
        return {"text": text.strip(), "tags": tags}

    def _check_recipe(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        command, text = _get_text(body, "command"), _get_text(body, "text")
        changes = body.get("changes", {})
        if not isinstance(changes, dict):
            raise ApiError(400, "changes is not an object", "changes")
        if (not text or body.get("new_out") is True) and "out" not in changes:
            changes = {"out": self._suggest_out(command), **changes}
        text = planning.apply_changes(text, changes)
        return {"text": text, **planning.check_recipe(command, text)}

    def _suggest_out(self, name: str) -> str:
        taken = {job.out for job in self._parts.store.list_jobs()}
        return planning.suggest_out(Path(pickers.format_path(self._parts.root)), name, taken)

    def _list_recipes(self) -> dict[str, Any]:
        return {"shipped": recipe_sources.list_shipped_recipes(), "files": list(self._list_recipe_files())}

    def _list_recipe_files(self) -> dict[str, Path]:
        folders = [Path(folder).expanduser() for folder in self._parts.job.data]
        return pickers.list_recipe_files([*folders, self._parts.root])

    def _read_recipe(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        if name := _get_text(body, "name"):
            found = recipe_sources.read_shipped_recipe(name)
        else:  # only a listed file is read
            found = recipe_sources.read_recipe_file(self._list_recipe_files()[_get_text(body, "file")])
        out = self._suggest_out(found["name"])
        return {**found, "text": planning.apply_changes(found["text"], {"out": out})}

    def _get_run_recipe(self, request: Request) -> dict[str, Any]:
        key = request.path_params["key"]
        config, command = self._parts.runs.read_config(key)
        found = recipe_sources.make_recipe(config, command, Path(self._parts.runs.get_name(key)).name)
        out = self._suggest_out(found["command"])
        return {**found, "text": planning.apply_changes(found["text"], {"out": out})}

    def _plan_recipe(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        chip = _get_text(body, "chip") or plan_command.LOCAL_CHIP
        return planning.plan_recipe(_get_text(body, "command"), _get_text(body, "text"), chip)

    def _list_models(self) -> dict[str, Any]:
        folders = [Path(folder).expanduser() for folder in self._parts.job.models]
        return {"models": pickers.list_models(self._parts.root, folders)}

    def _list_files(self) -> dict[str, Any]:
        folders = [Path(folder).expanduser() for folder in self._parts.job.data]
        return {"files": pickers.list_data_files(folders, self._parts.root)}

    def _preview_data(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        return preview_rows(_get_text(body, "command"), _get_text(body, "text"))

    def _list_jobs(self) -> dict[str, Any]:
        return {"jobs": [self._describe_job(job) for job in self._parts.store.list_jobs()]}

    def _submit_job(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        command, text = _get_text(body, "command"), _get_text(body, "text")
        if command not in forms.FORM_COMMANDS:
            raise ApiError(400, f"the studio does not start {command!r}: it starts {', '.join(forms.FORM_COMMANDS)}")
        problems = planning.check_recipe(command, text)["problems"]
        if problems:
            message, hint = problems[0]["message"].removesuffix("."), problems[0]["hint"]
            raise ApiError(400, f"{message}. {hint}", problems[0]["key"], "recipe")
        return self._describe_job(self._parts.queue.submit_job(command, text, _get_text(body, "name")))

    def _describe_job(self, record: JobRecord) -> dict[str, Any]:
        row = asdict(record)
        for name in ("recipe", "pid", "process_start"):
            del row[name]
        return {**row, "runs": self._parts.runs.find_keys(Path(record.folder) / record.out) if record.out else []}

    def _get_job_log(self, request: Request) -> dict[str, Any]:
        offset = request.query_params.get("offset", "0")
        text, end = self._parts.queue.read_log(request.path_params["job"], parse_whole(offset) or 0)
        return {"text": text, "offset": end}

    def _get_job_recipe(self, request: Request) -> dict[str, Any]:
        record = self._parts.store.get_job(request.path_params["job"])
        return {"command": record.command, "text": record.recipe}

    def _change_job(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        job_id, queue = request.path_params["job"], self._parts.queue
        before = body.get("before")
        actions: dict[str, Callable[[], Any]] = {
            "stop": lambda: queue.stop_job(job_id),
            "restart": lambda: queue.restart_job(job_id),
            "remove": lambda: queue.remove_job(job_id),
            "move": lambda: queue.move_job(job_id, before if isinstance(before, int) else None),
        }
        name = request.path_params["action"]
        if name not in actions:
            raise ApiError(404, f"there is no action {name[:40]!r}")
        actions[name]()
        return {}

    def _get_devices(self) -> dict[str, Any]:
        with self._devices_lock:  # several open pages share one reading
            if time.monotonic() - self._devices[0] > DEVICE_SECONDS:
                self._devices = (time.monotonic(), self._parts.devices.read().to_row())
            row = self._devices[1]
        return {**row, "jobs": self._parts.queue.list_assigned_devices(), "servers": self._parts.servers.list_devices()}

    def _start_server(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        model = _get_text(body, "model").strip()
        if not model:
            raise ApiError(400, "which model? Give its folder or name", "model")
        return self._parts.servers.start(model, _get_text(body, "name"))

    def _stop_server(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        self._parts.servers.stop(_get_text(body, "name"))
        return {}


def create_app(parts: StudioParts, token: str, hosts: list[str] | None, cookie: str) -> Starlette:
    """Return the application.

    Args:
        token: needed for everything but the empty pages; empty: none.
        hosts: names in Host that are answered; None: any.
        cookie: name of the cookie of who has given the token.
    """
    login = LoginCookie(cookie)
    api = StudioApi(parts, token, login)
    app = Starlette(
        routes=api.list_routes(),
        exception_handlers={HTTPException: _handle_http_error, Exception: _handle_unexpected_error},
    )
    app.add_middleware(AccessMiddleware, token=token, login=login, hosts=hosts)
    return app


def list_training_chips() -> list[str]:
    """Return the chips that a training can be planned for."""
    return [chip.name for chip in table.CHIPS if chip.can_train]


def _get_text(body: dict[str, Any], name: str, max_chars: int = 1 << 18) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise ApiError(400, f"{name} is not text", name)
    if len(value) > max_chars:
        raise ApiError(400, f"{name} has {len(value):,} characters, at most {max_chars:,} are allowed", name)
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise ApiError(400, f"{name} holds a NUL or half of a character", name)
    return value


async def _read_json(request: Request) -> dict[str, Any]:
    try:
        body = json_reader.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "the body cannot be read as JSON") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    return body


def _translate_errors(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error.to_response()
        except KeyError:
            return ApiError(404, "there is nothing with this name", None, "not_found").to_response()
        except AnabaticError as error:
            return from_anabatic_error(error).to_response()
        except OSError as error:
            return ApiError(503, f"a file cannot be read or written: {error.strerror or error}").to_response()

    return answer


async def _handle_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    messages = {404: f"there is nothing at {request.url.path[:200]}", 405: f"{request.method[:20]} is not allowed here"}
    return ApiError(status, messages.get(status, "the request failed")).to_response()


async def _handle_unexpected_error(_: Request, __: Exception) -> Response:
    return ApiError(500, "the studio failed; its log says why").to_response()


def _json_response(value: Any) -> Response:
    # Lone surrogates, which UTF-8 cannot hold, stay JSON escapes.
    text = json.dumps(json_reader.replace_nonfinite(value), separators=(",", ":"))
    return Response(text, media_type="application/json", headers={"Cache-Control": "no-store"})
