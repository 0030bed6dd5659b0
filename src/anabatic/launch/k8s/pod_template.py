"""The pod that runs one machine's share of a job: image, devices, volumes, variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from anabatic.config.sections.kubernetes import Kubernetes, parse_pairs
from anabatic.core.errors import ConfigError
from anabatic.launch.k8s.accelerators import ACCELERATORS

RECIPE_FOLDER = "/etc/anabatic"
RECIPE_FILE = "job.yaml"
_SHM_VOLUME = "shm"
_RECIPE_VOLUME = "recipe"


@dataclass(frozen=True)
class PodVolume:
    """Something mounted into the pod.

    Attributes:
        source: the volume's fields as Kubernetes has them.
        path: where in the container.
    """

    source: dict[str, Any]
    path: str
    read_only: bool = False


def parse_volume(text: str) -> PodVolume:
    """Return the volume that `pvc:NAME:/data[:ro]`, `host:/data:/data[:ro]` or `nfs:SERVER:/share:/data[:ro]` names.

    Raises:
        ConfigError: it is none of them.
    """
    kind, _, rest = text.partition(":")
    rest, read_only = (rest.removesuffix(":ro"), True) if rest.endswith(":ro") else (rest, False)
    found = re.fullmatch(_VOLUME_PATTERNS.get(kind, r"(?!)"), rest)
    if found is None:
        raise ConfigError(
            f"--volume {text} is not understood",
            "use pvc:NAME:/where, host:/path:/where or nfs:SERVER:/path:/where, with :ro at the end to read only",
        )
    source = {
        "pvc": lambda: {"persistentVolumeClaim": {"claimName": found["name"]}},
        "host": lambda: {"hostPath": {"path": found["name"], "type": "Directory"}},
        "nfs": lambda: {"nfs": {"server": found["server"], "path": found["name"]}},
    }[kind]()
    return PodVolume(source, found["where"], read_only)


_VOLUME_PATTERNS = {
    "pvc": r"(?P<name>[^:]+):(?P<where>/[^:]*)",
    "host": r"(?P<name>/[^:]*):(?P<where>/[^:]*)",
    "nfs": r"(?P<server>[^:/]+|\[[^\]]+\]):(?P<name>/[^:]*):(?P<where>/[^:]*)",
}


def build_pod_template(asked: Kubernetes, command: list[str], container: str) -> dict[str, Any]:
    """Return the template of the pods.

    Args:
        command: a training command whose recipe lies in RECIPE_FOLDER.
        container: its name; operators look for theirs.
    """
    mounts = _build_volumes(asked)
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": asked.grace,
        **({"nodeSelector": dict(parse_pairs(asked.node_selector))} if asked.node_selector else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if asked.host_network else {}),
        **({"imagePullSecrets": [{"name": name} for name in asked.pull_secret]} if asked.pull_secret else {}),
        "containers": [_build_container(asked, command, container, mounts)],
        "volumes": [{"name": name, **one.source} for name, one in mounts.items()],
    }
    return {**({"metadata": {"labels": get_chip_labels(asked)}} if get_chip_labels(asked) else {}), "spec": spec}


def get_chip_labels(asked: Kubernetes) -> dict[str, str]:
    """Return the labels of the job and its pods, by which the vendor's scheduler knows the chip."""
    return dict(ACCELERATORS[asked.chip].labels)


def _build_container(asked: Kubernetes, command: list[str], name: str, mounts: dict[str, PodVolume]) -> dict[str, Any]:
    env: list[dict[str, Any]] = [
        {"name": key, "value": escape_expansion(value)} for key, value in parse_pairs(asked.env)
    ]
    for key, place in parse_pairs(asked.secret_env):
        secret, _, inner = place.partition("/")
        env.append({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": inner}}})
    return {
        "name": name,
        "image": asked.image,
        "imagePullPolicy": asked.pull_policy,
        "command": [escape_expansion(word) for word in _build_command(asked, command)],
        **({"workingDir": asked.workdir} if asked.workdir else {}),
        **({"env": env} if env else {}),
        **({"envFrom": [{"secretRef": {"name": one}} for one in asked.env_from]} if asked.env_from else {}),
        "ports": [{"name": "pytorchjob-port", "containerPort": asked.master_port}],
        "resources": _build_resources(asked),
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if asked.rdma else {}),
        "volumeMounts": [
            {"name": key, "mountPath": one.path, **({"readOnly": True} if one.read_only else {})}
            for key, one in mounts.items()
        ],
    }


def escape_expansion(text: str) -> str:
    """Return a text of which Kubernetes expands nothing: it takes `$(NAME)` in commands and variables for a variable.

    Source: kubernetes.io, "Define Dependent Environment Variables": `$$(NAME)` stays `$(NAME)`.
    """
    return text.replace("$(", "$$(")


def _build_command(asked: Kubernetes, command: list[str]) -> list[str]:
    launch = ["anabatic", "launch", f"--nproc={asked.nproc}", f"--max-restarts={asked.max_restarts}"]
    if asked.max_pods > 1:
        launch += [f"--nnodes={asked.nnodes}", f"--master-port={asked.master_port}", f"--job-id={asked.name}"]
    words = [*launch, "--", *command, "-c", f"{RECIPE_FOLDER}/{RECIPE_FILE}"]
    if not asked.setup:
        return words
    return ["bash", "-c", "\n".join([*asked.setup, f"exec {shlex.join(words)}"])]


def _build_resources(asked: Kubernetes) -> dict[str, Any]:
    name = asked.resource or ACCELERATORS[asked.chip].resource
    wanted = {
        **({name: str(asked.nproc)} if name else {}),
        **({asked.rdma: "1"} if asked.rdma else {}),
        **({"cpu": asked.cpu} if asked.cpu else {}),
        **({"memory": asked.memory} if asked.memory else {}),
    }
    return {"requests": dict(wanted), "limits": dict(wanted)} if wanted else {}


def _build_volumes(asked: Kubernetes) -> dict[str, PodVolume]:
    found = {
        _RECIPE_VOLUME: PodVolume({"configMap": {"name": f"{asked.name}-recipe"}}, RECIPE_FOLDER, True),
        _SHM_VOLUME: PodVolume({"emptyDir": {"medium": "Memory", "sizeLimit": asked.shm}}, "/dev/shm"),
    }
    if asked.driver_mounts:
        for path, kind in ACCELERATORS[asked.chip].mounts:
            name = re.sub(r"[^a-z0-9]+", "-", path.lower().rpartition("/")[2])
            found[name] = PodVolume({"hostPath": {"path": path, "type": kind}}, path, True)
    found.update({f"volume-{number}": parse_volume(text) for number, text in enumerate(asked.volume)})
    return found
