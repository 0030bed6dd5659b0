"""`anabatic report`: write the report of a run again, or compare several runs on one page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anabatic.core.errors import ConfigError


def report(*runs: Path, out: str | None = None, lang: str | None = None) -> None:
    """Rewrite the report of a run, or compare up to eight runs: final metrics, curves, differing settings.

    Parameters
    ----------
    runs
        Run folders.
    out
        HTML file or folder to write; default: report.html in the run folder, or comparison.html here for several runs.
    lang
        Fallback language, en or zh, if the browser asks for neither or has no JavaScript; default: the locale's.
    """
    from anabatic.core import language
    from anabatic.core.paths import resolve_output_file
    from anabatic.train.report import comparison_page, page

    chosen = language.choose_language(lang, os.environ)
    folders = [folder.expanduser() for folder in runs]
    if not folders:
        raise ConfigError("no run is named", "anabatic report runs/one runs/two")
    comparison_page.require_run_folders(folders)
    if len(folders) == 1:
        path = page.write_run_report(folders[0], chosen, resolve_output_file(out, "report.html") if out else None)
    else:
        path = comparison_page.write_comparison(folders, resolve_output_file(out or ".", "comparison.html"), chosen)
    sys.stdout.write(f"{path}\n")
