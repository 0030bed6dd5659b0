"""`anabatic launch k8s`: the manifests of a job on Kubernetes, printed or submitted."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

from anabatic.cli import job as jobs
from anabatic.cli.launch_words import training_job
from anabatic.config import check, load
from anabatic.config.kubernetes import Kubernetes
from anabatic.core.errors import ConfigError
from anabatic.launch import kubernetes, manifests


def k8s(*command: str, **given: Any) -> int:
    """Print the manifests of a job on Kubernetes that runs COMMAND, or submit them.

    The recipe is resolved here and travels along; its paths are those in the container. COMMAND stands after `--`.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic launch k8s --image IMAGE -- sft -c recipe.yaml")
    asked = load.make(Kubernetes, check.section(jobs.tree(given), Kubernetes, check.Flags()))
    row, job = training_job(list(command))
    if asked.nproc is None:
        asked = dataclasses.replace(asked, nproc=load.tree_of(job)["device"]["nproc"])
    text = manifests.write(asked, row.name.split(), load.dump(job))
    sys.stdout.write(f"{kubernetes.submit(text, asked.context)}\n" if asked.submit else text)
    return 0


_COMMAND = inspect.Parameter("command", inspect.Parameter.VAR_POSITIONAL, annotation=str)
jobs.set_signature(
    k8s, [_COMMAND, *jobs.options(Kubernetes, {"nproc": "--npus --nproc-per-node", "nnodes": "--nodes"})]
)
