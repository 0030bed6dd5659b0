"""The chat page: one document with its style and its programs in it, for a browser without a network."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

HERE = Path(__file__).parent
STYLE = "page.css"
PROGRAMS = ("words.js", "markdown.js", "store.js", "talk.js", "page.js")
"""In the order in which they build on one another."""


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
def chat() -> Page:
    """Return the chat page."""
    style = (HERE / STYLE).read_text(encoding="utf-8")
    program = "\n".join((HERE / name).read_text(encoding="utf-8") for name in PROGRAMS)
    program = f'"use strict";\n(() => {{\n{program}\n}})();\n'
    environment = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, autoescape=True)
    html = environment.get_template("page.html.j2").render(style=Markup(style), program=Markup(program))
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
