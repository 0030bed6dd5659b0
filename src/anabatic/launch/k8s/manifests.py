"""Manifests of a job for the operators that run one on Kubernetes: Volcano's Job and Kubeflow's PyTorchJob.

One pod runs on each machine, and in it `anabatic launch`, which learns its place from the operator's variables
(`env_variables.py`). The recipe travels in a ConfigMap.
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
"""The first that fits is taken (volcano, job_controller_util.go, applyPolicies): exit codes stand before events."""


def build_volcano_job(asked: Kubernetes, command: list[str]) -> Manifest:
    """Return a Volcano Job.

    The plugins `env` and `svc` tell each pod its number and the names of all. A pod's own restartPolicy is Never: a
    pod that the kubelet starts again on its own never reaches the policies of the job.
    """
    pod = build_pod_template(asked, command, "anabatic")
    pod["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": _build_metadata(asked),
        "spec": {
            "minAvailable": asked.min_pods,
            "schedulerName": "volcano",
            **({"queue": asked.queue} if asked.queue else {}),
            **({"priorityClassName": asked.priority} if asked.priority else {}),
            "maxRetry": asked.attempts,
            "plugins": {"env": [], "svc": []},
            "policies": [dict(one) for one in _RESTART_POLICIES],
            "tasks": [{"name": "worker", "replicas": asked.max_pods, "minAvailable": asked.min_pods, "template": pod}],
        },
    }


def build_pytorch_job(asked: Kubernetes, command: list[str]) -> Manifest:
    """Return a PyTorchJob of Kubeflow's training operator.

    `restartPolicy: ExitCode` takes 1 to 127 as final and 128 to 255, a job that was asked to leave (143) or killed, as
    worth another try. The container must be called `pytorch`, its port `pytorchjob-port`.
    """
    pod = build_pod_template(asked, command, "pytorch")
    if asked.queue:  # the operator makes a group of the pods for Volcano only if they name its scheduler
        pod["spec"]["schedulerName"] = "volcano"
    if asked.priority:
        pod["spec"]["priorityClassName"] = asked.priority
    gang = {
        "minAvailable": asked.min_pods,
        **({"queue": asked.queue} if asked.queue else {}),
        **({"priorityClass": asked.priority} if asked.priority else {}),
    }
    replicas = {"Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": pod}}
    if asked.max_pods > 1:
        replicas["Worker"] = {"replicas": asked.max_pods - 1, "restartPolicy": "ExitCode", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _build_metadata(asked),
        "spec": {
            "nprocPerNode": str(asked.nproc),
            "runPolicy": {"backoffLimit": asked.attempts, "cleanPodPolicy": "None", "schedulingPolicy": gang},
            "pytorchReplicaSpecs": replicas,
        },
    }


MANIFEST_BUILDERS: dict[str, Callable[[Kubernetes, list[str]], Manifest]] = {
    "volcano": build_volcano_job,
    "pytorchjob": build_pytorch_job,
}
"""What `--kind` names."""


def render_manifests(asked: Kubernetes, command: list[str], recipe: str) -> str:
    """Return the manifests as YAML: the job, and the ConfigMap with its recipe.

    Raises:
        ConfigError: a name or value is none that Kubernetes takes; all of them are named.
    """
    place = {"namespace": asked.namespace} if asked.namespace else {}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{asked.name}-recipe", **place},
        "data": {RECIPE_FILE: recipe},
    }
    manifests = [config, MANIFEST_BUILDERS[asked.kind](asked, command)]
    check_manifests(manifests)
    return yaml.dump_all(manifests, Dumper=_QuotingDumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def check_manifests(manifests: list[Manifest]) -> None:
    """Check manifests against the rules of their kinds.

    Raises:
        ConfigError: something does not fit.
    """
    faults = [fault for one in manifests for fault in RULES_BY_KIND[one["kind"]].find_faults(one, one["kind"])]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"Kubernetes would not take the job: {'; '.join(faults[:3])}{more}",
            "change the option that it comes from, see `anabatic launch k8s --help`; the rules of names are on"
            " kubernetes.io, Object Names and IDs",
        )


def _build_metadata(asked: Kubernetes) -> Manifest:
    return {
        "name": asked.name,
        **({"namespace": asked.namespace} if asked.namespace else {}),
        **({"labels": get_chip_labels(asked)} if get_chip_labels(asked) else {}),
    }


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every text that any reader of YAML 1.1 or 1.2 might take for something else, `y` and `0o17` too."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # the template stands twice in a PyTorchJob


_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]+")
_YAML_KEYWORDS = {"yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    if "\n" in value:
        style: str | None = "|"
    else:
        style = None if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _YAML_KEYWORDS else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_QuotingDumper.add_representer(str, _represent_text)
