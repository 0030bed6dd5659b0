"""The pages of the server: each one document with its style and its programs in it, for a browser without a network.

The chat page loads one more file, the libraries of others for Markdown, maths and colours of code, if they are there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from anabatic.core import log, logo, svg_plot
from anabatic.infer.web import libraries
from anabatic.infer.web.libraries import LibraryBundle

WEB_FOLDER = Path(__file__).parent
CHAT_PROGRAMS = (
    "words.js",
    "chat_words.js",
    "settings.js",
    "dom.js",
    "server.js",
    "tree.js",
    "store.js",
    "code_block.js",
    "formulas.js",
    "markdown.js",
    "tools.js",
    "pictures.js",
    "ask.js",
    "turns.js",
    "answers.js",
    "chat.js",
)
"""Programs of the chat page, in the order in which they build on one another."""


@dataclass(frozen=True)
class WebPage:
    """A document, and what a browser may do with it.

    Attributes:
        html: the document.
        headers: its `Content-Security-Policy` allows the style and the programs of this document and the libraries by
            their digests, requests to this server, and nothing else.
    """

    html: str
    headers: dict[str, str]


@cache
def chat_page(home: str = "") -> WebPage:
    """Return the chat page.

    Args:
        home: address of the page that leads here, for a link back; empty: there is none.
    """
    return build_page(
        "chat.html.j2", ("base.css", "chat.css", "chat_turns.css"), CHAT_PROGRAMS, home, bundle=load_libraries()
    )


@cache
def load_libraries() -> LibraryBundle | None:
    """Return the libraries that are there and right, read once; None, with a message, if there are none."""
    table = libraries.read_table()
    wrong = {path.parent.name for path in libraries.find_wrong_files(table, libraries.FOLDER)}
    if wrong:
        lost = "Markdown, maths and colours of code" if len(wrong) == len(table) else "some formats"
        log.warn(
            f"the chat page shows text without {lost}: missing or changed in {libraries.FOLDER}: "
            f"{', '.join(sorted(wrong))}; in a clone, python scripts/fetch_web_libraries.py fetches them"
        )
    return libraries.bundle_scripts(table, libraries.FOLDER)


def build_page(
    template: str,
    styles: Sequence[str],
    programs: Sequence[str],
    home: str = "",
    folder: Path = WEB_FOLDER,
    bundle: LibraryBundle | None = None,
) -> WebPage:
    """Return a page with its styles and programs inside.

    Args:
        template, styles, programs: names of files in `folder`, or else in this package's folder.
        home: address of the page that leads here.
        bundle: libraries that the programs use.
    """
    style = svg_plot.insert_colours("".join(_read_file(folder, name) for name in styles))
    program = "\n".join(_read_file(folder, name) for name in programs)
    program = f'"use strict";\n(() => {{\n{program}\n}})();\n'
    environment = Environment(loader=FileSystemLoader([folder, WEB_FOLDER]), undefined=StrictUndefined, autoescape=True)
    html = environment.get_template(template).render(
        style=Markup(style),
        program=Markup(program),
        home=home,
        logo=Markup(logo.INLINE_LOGO),
        favicon=Markup(logo.FAVICON_URL),
        bundle=bundle,
    )
    scripts = f"'{_hash_source(program)}'" + (f" '{bundle.integrity}'" if bundle else "")
    policy = (
        f"default-src 'none'; style-src '{_hash_source(style)}'; script-src {scripts}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return WebPage(html, headers)


def _read_file(folder: Path, name: str) -> str:
    path = folder / name
    return (path if path.is_file() else WEB_FOLDER / name).read_text(encoding="utf-8")


def _hash_source(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
