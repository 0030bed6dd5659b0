"""`anabatic launch --check`: the machines meet as for a job, compare themselves, and measure what is between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabatic.config.launch import Launch
from anabatic.core import child, log
from anabatic.core.errors import ConfigError, Failure
from anabatic.launch import cluster, judge, roll

_SHOWN = 10


def run(launch: Launch, tree: Mapping[str, Any] | None) -> None:
    """Check the machines of a job; return when nothing speaks against it.

    Args:
        tree: the resolved settings of the job; None: the machines alone are checked.

    Raises:
        ConfigError: machines differ in what must be the same, or lack something; each is named.
        Failure: the machines did not meet.
    """
    if launch.several and launch.node_rank is None:
        raise ConfigError(
            "--check needs the place of this machine among the others",
            f"give another --node-rank on each of the {launch.max_nodes}, for which it waits",
        )
    result = _measure(_task(launch, tree), cluster.variables(launch))
    if why := result.get("why"):
        raise Failure(
            f"the machines did not meet for the check: {why}",
            "start the same command on every machine, and let the port of --master-port through their firewalls",
        )
    found = judge.read(result)
    errors, warnings = judge.errors(found), judge.warnings(found)
    if not launch.node_rank:
        for line in judge.lines(found):
            log.info(line)
        for line in warnings:
            log.warn(line)
    if errors:
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise ConfigError(
            f"the check found {count}: {'; '.join(errors[:_SHOWN])}{more}",
            "nothing was started; make the machines alike and try again",
        )
    if not launch.node_rank:
        log.info(f"check passed, {len(warnings)} warning{'' if len(warnings) == 1 else 's'}")


def _task(launch: Launch, tree: Mapping[str, Any] | None) -> dict[str, Any]:
    address = cluster.prepare(launch) if launch.several else ""
    recipe = roll.flat(tree) if tree is not None else {}
    device = str(recipe.get("device.type", "auto"))
    out = recipe.get("out") if tree is not None else None
    return {
        "host": launch.master_addr,
        "port": launch.master_port,
        "job_id": launch.job_id,
        "number": launch.node_rank or 0,
        "size": launch.max_nodes,
        "seconds": launch.join_seconds,
        "address": address,
        "interface": cluster.interface(address) or "",
        "job": {"recipe": recipe, "nproc": launch.nproc, "out": out, "device": device},
    }


def _measure(task: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run the program that meets the others and return what it found."""
    with tempfile.TemporaryDirectory(prefix="anabatic-") as name:
        file = Path(name) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        given = {"TORCH_CPP_LOG_LEVEL": "FATAL", **variables, **child.environment()}
        given.pop(child.REPORTS, None)
        done = subprocess.run(
            [sys.executable, "-m", "anabatic.launch.links", os.fspath(file)], env=given, stdin=subprocess.DEVNULL
        )
        out = file.with_suffix(".out")
        if done.returncode or not out.is_file():
            raise Failure(f"the check ended with exit code {done.returncode}", "its messages stand above")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result
