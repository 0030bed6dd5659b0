"""`anabatic report`: write the report of a run again, or compare several runs on one page."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anabatic.core.errors import ConfigError


def report(*runs: Path, out: Path | None = None, lang: str | None = None) -> None:
    """Write the report of a run again, or compare up to eight runs: final figures, curves, settings that differ.

    Parameters
    ----------
    runs
        Run folders.
    out
        HTML file; default: report.html in the folder of one run, comparison.html here for several.
    lang
        en or zh: the language without JavaScript, and where the browser asks for neither; default: the locale's.
    """
    from anabatic.core import language
    from anabatic.train.report import comparison_page, page

    chosen = language.choose_language(lang, os.environ)
    folders = [folder.expanduser() for folder in runs]
    if not folders:
        raise ConfigError("no run is named", "anabatic report runs/one runs/two")
    if out is not None and out.is_dir():
        raise ConfigError(f"--out is {out}, which is a folder", f"name a file: --out {out / 'comparison.html'}")
    if len(folders) == 1:
        comparison_page.require_run_folders(folders)
        path = page.write_run_report(folders[0], chosen, out)
    else:
        path = comparison_page.write_comparison(folders, out or Path("comparison.html"), chosen)
    sys.stdout.write(f"{path}\n")
