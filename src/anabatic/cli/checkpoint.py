"""`anabatic checkpoint list|verify|export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from anabatic import __version__
from anabatic.cli.job import job_command
from anabatic.config import commands

app = App(name="checkpoint", help="List, verify or export the checkpoints of a run.", version=__version__)
_Json = Annotated[bool, Parameter(name="--json", negative=(), show_default=False)]
BROKEN = 1
"""Exit code when a file is not as it was written."""


@app.command(name="list")
def list_(path: Path, /, *, json_: _Json = False) -> None:
    """List the checkpoints of a run; sizes are compared, contents are not read (that is `verify`).

    Parameters
    ----------
    path
        Run folder, or one checkpoint.
    json_
        Print JSON.
    """
    from anabatic.train import checkpoint_list

    rows = checkpoint_list.rows(path.expanduser())
    text = json.dumps(rows, indent=2) + "\n" if json_ else checkpoint_list.table(rows)
    sys.stdout.write(text)


@app.command
def verify(path: Path, /, *, json_: _Json = False) -> int:
    """Compare every file with its size and checksum. Exit code 1: something is not as it was written.

    Parameters
    ----------
    path
        Run folder, or one checkpoint.
    json_
        Print JSON.
    """
    from anabatic.cli.reading import reading
    from anabatic.train import checkpoint_list

    with reading() as advance:
        found = checkpoint_list.verified(path.expanduser(), advance)
    if json_:
        sys.stdout.write(json.dumps([one.as_dict() for one in found], indent=2) + "\n")
    else:
        sys.stdout.write("".join(one.text() for one in found))
    return BROKEN if any(one.faults for one in found) else 0


app.command(job_command("checkpoint export"), name="export", help=commands.get("checkpoint export").help)
