"""`anabatic explain`: explain the errors in a log, and which came first."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

from anabatic.cli.parsing.function_command import OptionNames
from anabatic.core.progress import show_read_progress

EXIT_NO_MATCH = 1
"""Exit code if no entry matches."""


def explain(
    *logs: Annotated[str, OptionNames(takes_hyphens=True)],
    json_: bool = False,
    all_: bool = False,
    lang: str | None = None,
    knowledge: tuple[Path, ...] = (),
) -> int:
    """Find the root cause in logs; explain what it means, why it happens and how to fix it.

    Exit code 0: a known error was found; 1: none was found; 2: a file cannot be read.

    Parameters
    ----------
    logs
        Log files, folders, `-` for standard input, or codes such as EI0006; default: CANN's own logs (~/ascend/log).
    json_
        Print all findings as JSON.
    all_
        Include output from before the last restart of a run.
    lang
        Language, en or zh; default: the locale's.
    knowledge
        YAML file with your own entries; can be repeated. ANABATIC_KNOWLEDGE names one that is always read.
    """
    from rich.console import Console

    from anabatic.core import language
    from anabatic.doctor import knowledge_base
    from anabatic.doctor.explain import diagnosis, rendering

    report_language = language.choose_language(lang, os.environ)
    language.replace_unencodable(sys.stdout)
    entries = knowledge_base.load_knowledge(knowledge)
    with show_read_progress() as advance:
        report = diagnosis.explain_logs(logs, entries, advance, all_)
    if json_:
        sys.stdout.write(
            json.dumps(rendering.report_to_dict(report, report_language), ensure_ascii=False, indent=2) + "\n"
        )
    else:
        rendering.print_report(report, report_language, Console(highlight=False))
    return 0 if report.findings else EXIT_NO_MATCH
