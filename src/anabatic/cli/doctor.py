"""`anabatic doctor`: check the components of this machine, their compatibility, and print fixes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from anabatic import __version__
from anabatic.core.errors import ConfigError


def doctor(
    *,
    json: bool = False,
    strict: bool = False,
    root: Path | None = None,
    bundle: Path | None = None,
    lang: str | None = None,
) -> int:
    """Check chips, driver, CANN, torch, environment variables, host and network, and print how to fix each problem.

    Exit code 1 if something is broken.

    Parameters
    ----------
    json
        Print one JSON object instead of lines.
    strict
        Exit code 2 if there are warnings.
    root
        Check the machine below this folder instead: a mounted container or an unpacked bundle. Nothing is executed.
    bundle
        Also write FILE.tar.gz with the information support asks for, with secrets removed.
    lang
        Language, en or zh; default: the locale's.
    """
    from anabatic.core import language
    from anabatic.doctor import check_report, check_runner, machine_facts, target_machine

    report_language = language.choose_language(lang, os.environ)
    language.replace_unencodable(sys.stdout)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root is {root}, which is no folder", "unpack the bundle first, or name a mounted root")
    machine = machine_facts.open_local_machine() if root is None else target_machine.open_root(root)
    findings = check_runner.run_checks(machine)
    if json:
        sys.stdout.write(check_report.render_json(findings, report_language, __version__, str(root or "/")))
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        sys.stdout.write(check_report.render_report(findings, report_language, width, colour))
    if bundle is not None:
        from anabatic.doctor import bundle as bundle_writer

        sys.stdout.flush()
        bundle_writer.write_bundle(bundle, machine, findings)
    return check_runner.get_exit_code(findings, strict)
