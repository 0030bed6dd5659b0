"""`anabatic launch --hosts`: the options, the file and the job put together."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.config import load
from anabatic.config.launch import Launch
from anabatic.core.errors import ConfigError


@dataclass(frozen=True)
class Given:
    """What was typed; None: not given."""

    nproc: int | None = None
    nnodes: tuple[int, int] | None = None
    master_addr: str | None = None
    python: str | None = None
    folder: str | None = None
    variables: tuple[str, ...] = ()


def run(command: str, job: Any, file: Path, given: Given, words: tuple[str, ...] = (), **options: Any) -> int:
    """Run a job on the machines of a file and return its exit code.

    Args:
        command: name of the command; empty: the machines are only checked.
        words: options that the launchers on the machines get as they are.
        options: further fields of `Launch`.
    """
    from anabatic.launch import everywhere, hosts, ssh

    found = hosts.read(file)
    least, most = given.nnodes or (len(found), len(found))
    if most > len(found):
        raise ConfigError(
            f"--nnodes is {most}, but {file} names {len(found)} machine{'s' if len(found) > 1 else ''}",
            "leave --nnodes out to use all of them",
        )
    tree: dict[str, Any] = load.tree_of(job) if command else {"device": {"nproc": 1}}
    launch = Launch(
        nproc=given.nproc or tree["device"]["nproc"],
        min_nodes=least,
        max_nodes=most,
        master_addr=given.master_addr or found[0].name,
        **options,
    )
    out = tree.get("out")
    order = ssh.Job(
        command=command,
        recipe=load.dump(job) if command else "",
        launch=launch,
        nproc=given.nproc,
        python=given.python or sys.executable,
        folder=given.folder or os.getcwd(),
        environment=ssh.environment(given.variables, installation=given.python is None),
        out=Path(out) if out else None,
        words=words,
    )
    return everywhere.run(found[:most], order)


def refuse(given: Mapping[str, object]) -> None:
    """Refuse options that the file of hosts answers.

    Raises:
        ConfigError: one of them is given.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"{name} stands beside --hosts", "the order of the file is that of the machines")
