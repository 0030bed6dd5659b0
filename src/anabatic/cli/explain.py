"""`anabatic explain`: what the errors in a log mean, and which came first."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

NOTHING_KNOWN = 1
"""Exit code when no entry matches."""


def explain(
    *logs: Annotated[str, Parameter(allow_leading_hyphen=True)],
    json_: Annotated[bool, Parameter(name="--json", negative=(), show_default=False)] = False,
    all_: Annotated[bool, Parameter(name="--all", negative=(), show_default=False)] = False,
    lang: Annotated[str | None, Parameter(negative=())] = None,
    knowledge: Annotated[tuple[Path, ...], Parameter(negative=(), consume_multiple=False, show_default=False)] = (),
) -> int:
    """Find the first cause in logs and say what it means, why it happens and what to do.

    Exit code 0: something known was found; 1: nothing; 2: a file cannot be read.

    Parameters
    ----------
    logs
        Log files, folders, `-` for standard input, or codes such as EI0006; default: CANN's own logs (~/ascend/log).
    json_
        Print everything that was found as JSON.
    all_
        Also what a run wrote before it was started again.
    lang
        en or zh; default: what the locale says.
    knowledge
        YAML file with own entries, several times; ANABATIC_KNOWLEDGE names one that is always read.
    """
    from rich.console import Console

    from anabatic.doctor import explain as explaining
    from anabatic.doctor import explain_show, language
    from anabatic.doctor import knowledge as known

    speak = language.choose(lang, os.environ)
    language.writable(sys.stdout)
    entries = known.load(knowledge)
    with _progress() as advance:
        report = explaining.explain(logs, entries, advance, all_)
    if json_:
        sys.stdout.write(json.dumps(explain_show.as_json(report, speak), ensure_ascii=False, indent=2) + "\n")
    else:
        explain_show.show(report, speak, Console(highlight=False))
    return 0 if report.findings else NOTHING_KNOWN


@contextmanager
def _progress() -> Iterator[Callable[[int], None]]:
    """Show how much was read, on a terminal."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TransferSpeedColumn

    columns = (SpinnerColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda num_bytes: bar.advance(task, num_bytes)
