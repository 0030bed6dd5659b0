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

from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import log, relaunch
from anabatic.core.errors import ConfigError, Failure
from anabatic.launch import rendezvous, rendezvous_endpoint
from anabatic.launch.preflight import machine_report

_MAX_SHOWN_ERRORS = 10


def run(launch: LaunchSettings, tree: Mapping[str, Any] | None) -> None:
    """Check the machines of a job; return when nothing speaks against it.

    Args:
        tree: the resolved settings of the job; None: the machines alone are checked.

    Raises:
        ConfigError: machines differ in what must be the same, or lack something; each is named.
        Failure: the machines did not meet.
    """
    if launch.is_multi_node and launch.node_rank is None:
        raise ConfigError(
            "--check needs the place of this machine among the others",
            f"give another --node-rank on each of the {launch.max_nodes}, for which it waits",
        )
    result = _run_link_probe(_build_task(launch, tree), rendezvous_endpoint.interface_variables(launch))
    if why := result.get("why"):
        raise Failure(
            f"the machines did not meet for the check: {why}",
            "start the same command on every machine, and let the port of --master-port through their firewalls",
        )
    found = machine_report.parse_result(result)
    errors, warnings = machine_report.find_errors(found), machine_report.find_warnings(found)
    if not launch.node_rank:
        for line in machine_report.format_tables(found):
            log.info(line)
        for line in warnings:
            log.warn(line)
    if errors:
        more = f"; and {len(errors) - _MAX_SHOWN_ERRORS} more" if len(errors) > _MAX_SHOWN_ERRORS else ""
        count = "1 problem" if len(errors) == 1 else f"{len(errors)} problems"
        raise ConfigError(
            f"the check found {count}: {'; '.join(errors[:_MAX_SHOWN_ERRORS])}{more}",
            "nothing was started; make the machines alike and try again",
        )
    if not launch.node_rank:
        log.info(f"check passed, {len(warnings)} warning{'' if len(warnings) == 1 else 's'}")


def _build_task(launch: LaunchSettings, tree: Mapping[str, Any] | None) -> dict[str, Any]:
    address = rendezvous_endpoint.prepare_rendezvous(launch) if launch.is_multi_node else ""
    recipe = rendezvous.flatten_settings(tree) if tree is not None else {}
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
        "interface": rendezvous_endpoint.find_interface(address) or "",
        "job": {"recipe": recipe, "nproc": launch.nproc, "out": out, "device": device},
    }


def _run_link_probe(task: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run the program that meets the others and return what it found."""
    with tempfile.TemporaryDirectory(prefix="anabatic-") as name:
        file = Path(name) / "task.json"
        file.write_text(json.dumps(task), encoding="utf-8")
        given = {"TORCH_CPP_LOG_LEVEL": "FATAL", **variables, **relaunch.build_child_environment()}
        given.pop(relaunch.REPORTS_VARIABLE, None)
        done = subprocess.run(
            [sys.executable, "-m", "anabatic.launch.preflight.link_probe", os.fspath(file)],
            env=given,
            stdin=subprocess.DEVNULL,
        )
        out = file.with_suffix(".out")
        if done.returncode or not out.is_file():
            raise Failure(f"the check ended with exit code {done.returncode}", "its messages stand above")
        result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        return result
