"""`anabatic launch --check`: machines join a rendezvous as for a job, compare their facts, and measure their links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabatic.config.loading.settings import flatten_settings
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core import log, relaunch
from anabatic.core.errors import ConfigError, Failure
from anabatic.launch import job_secret, rendezvous_endpoint
from anabatic.launch.preflight import machine_report

_MAX_SHOWN_ERRORS = 10


def run(launch: LaunchSettings, settings: Mapping[str, Any] | None) -> None:
    """Check the machines of a job; return if it can run.

    Args:
        settings: the resolved settings of the job; None: check only the machines.

    Raises:
        ConfigError: machines differ in facts that must be equal, or lack something, the message lists all problems; or
            the job's secret is invalid.
        Failure: the rendezvous failed.
    """
    if launch.is_multi_node and launch.node_rank is None:
        raise ConfigError(
            "--check needs the place of this machine among the others",
            f"give a different --node-rank on each of the {launch.max_nodes}, it waits for them",
        )
    result = _run_link_probe(_build_task(launch, settings), rendezvous_endpoint.interface_variables(launch))
    if reason := result.get("why"):
        raise Failure(
            f"the machines did not meet for the check: {reason}",
            "start the same command on every machine, and let the port of --master-port through their firewalls",
        )
    report = machine_report.parse_result(result)
    errors, warnings = machine_report.find_errors(report), machine_report.find_warnings(report)
    if not launch.node_rank:
        for line in machine_report.format_tables(report):
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


def _build_task(launch: LaunchSettings, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    job_secret.read_secret(os.environ)
    address = rendezvous_endpoint.prepare_rendezvous(launch) if launch.is_multi_node else ""
    recipe = flatten_settings(settings) if settings is not None else {}
    device = str(recipe.get("device.type", "auto"))
    out = recipe.get("out") if settings is not None else None
    return {
        "host": launch.master_addr,
        "port": launch.master_port,
        "job_id": launch.job_id,
        "node_rank": launch.node_rank or 0,
        "size": launch.max_nodes,
        "seconds": launch.join_seconds,
        "address": address,
        "interface": rendezvous_endpoint.find_interface(address) or "",
        "job": {"recipe": recipe, "nproc": launch.nproc, "out": out, "device": device},
    }


def _run_link_probe(task: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Run the link probe in a subprocess and return its result."""
    with tempfile.TemporaryDirectory(prefix="anabatic-") as folder:
        task_path = Path(folder) / "task.json"
        task_path.write_text(json.dumps(task), encoding="utf-8")
        environment = {"TORCH_CPP_LOG_LEVEL": "FATAL", **variables, **relaunch.build_child_environment()}
        environment.pop(relaunch.REPORTS_VARIABLE, None)
        process = subprocess.run(
            [sys.executable, "-m", "anabatic.launch.preflight.link_probe", os.fspath(task_path)],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        result_path = task_path.with_suffix(".out")
        if process.returncode or not result_path.is_file():
            raise Failure(f"the check ended with exit code {process.returncode}", "its messages are above")
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        return result
