"""`anabatic env`: the variables of this machine for `eval`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from anabatic.core.errors import ConfigError


def env(
    *,
    shell: Annotated[str, Parameter(negative=())] = "bash",
    explain: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    root: Annotated[Path | None, Parameter(negative=())] = None,
    lang: Annotated[str | None, Parameter(negative=())] = None,
) -> None:
    """Print the variables for CANN, HCCL and the allocator: eval "$(anabatic env)".

    Parameters
    ----------
    shell
        bash (also sh and zsh), fish or json.
    explain
        Add what is not set although guides do, and why.
    root
        For the machine below this folder instead.
    lang
        en or zh; default: the locale's.
    """
    from anabatic.doctor import environment, facts, language, machine

    words = language.choose(lang, os.environ)
    language.writable(sys.stdout)
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root is {root}, which is no folder", "name a mounted root")
    looked_at = facts.quick() if root is None else machine.rooted(root)
    sys.stdout.write(environment.render(looked_at, shell, explain, words))
