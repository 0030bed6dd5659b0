"""The pages of the server: each one document with its style and its programs in it, for a browser without a network."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

WEB_FOLDER = Path(__file__).parent
CHAT_PROGRAMS = (
    "chat",
    ("words.js", "chat_words.js", "settings.js", "dom.js", "server.js", "store.js", "markdown.js", "ask.js", "chat.js"),
)
RUNS_PROGRAMS = (
    "runs",
    ("words.js", "runs_words.js", "settings.js", "dom.js", "server.js", "details.js", "plot.js", "runs.js"),
)
"""Name of a page, and its programs in the order in which they build on one another."""


@dataclass(frozen=True)
class WebPage:
    """A document, and what a browser may do with it.

    Attributes:
        html: the document.
        headers: its `Content-Security-Policy` allows the style and the program of this document by their digests,
            requests to this server, and nothing else.
    """

    html: str
    headers: dict[str, str]


@cache
def chat_page(runs: bool) -> WebPage:
    """Return the chat page.

    Args:
        runs: the server shows runs too: a link leads there.
    """
    return _build_page(*CHAT_PROGRAMS, other=runs)


@cache
def runs_page(chats: bool) -> WebPage:
    """Return the page of training runs.

    Args:
        chats: the server has a model to chat with: a link leads there.
    """
    return _build_page(*RUNS_PROGRAMS, other=chats)


def _build_page(name: str, programs: tuple[str, ...], other: bool) -> WebPage:
    style = "".join((WEB_FOLDER / one).read_text(encoding="utf-8") for one in ("base.css", f"{name}.css"))
    program = "\n".join((WEB_FOLDER / one).read_text(encoding="utf-8") for one in programs)
    program = f'"use strict";\n(() => {{\n{program}\n}})();\n'
    environment = Environment(loader=FileSystemLoader(WEB_FOLDER), undefined=StrictUndefined, autoescape=True)
    template = environment.get_template(f"{name}.html.j2")
    html = template.render(style=Markup(style), program=Markup(program), other=other)
    policy = (
        f"default-src 'none'; style-src '{_hash_source(style)}'; script-src '{_hash_source(program)}'; connect-src "
        f"'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return WebPage(html, headers)


def _hash_source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
