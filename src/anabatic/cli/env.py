"""`anabatic env`: print the environment variables of this machine for `eval`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anabatic.core.errors import ConfigError


def env(
    *,
    shell: str = "bash",
    explain: bool = False,
    root: Path | None = None,
    lang: str | None = None,
) -> None:
    """Print the variables for CANN, HCCL and the allocator: eval "$(anabatic env)".

    Parameters
    ----------
    shell
        Output format: bash (also sh and zsh), fish or json.
    explain
        Also list variables that guides set but this command does not, and why.
    root
        Use the machine below this folder instead.
    lang
        Language, en or zh; default: the locale's.
    """
    from anabatic.core import language
    from anabatic.doctor import machine_facts, shell_environment, target_machine

    report_language = language.choose_language(lang, os.environ)
    language.replace_unencodable(sys.stdout)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root is {root}, which is no folder", "name a mounted root")
    machine = machine_facts.open_local_machine_quickly() if root is None else target_machine.open_root(root)
    sys.stdout.write(shell_environment.render_settings(machine, shell, explain, report_language))
