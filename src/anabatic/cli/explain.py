"""`anabatic explain`: what the errors in a log mean, and which came first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from anabatic.cli.reading import reading

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
    with reading() as advance:
        report = explaining.explain(logs, entries, advance, all_)
    if json_:
        sys.stdout.write(json.dumps(explain_show.as_json(report, speak), ensure_ascii=False, indent=2) + "\n")
    else:
        explain_show.show(report, speak, Console(highlight=False))
    return 0 if report.findings else NOTHING_KNOWN
