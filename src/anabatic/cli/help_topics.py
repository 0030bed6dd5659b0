"""`anabatic help TOPIC`: the pages of the documentation, from the package, without a network."""

from __future__ import annotations

import os
import pydoc
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from anabatic.cli import command_tree
from anabatic.core import language
from anabatic.core.errors import ConfigError, Failure
from anabatic.core.formatting import did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
FOLDERS = (_PACKAGE / "docs", _PACKAGE.parents[1] / "docs")
"""In a wheel; in a checkout."""
SECTIONS = ("guides", "concepts", "reference")
_MAX_FOUND = 12
_HTML = re.compile(r"^<!--.*?-->\n|^!\[[^]]*\]\([^)]*\)\n|\{#[\w-]+\}", re.M)
"""What a terminal does not show: comments, pictures, anchors."""


def help_(*words: str, lang: str | None = None, search: bool = False) -> None:
    """Print a page of the documentation, or the help of a command; without a topic, the list of topics.

    Parameters
    ----------
    words
        Topic, for example `fine-tuning`, or command.
    lang
        Language, en or zh; default: the locale's.
    search
        List the sections that contain these words.
    """
    chosen = language.choose_language(lang, os.environ)
    language.replace_unencodable(sys.stdout)
    pages = find_pages(chosen)
    topic = " ".join(words).strip()
    if not topic:
        sys.stdout.write(format_topics(pages))
        return
    if search:
        found = list(search_pages(pages, words))
        if not found:
            raise ConfigError(f'no page contains "{topic}"', "use fewer words, or list the topics: anabatic help")
        sys.stdout.write("".join(f"{name:24} {heading}\n" for name, heading in found[:_MAX_FOUND]))
        return
    if topic in pages:
        _show(pages[topic].read_text(encoding="utf-8"))
    elif topic in command_tree.COMMANDS:
        from anabatic.cli import app
        from anabatic.cli.parsing import help_page

        sys.stdout.write(app.render_help(topic, width=help_page.get_width()))
    else:
        guess = did_you_mean(topic, [*pages, *command_tree.COMMANDS])
        is_found = next(search_pages(pages, words), None) is not None
        line = shlex.join(["anabatic", "help", "--search", *words])
        hint = f"search the pages: {line}" if is_found else "list the topics: anabatic help"
        raise ConfigError(f'there is no topic "{topic}".{guess}', hint)


def find_pages(chosen: str) -> dict[str, Path]:
    """Return topic -> page, in the order of the documentation.

    Args:
        chosen: `en` or `zh`.

    Raises:
        Failure: the installation holds no documentation.
    """
    root = next((folder / chosen for folder in FOLDERS if (folder / chosen).is_dir()), None)
    if root is None:
        raise Failure("this installation has no documentation", "reinstall it: pip install --force-reinstall anabatic")
    return {page.stem: page for section in SECTIONS for page in sorted((root / section).glob("*.md"))}


def format_topics(pages: dict[str, Path]) -> str:
    """Return one line for each page: topic and title."""
    lines: list[str] = []
    section = ""
    for name, page in pages.items():
        if page.parent.name != section:
            section = page.parent.name
            lines += ["", f"{section}:"]
        lines.append(f"  {name:24}{_read_title(page)}")
    return "\n".join([*lines[1:], "", "anabatic help TOPIC; anabatic help --search WORDS; anabatic COMMAND --help", ""])


def _read_title(page: Path) -> str:
    with page.open(encoding="utf-8") as file:
        return next((_HTML.sub("", line[2:]).strip() for line in file if line.startswith("# ")), page.stem)


def search_pages(pages: dict[str, Path], words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (topic, heading) of the sections that contain every word, those with a word in the heading first."""
    wanted = [word.lower() for word in words]
    hits: list[tuple[bool, str, str]] = []
    for name, page in pages.items():
        for section in re.split(r"^(?=#{1,4} )", page.read_text(encoding="utf-8"), flags=re.M):
            heading = _HTML.sub("", section.partition("\n")[0]).strip("# ")
            if heading and all(word in section.lower() for word in wanted):
                hits.append((not any(word in heading.lower() for word in wanted), name, heading))
    yield from ((name, heading) for _, name, heading in sorted(hits, key=lambda hit: hit[0]))


def _show(text: str) -> None:
    text = _HTML.sub("", text)
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(no_color=bool(os.environ.get("NO_COLOR")))
    with console.capture() as captured:
        console.print(Markdown(text))
    os.environ.setdefault("LESS", "-RFX")  # less shows colours, and ends by itself where the page fits
    pydoc.pager(captured.get())
