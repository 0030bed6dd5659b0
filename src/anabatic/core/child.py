"""How this program starts itself again."""

from __future__ import annotations

import os
import sys

PROGRAM = (sys.executable, "-m", "anabatic")
"""Command line of this program; a command and its options follow."""
REPORTS = "ANABATIC_REPORTS"
"""Environment variable: folder in which a worker leaves `rank-N.error` and `rank-N.code` for its launcher."""


def environment() -> dict[str, str]:
    """Return the environment for a child that imports what we import.

    `python -m` puts the current folder before all others on the module path, the `anabatic` script does not:
    a `random.py` of the user must not break the child only. (Python 3.10 does not know the variable.)
    """
    variables = dict(os.environ)
    if not {"", os.getcwd()}.intersection(sys.path):
        variables["PYTHONSAFEPATH"] = "1"
    return variables
