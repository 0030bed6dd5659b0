"""`anabatic doctor`: what is on this machine, whether it fits together, and what to type."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from anabatic import __version__
from anabatic.core.errors import ConfigError

_Switch = Annotated[bool, Parameter(negative=(), show_default=False)]
_Path = Annotated[Path | None, Parameter(negative=())]


def doctor(
    *,
    json: _Switch = False,
    strict: _Switch = False,
    root: _Path = None,
    bundle: _Path = None,
    lang: Annotated[str | None, Parameter(negative=())] = None,
) -> int:
    """Check chips, driver, CANN, torch, variables, host and network; each line says what to type.

    Exit code 1 when something is broken.

    Parameters
    ----------
    json
        Print one JSON object instead of lines.
    strict
        Exit code 2 when something deserves a warning.
    root
        Look at the machine below this folder instead: a mounted container, an unpacked bundle. Nothing is executed.
    bundle
        Also write FILE.tar.gz with what a supporter asks for, secrets removed.
    lang
        en or zh; default: the locale's.
    """
    from anabatic.doctor import examine, facts, language, machine, report

    words = language.choose(lang, os.environ)
    language.writable(sys.stdout)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root is {root}, which is no folder", "unpack the bundle first, or name a mounted root")
    looked_at = facts.live() if root is None else machine.rooted(root)
    lines = examine.examine(looked_at)
    if json:
        sys.stdout.write(report.as_json(lines, words, __version__, str(root or "/")))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write(report.text(lines, words, width, colour))
    if bundle is not None:
        from anabatic.doctor import bundle as packing

        sys.stdout.flush()
        packing.write(bundle, looked_at, lines)
    return examine.exit_code(lines, strict)
