"""`anabatic launch k8s`: print or submit the manifests of a job on Kubernetes."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from anabatic.cli import job_command
from anabatic.cli.launch.option_parsing import resolve_training_job
from anabatic.config.loading import settings
from anabatic.config.sections.kubernetes import Kubernetes
from anabatic.core.errors import ConfigError
from anabatic.launch import job_secret
from anabatic.launch.k8s import kubectl, manifests


def _run(command: tuple[str, ...], values: dict[str, Any]) -> int:
    if not command:
        raise ConfigError("which command?", "for example: anabatic launch k8s --image IMAGE -- sft -c recipe.yaml")
    kubernetes_job = settings.make_settings(Kubernetes, values)
    row, job = resolve_training_job(list(command))
    if kubernetes_job.nproc is None:
        kubernetes_job = dataclasses.replace(kubernetes_job, nproc=settings.job_to_dict(job)["device"]["nproc"])
    text = manifests.render_manifests(
        kubernetes_job, row.name.split(), settings.dump_job(job), job_secret.make_secret()
    )
    sys.stdout.write(f"{kubectl.submit_manifests(text, kubernetes_job.context)}\n" if kubernetes_job.submit else text)
    return 0


K8S = job_command.make_settings_command(
    Kubernetes,
    {"nproc": "--npus --nproc-per-node", "nnodes": "--nodes"},
    "Print the manifests of a job on Kubernetes that runs COMMAND, or submit them.\n\n"
    "The recipe is resolved here and travels along; its paths are those in the container.",
    _run,
)
