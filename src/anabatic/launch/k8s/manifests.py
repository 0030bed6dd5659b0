"""Build the manifests of a job for Volcano's Job and Kubeflow's PyTorchJob, and check every field against their rules.

One pod runs on each machine and runs `anabatic launch`, which reads its node rank from the operator's variables
(`env_variables.py`). A ConfigMap holds the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import yaml

from anabatic.config.sections.kubernetes import Kubernetes
from anabatic.core import relaunch
from anabatic.core.errors import ConfigError
from anabatic.launch.k8s.pod_template import RECIPE_FILE, build_pod_template, get_chip_labels


class FieldRule(Protocol):
    """Rule for one value."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        """Yield one line about each fault of the value at `path`."""
        ...


@dataclass(frozen=True)
class TextRule:
    """A text that matches a pattern in full."""

    description: str = "a text"
    pattern: str = r"(?s:.+)"
    max_chars: int = 1 << 20
    """Most characters."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, str):
            yield f"{path} is {value!r}, not a text"
        elif len(value) > self.max_chars:
            yield f"{path} has {len(value)} characters, at most {self.max_chars} are allowed"
        elif not re.fullmatch(self.pattern, value):
            yield f"{path} is {value!r}, not {self.description}"


@dataclass(frozen=True)
class IntegerRule:
    """A whole number."""

    minimum: int = 0
    maximum: int = 2**31 - 1

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, bool) or not isinstance(value, int):
            yield f"{path} is {value!r}, not a whole number"
        elif not self.minimum <= value <= self.maximum:
            yield f"{path} is {value}, not within {self.minimum} and {self.maximum}"


@dataclass(frozen=True)
class BooleanRule:
    """True or false."""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, bool):
            yield f"{path} is {value!r}, neither true nor false"


@dataclass(frozen=True)
class ChoiceRule:
    """One of a few texts."""

    choices: tuple[str, ...]

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if value not in self.choices:
            yield f"{path} is {value!r}, not one of {', '.join(self.choices)}"


@dataclass(frozen=True)
class ListRule:
    """A list; `unique_field` names a field whose values must differ between entries."""

    item_rule: FieldRule
    min_items: int = 0
    unique_field: str = ""

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{path} is {value!r}, not a list"
            return
        if len(value) < self.min_items:
            yield f"{path} has {len(value)} entries, at least {self.min_items} are needed"
        for index, item in enumerate(value):
            yield from self.item_rule.find_faults(item, f"{path}[{index}]")
        names = [item.get(self.unique_field) for item in value if isinstance(item, dict)] if self.unique_field else []
        for name in sorted({str(name) for name in names if names.count(name) > 1}):
            yield f"{path} has {self.unique_field} {name!r} twice"


@dataclass(frozen=True)
class MapRule:
    """A map with keys chosen by the user."""

    key_rule: FieldRule
    value_rule: FieldRule

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a map"
            return
        for name, item in value.items():
            yield from self.key_rule.find_faults(name, f"{path}: the key")
            yield from self.value_rule.find_faults(item, f"{path}.{name}")


@dataclass(frozen=True)
class ObjectRule:
    """A map with known keys; exactly one of `exactly_one_of` must be present."""

    required: Mapping[str, FieldRule] = field(default_factory=dict)
    optional: Mapping[str, FieldRule] = field(default_factory=dict)
    exactly_one_of: tuple[str, ...] = ()

    def find_faults(self, value: Any, path: str) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path} is {value!r}, not a map"
            return
        known = {**self.required, **self.optional}
        yield from (f"{path}.{name} is missing" for name in self.required if name not in value)
        if self.exactly_one_of and (count := sum(name in value for name in self.exactly_one_of)) != 1:
            yield f"{path} has {count} of {', '.join(self.exactly_one_of)}, exactly one is needed"
        for name, item in value.items():
            if name in known:
                yield from known[name].find_faults(item, f"{path}.{name}")
            else:
                yield f"{path}.{name} is not a field that is known there"


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


