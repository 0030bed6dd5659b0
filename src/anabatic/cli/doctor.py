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

_SwitchOption = Annotated[bool, Parameter(negative=(), show_default=False)]
_PathOption = Annotated[Path | None, Parameter(negative=())]


def doctor(
    *,
    json: _SwitchOption = False,
    strict: _SwitchOption = False,
    root: _PathOption = None,
    bundle: _PathOption = None,
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
    from anabatic.doctor import check_report, check_runner, language, machine_facts, target_machine

    words = language.choose_language(lang, os.environ)
    language.replace_unencodable(sys.stdout)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root is {root}, which is no folder", "unpack the bundle first, or name a mounted root")
    looked_at = machine_facts.open_local_machine() if root is None else target_machine.open_root(root)
    lines = check_runner.run_checks(looked_at)
    if json:
        sys.stdout.write(check_report.render_json(lines, words, __version__, str(root or "/")))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write(check_report.render_report(lines, words, width, colour))
    if bundle is not None:
        from anabatic.doctor import bundle as packing

        sys.stdout.flush()
        packing.write_bundle(bundle, looked_at, lines)
    return check_runner.get_exit_code(lines, strict)
