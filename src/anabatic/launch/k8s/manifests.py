"""Build the manifests of a job for operators on Kubernetes: Volcano's Job and Kubeflow's PyTorchJob.

One pod runs on each machine and runs `anabatic launch`, which reads its node rank from the operator's variables
(`env_variables.py`). A ConfigMap holds the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from anabatic.config.sections.kubernetes import Kubernetes
from anabatic.core import relaunch
from anabatic.core.errors import ConfigError
from anabatic.launch.k8s.manifest_rules import RULES_BY_KIND
from anabatic.launch.k8s.pod_template import RECIPE_FILE, build_pod_template, get_chip_labels

Manifest = dict[str, Any]

_RESTART_POLICIES = (
    {"exitCode": relaunch.EXIT_USER_ERROR, "action": "TerminateJob"},
    {"exitCode": relaunch.EXIT_PREEMPTED, "action": "RestartJob"},
    {"event": "PodEvicted", "action": "RestartJob"},
    {"event": "PodFailed", "action": "RestartJob"},
)
"""The first match applies (volcano, job_controller_util.go, applyPolicies), so exit codes come before events."""


def build_volcano_job(settings: Kubernetes, command: list[str]) -> Manifest:
    """Return a Volcano Job.

    The plugins `env` and `svc` give each pod its index and the host names of all pods. The pod's restartPolicy is
    Never: the policies of the job do not apply to a pod that the kubelet restarts.
    """
    pod = build_pod_template(settings, command, "anabatic")
    pod["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": _build_metadata(settings),
        "spec": {
            "minAvailable": settings.min_pods,
            "schedulerName": "volcano",
            **({"queue": settings.queue} if settings.queue else {}),
            **({"priorityClassName": settings.priority} if settings.priority else {}),
            "maxRetry": settings.attempts,
            "plugins": {"env": [], "svc": []},
            "policies": [dict(policy) for policy in _RESTART_POLICIES],
            "tasks": [
                {"name": "worker", "replicas": settings.max_pods, "minAvailable": settings.min_pods, "template": pod}
            ],
        },
    }


def build_pytorch_job(settings: Kubernetes, command: list[str]) -> Manifest:
    """Return a PyTorchJob of Kubeflow's training operator.

    `restartPolicy: ExitCode` treats 1 to 127 as final and retries after 128 to 255, a job that was asked to stop (143)
    or killed. The container must be named `pytorch`, its port `pytorchjob-port`.
    """
    pod = build_pod_template(settings, command, "pytorch")
    if settings.queue:  # the operator creates a pod group for Volcano only if the pods name its scheduler
        pod["spec"]["schedulerName"] = "volcano"
    if settings.priority:
        pod["spec"]["priorityClassName"] = settings.priority
    scheduling_policy = {
        "minAvailable": settings.min_pods,
        **({"queue": settings.queue} if settings.queue else {}),
        **({"priorityClass": settings.priority} if settings.priority else {}),
    }
    replicas = {"Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": pod}}
    if settings.max_pods > 1:
        replicas["Worker"] = {"replicas": settings.max_pods - 1, "restartPolicy": "ExitCode", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _build_metadata(settings),
        "spec": {
            "nprocPerNode": str(settings.nproc),
            "runPolicy": {
                "backoffLimit": settings.attempts,
                "cleanPodPolicy": "None",
                "schedulingPolicy": scheduling_policy,
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


MANIFEST_BUILDERS: dict[str, Callable[[Kubernetes, list[str]], Manifest]] = {
    "volcano": build_volcano_job,
    "pytorchjob": build_pytorch_job,
}
"""Value of `--kind` -> builder."""


def render_manifests(settings: Kubernetes, command: list[str], recipe: str) -> str:
    """Return the manifests as YAML: the job and the ConfigMap with its recipe.

    Raises:
        ConfigError: Kubernetes would refuse a name or value; the message lists all of them.
    """
    namespace = {"namespace": settings.namespace} if settings.namespace else {}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{settings.name}-recipe", **namespace},
        "data": {RECIPE_FILE: recipe},
    }
    manifests = [config_map, MANIFEST_BUILDERS[settings.kind](settings, command)]
    check_manifests(manifests)
    return yaml.dump_all(manifests, Dumper=_QuotingDumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def check_manifests(manifests: list[Manifest]) -> None:
    """Check manifests against the rules of their kinds.

    Raises:
        ConfigError: a field breaks a rule.
    """
    faults = [
        fault
        for manifest in manifests
        for fault in RULES_BY_KIND[manifest["kind"]].find_faults(manifest, manifest["kind"])
    ]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"Kubernetes would not take the job: {'; '.join(faults[:3])}{more}",
            "change the option that it comes from, see `anabatic launch k8s --help`; the rules of names are on"
            " kubernetes.io, Object Names and IDs",
        )


def _build_metadata(settings: Kubernetes) -> Manifest:
    return {
        "name": settings.name,
        **({"namespace": settings.namespace} if settings.namespace else {}),
        **({"labels": get_chip_labels(settings)} if get_chip_labels(settings) else {}),
    }


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every text that a parser of YAML 1.1 or 1.2 might read as another type, such as `y` and `0o17`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a PyTorchJob contains the template twice


_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]+")
_YAML_KEYWORDS = {"yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    if "\n" in value:
        style: str | None = "|"
    else:
        style = None if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _YAML_KEYWORDS else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_QuotingDumper.add_representer(str, _represent_text)
