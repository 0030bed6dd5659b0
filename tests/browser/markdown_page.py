"""A page with the styles and programs of the chat page, without a model: tests put texts into it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from anabatic.infer.server.web_files import respond_library
from anabatic.infer.web import libraries, pages
from unit.web_server import listening

LAST_NEEDED = "markdown.js"
PROGRAM = """
window.markdown = markdown;
window.show = (text, streaming = false) => {
  const body = node("div", { class: "body" }, ...markdown(text, streaming));
  $("log").replaceChildren(node("article", { class: "theirs" }, body));
  return body;
};
window.choose = (name, theme) => { language = name; settings.theme = theme; dress(); translate(); };
translate();
"""


@contextmanager
def serving_markdown(folder: Path, with_libraries: bool = True) -> Iterator[str]:
    """Serve the page at the address that is returned; `folder` gets its one program of its own."""
    (folder / "show.js").write_text(PROGRAM, encoding="utf-8")
    programs = pages.CHAT_PROGRAMS[: pages.CHAT_PROGRAMS.index(LAST_NEEDED) + 1]
    bundle = pages.load_libraries() if with_libraries else None
    styles = ("base.css", "chat.css")
    page = pages.build_page("chat.html.j2", styles, (*programs, "show.js"), folder=folder, bundle=bundle)

    async def show_page(request: Request) -> Response:
        return HTMLResponse(page.html, headers=page.headers)

    async def show_library(request: Request) -> Response:
        return respond_library(request)

    routes = [Route("/", show_page), Route(libraries.PATH_PREFIX + "{name:path}", show_library)]
    with listening(Starlette(routes=routes)) as url:
        yield url


def show(browser: Any, text: str, streaming: bool = False) -> str:
    """Show a text and return its HTML."""
    return browser.execute_script("return show(arguments[0], arguments[1]).innerHTML", text, streaming)


def time_show(browser: Any, text: str) -> float:
    """Show a text and return the seconds until it is laid out."""
    began = time.monotonic()
    browser.execute_script("show(arguments[0]).getBoundingClientRect()", text)
    return time.monotonic() - began
