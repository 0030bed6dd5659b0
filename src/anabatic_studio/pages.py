"""The studio's pages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from anabatic.infer.web import pages
from anabatic.infer.web.pages import WebPage

WEB_FOLDER = Path(__file__).parent / "web"
STUDIO_PROGRAMS = (
    "words.js",
    "studio_words.js",
    "settings.js",
    "dom.js",
    "server.js",
    "plot.js",
    "details.js",
    "export.js",
    "runs.js",
    "compare.js",
    "form.js",
    "plan.js",
    "new_job.js",
    "queue.js",
    "devices.js",
    "models.js",
    "studio.js",
)
"""Programs in the order in which they build on one another."""


@cache
def studio_page() -> WebPage:
    """Return the page with runs, new jobs, queue, devices and models."""
    return pages.build_page(
        "studio.html.j2", ("base.css", "runs.css", "studio.css"), STUDIO_PROGRAMS, folder=WEB_FOLDER
    )


def chat_page() -> WebPage:
    """Return the chat page with a link back to the studio."""
    return pages.chat_page(home="./")