JOB_NAME = TextRule(
    "a name of small letters, digits and dashes that begins with a letter and ends with a letter or digit",
    r"[a-z]([-a-z0-9]*[a-z0-9])?",
    50,
)
"""Operators name services (RFC 1035) and pods (63 characters with `-worker-999`) after the job."""
DNS_LABEL = TextRule("a name of small letters, digits and dashes", r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", 63)
_SUBDOMAIN = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
OBJECT_NAME = TextRule("a name of small letters, digits, dashes and dots", _SUBDOMAIN, 253)
LABEL_KEY = TextRule("a label's key", rf"({_SUBDOMAIN}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?", 317)
LABEL_VALUE = TextRule("a label's value", r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", 63)
RESOURCE_NAME = TextRule(
    "a resource such as huawei.com/Ascend910, with its domain",
    rf"cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?",
    317,
)
"""A resource of Kubernetes or a device plugin (kubernetes.io, "Resource Management": extended ones have a domain)."""
VARIABLE_NAME = TextRule("a variable's name", r"[A-Za-z_][A-Za-z0-9_]*")
QUANTITY = TextRule(
    "a quantity such as 64Gi or 500m", r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][0-9]+)?", 30
)
ABSOLUTE_PATH = TextRule("an absolute path without a colon", r"/[^:\0\n]*")
IMAGE_NAME = TextRule("an image", r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", 500)
_ANY_TEXT = TextRule(pattern=r"(?s:.*)")
_COUNT = IntegerRule(1)

METADATA = ObjectRule(
    {"name": JOB_NAME},
    {"namespace": DNS_LABEL, "labels": MapRule(LABEL_KEY, LABEL_VALUE), "annotations": MapRule(LABEL_KEY, _ANY_TEXT)},
)
_KEY_REF = ObjectRule({"name": OBJECT_NAME, "key": TextRule("a key of a secret", r"[-._A-Za-z0-9]+", 253)})
_ENV_ENTRY = ObjectRule(
    {"name": VARIABLE_NAME},
    {"value": _ANY_TEXT, "valueFrom": ObjectRule({"secretKeyRef": _KEY_REF})},
    ("value", "valueFrom"),
)
_VOLUME = ObjectRule(
    {"name": DNS_LABEL},
    {
        "hostPath": ObjectRule({"path": ABSOLUTE_PATH}, {"type": ChoiceRule(("", "Directory", "File"))}),
        "persistentVolumeClaim": ObjectRule({"claimName": OBJECT_NAME}, {"readOnly": BooleanRule()}),
        "nfs": ObjectRule(
            {"server": TextRule("a server", r"[A-Za-z0-9.:\[\]-]+"), "path": ABSOLUTE_PATH}, {"readOnly": BooleanRule()}
        ),
        "emptyDir": ObjectRule({}, {"medium": ChoiceRule(("", "Memory")), "sizeLimit": QUANTITY}),
        "configMap": ObjectRule({"name": OBJECT_NAME}),
    },
    ("hostPath", "persistentVolumeClaim", "nfs", "emptyDir", "configMap"),
)
_RESOURCES = ObjectRule({}, {"requests": MapRule(RESOURCE_NAME, QUANTITY), "limits": MapRule(RESOURCE_NAME, QUANTITY)})
_CONTAINER = ObjectRule(
    {"name": DNS_LABEL, "image": IMAGE_NAME, "command": ListRule(_ANY_TEXT, 1)},
    {
        "imagePullPolicy": ChoiceRule(("Always", "IfNotPresent", "Never")),
        "workingDir": ABSOLUTE_PATH,
        "env": ListRule(_ENV_ENTRY, unique_field="name"),
        "envFrom": ListRule(ObjectRule({"secretRef": ObjectRule({"name": OBJECT_NAME})})),
        "ports": ListRule(ObjectRule({"containerPort": IntegerRule(1, 65535)}, {"name": DNS_LABEL})),
        "resources": _RESOURCES,
        "securityContext": ObjectRule(
            {"capabilities": ObjectRule({"add": ListRule(TextRule("a capability", r"[A-Z_]+"))})}
        ),
        "volumeMounts": ListRule(
            ObjectRule({"name": DNS_LABEL, "mountPath": ABSOLUTE_PATH}, {"readOnly": BooleanRule()}),
            unique_field="mountPath",
        ),
    },
)
POD_TEMPLATE = ObjectRule(
    {
        "spec": ObjectRule(
            {"containers": ListRule(_CONTAINER, 1, "name")},
            {
                "restartPolicy": ChoiceRule(("Always", "OnFailure", "Never")),
                "schedulerName": OBJECT_NAME,
                "priorityClassName": OBJECT_NAME,
                "nodeSelector": MapRule(LABEL_KEY, LABEL_VALUE),
                "hostNetwork": BooleanRule(),
                "dnsPolicy": ChoiceRule(("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")),
                "terminationGracePeriodSeconds": IntegerRule(),
                "imagePullSecrets": ListRule(ObjectRule({"name": OBJECT_NAME})),
                "volumes": ListRule(_VOLUME, unique_field="name"),
            },
        )
    },
    {"metadata": ObjectRule({}, {"labels": MapRule(LABEL_KEY, LABEL_VALUE)})},
)
VOLCANO_EVENTS = ("*", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "TaskFailed")
VOLCANO_ACTIONS = ("AbortJob", "RestartJob", "RestartTask", "TerminateJob", "CompleteJob", "ResumeJob")
_POLICIES = ListRule(
    ObjectRule(
        {"action": ChoiceRule(VOLCANO_ACTIONS)},
        {"event": ChoiceRule(VOLCANO_EVENTS), "exitCode": IntegerRule(1, 255)},
        ("event", "exitCode"),
    )
)
VOLCANO_JOB = ObjectRule(
    {
        "apiVersion": ChoiceRule(("batch.volcano.sh/v1alpha1",)),
        "kind": ChoiceRule(("Job",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {
                "minAvailable": _COUNT,
                "schedulerName": OBJECT_NAME,
                "tasks": ListRule(
                    ObjectRule(
                        {"name": DNS_LABEL, "replicas": _COUNT, "template": POD_TEMPLATE}, {"minAvailable": _COUNT}
                    ),
                    1,
                    "name",
                ),
            },
            {
                "queue": OBJECT_NAME,
                "priorityClassName": OBJECT_NAME,
                "maxRetry": IntegerRule(),
                "plugins": MapRule(ChoiceRule(("env", "svc", "ssh", "pytorch")), ListRule(_ANY_TEXT)),
                "policies": _POLICIES,
            },
        ),
    }
)
_REPLICAS = ObjectRule(
    {"replicas": _COUNT, "template": POD_TEMPLATE},
    {"restartPolicy": ChoiceRule(("Always", "OnFailure", "Never", "ExitCode"))},
)
PYTORCHJOB = ObjectRule(
    {
        "apiVersion": ChoiceRule(("kubeflow.org/v1",)),
        "kind": ChoiceRule(("PyTorchJob",)),
        "metadata": METADATA,
        "spec": ObjectRule(
            {"pytorchReplicaSpecs": ObjectRule({"Master": _REPLICAS}, {"Worker": _REPLICAS})},
            {
                "nprocPerNode": TextRule("a number, auto, cpu or gpu", r"auto|cpu|gpu|[1-9][0-9]*"),
                "runPolicy": ObjectRule(
                    {},
                    {
                        "backoffLimit": IntegerRule(),
                        "cleanPodPolicy": ChoiceRule(("All", "Running", "None")),
                        "schedulingPolicy": ObjectRule(
                            {}, {"minAvailable": _COUNT, "queue": OBJECT_NAME, "priorityClass": OBJECT_NAME}
                        ),
                    },
                ),
            },
        ),
    }
)
CONFIG_MAP = ObjectRule(
    {
        "apiVersion": ChoiceRule(("v1",)),
        "kind": ChoiceRule(("ConfigMap",)),
        "metadata": ObjectRule({"name": OBJECT_NAME}, {"namespace": DNS_LABEL}),
        "data": MapRule(TextRule("a file's name", r"[-._A-Za-z0-9]+", 253), _ANY_TEXT),
    }
)
RULES_BY_KIND = {"Job": VOLCANO_JOB, "PyTorchJob": PYTORCHJOB, "ConfigMap": CONFIG_MAP}
"""Kind of a manifest -> its rule."""
