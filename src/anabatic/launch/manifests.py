"""Manifests of a job for the operators that run one on Kubernetes: Volcano's Job and Kubeflow's PyTorchJob.

One pod runs on each machine, and in it `anabatic launch`, which learns its place from the operator's variables
(`scheduler.py`). The recipe travels in a ConfigMap.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from anabatic.config.kubernetes import Kubernetes
from anabatic.core import child
from anabatic.core.errors import ConfigError
from anabatic.launch.manifest_rules import RULES
from anabatic.launch.pod import RECIPE_FILE, labels, template

Manifest = dict[str, Any]

_AGAIN = ({"exitCode": child.MISTAKE, "action": "TerminateJob"}, {"exitCode": child.PREEMPTED, "action": "RestartJob"},
          {"event": "PodEvicted", "action": "RestartJob"}, {"event": "PodFailed", "action": "RestartJob"})  # fmt: skip
"""The first that fits is taken (volcano, job_controller_util.go, applyPolicies): exit codes stand before events."""


def volcano(asked: Kubernetes, command: list[str]) -> Manifest:
    """Return a Volcano Job.

    The plugins `env` and `svc` tell each pod its number and the names of all. A pod's own restartPolicy is Never: a
    pod that the kubelet starts again on its own never reaches the policies of the job.
    """
    pod = template(asked, command, "anabatic")
    pod["spec"]["restartPolicy"] = "Never"
    return {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": _metadata(asked),
        "spec": {
            "minAvailable": asked.least,
            "schedulerName": "volcano",
            **({"queue": asked.queue} if asked.queue else {}),
            **({"priorityClassName": asked.priority} if asked.priority else {}),
            "maxRetry": asked.attempts,
            "plugins": {"env": [], "svc": []},
            "policies": [dict(one) for one in _AGAIN],
            "tasks": [{"name": "worker", "replicas": asked.most, "minAvailable": asked.least, "template": pod}],
        },
    }


def pytorchjob(asked: Kubernetes, command: list[str]) -> Manifest:
    """Return a PyTorchJob of Kubeflow's training operator.

    `restartPolicy: ExitCode` takes 1 to 127 as final and 128 to 255, a job that was told to leave (143) or killed, as
    worth another try. The container must be called `pytorch`, its port `pytorchjob-port`.
    """
    pod = template(asked, command, "pytorch")
    if asked.queue:  # the operator makes a group of the pods for Volcano only if they name its scheduler
        pod["spec"]["schedulerName"] = "volcano"
    if asked.priority:
        pod["spec"]["priorityClassName"] = asked.priority
    gang = {
        "minAvailable": asked.least,
        **({"queue": asked.queue} if asked.queue else {}),
        **({"priorityClass": asked.priority} if asked.priority else {}),
    }
    replicas = {"Master": {"replicas": 1, "restartPolicy": "ExitCode", "template": pod}}
    if asked.most > 1:
        replicas["Worker"] = {"replicas": asked.most - 1, "restartPolicy": "ExitCode", "template": pod}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(asked),
        "spec": {
            "nprocPerNode": str(asked.nproc),
            "runPolicy": {"backoffLimit": asked.attempts, "cleanPodPolicy": "None", "schedulingPolicy": gang},
            "pytorchReplicaSpecs": replicas,
        },
    }


KINDS: dict[str, Callable[[Kubernetes, list[str]], Manifest]] = {"volcano": volcano, "pytorchjob": pytorchjob}
"""What `--kind` names."""


def write(asked: Kubernetes, command: list[str], recipe: str) -> str:
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
    manifests = [config, KINDS[asked.kind](asked, command)]
    check(manifests)
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def check(manifests: list[Manifest]) -> None:
    """Check manifests against the rules of their kinds.

    Raises:
        ConfigError: something does not fit.
    """
    faults = [fault for one in manifests for fault in RULES[one["kind"]].faults(one, one["kind"])]
    if faults:
        more = f", and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ConfigError(
            f"Kubernetes would not take the job: {'; '.join(faults[:3])}{more}",
            "change the option that it comes from, see `anabatic launch k8s --help`; the rules of names are on"
            " kubernetes.io, Object Names and IDs",
        )


def _metadata(asked: Kubernetes) -> Manifest:
    return {
        "name": asked.name,
        **({"namespace": asked.namespace} if asked.namespace else {}),
        **({"labels": labels(asked)} if labels(asked) else {}),
    }


class _Dumper(yaml.SafeDumper):
    """Quotes every text that any reader of YAML 1.1 or 1.2 might take for something else, `y` and `0o17` too."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # the template stands twice in a PyTorchJob


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]+")
_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    if "\n" in value:
        style: str | None = "|"
    else:
        style = None if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
