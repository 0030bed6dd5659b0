"""The pages of the server: each one document with its style and its programs in it, for a browser without a network."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

HERE = Path(__file__).parent
CHAT = (
    "chat",
    ("words.js", "chat_words.js", "settings.js", "dom.js", "server.js", "store.js", "markdown.js", "ask.js", "chat.js"),
)
RUNS = ("runs", ("words.js", "runs_words.js", "settings.js", "dom.js", "server.js", "details.js", "plot.js", "runs.js"))
"""Name of a page, and its programs in the order in which they build on one another."""


@dataclass(frozen=True)
class Page:
    """A document, and what a browser may do with it.

    Attributes:
        html: the document.
        headers: its `Content-Security-Policy` allows the style and the program of this document by their digests,
            requests to this server, and nothing else.
    """

    html: str
    headers: dict[str, str]


@cache
def chat(runs: bool) -> Page:
    """Return the chat page.

    Args:
        runs: the server shows runs too: a link leads there.
    """
    return _page(*CHAT, other=runs)


@cache
def runs(chats: bool) -> Page:
    """Return the page of training runs.

    Args:
        chats: the server has a model to chat with: a link leads there.
    """
    return _page(*RUNS, other=chats)


def _page(name: str, programs: tuple[str, ...], other: bool) -> Page:
    style = "".join((HERE / one).read_text(encoding="utf-8") for one in ("base.css", f"{name}.css"))
    program = "\n".join((HERE / one).read_text(encoding="utf-8") for one in programs)
    program = f'"use strict";\n(() => {{\n{program}\n}})();\n'
    environment = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, autoescape=True)
    template = environment.get_template(f"{name}.html.j2")
    html = template.render(style=Markup(style), program=Markup(program), other=other)
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(program)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(html, headers)


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
