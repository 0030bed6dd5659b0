"""`anabatic explain`: what the errors in a log mean, and which came first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from anabatic.core.progress import show_read_progress

EXIT_NO_MATCH = 1
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

    from anabatic.doctor import knowledge_base as known
    from anabatic.doctor import language
    from anabatic.doctor.explain import diagnosis as explaining
    from anabatic.doctor.explain import rendering

    speak = language.choose_language(lang, os.environ)
    language.replace_unencodable(sys.stdout)
    entries = known.load_knowledge(knowledge)
    with show_read_progress() as advance:
        report = explaining.explain_logs(logs, entries, advance, all_)
    if json_:
        sys.stdout.write(json.dumps(rendering.report_to_dict(report, speak), ensure_ascii=False, indent=2) + "\n")
    else:
        rendering.print_report(report, speak, Console(highlight=False))
    return 0 if report.findings else EXIT_NO_MATCH
