"""The pod that runs one machine's share of a job: image, devices, volumes, variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from anabatic.core.errors import ConfigError
from anabatic.launch.accelerators import ACCELERATORS, Accelerator

RECIPE_FOLDER = "/etc/anabatic"
RECIPE_FILE = "job.yaml"
_SHM = "shm"
_RECIPE = "recipe"


@dataclass(frozen=True)
class Volume:
    """Something mounted into the pod.

    Attributes:
        source: the volume's fields as Kubernetes has them.
        path: where in the container.
    """

    source: dict[str, Any]
    path: str
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a cluster is asked for, by a user.

    Attributes:
        name: of the job, its services and pods.
        nodes: pods, one for each machine.
        least: pods with which the job begins and goes on.
        nproc: processes, and devices, in each.
        chip: a row of `accelerators.ACCELERATORS`.
        resource: another name of the devices; empty: the chip's.
        env: variables; `secrets` are (variable, secret, key).
        env_from: secrets all of whose keys become variables.
        shm: size of /dev/shm, which data loaders and collectives on one machine use; 64 MiB unless set.
        rdma: a resource of the RDMA device plugin, one of which is asked for; empty: none.
        host_network: the pods use their machines' network, for clusters whose pod network is slow.
        grace: seconds that a pod gets to save after SIGTERM; Kubernetes gives 30 unless told.
        attempts: how often the operator starts the job again.
        restarts: how often the launcher in a pod starts its processes again.
        setup: lines of the shell before the command.
    """

    name: str
    image: str
    nodes: int = 1
    least: int = 1
    nproc: int = 8
    chip: str = "910b"
    resource: str = ""
    namespace: str = ""
    cpu: str = ""
    memory: str = ""
    shm: str = "64Gi"
    rdma: str = ""
    host_network: bool = False
    driver_mounts: bool = True
    volumes: tuple[Volume, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str, str], ...] = ()
    env_from: tuple[str, ...] = ()
    selector: tuple[tuple[str, str], ...] = ()
    pull_secrets: tuple[str, ...] = ()
    pull_policy: str = "IfNotPresent"
    workdir: str = ""
    queue: str = ""
    priority: str = ""
    port: int = 29500
    grace: int = 600
    attempts: int = 10
    restarts: int = 3
    setup: tuple[str, ...] = field(default_factory=tuple)

    @property
    def accelerator(self) -> Accelerator:
        """The chip's row."""
        return ACCELERATORS[self.chip]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the job and its pods."""
        return dict(self.accelerator.labels)


def volume(text: str) -> Volume:
    """Return the volume that `pvc:NAME:/data[:ro]`, `host:/data:/data[:ro]` or `nfs:SERVER:/share:/data[:ro]` names.

    Raises:
        ConfigError: it is none of them.
    """
    kind, _, rest = text.partition(":")
    rest, read_only = (rest.removesuffix(":ro"), True) if rest.endswith(":ro") else (rest, False)
    found = re.fullmatch(_PATTERNS.get(kind, r"(?!)"), rest)
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
    return Volume(source, found["where"], read_only)


_PATTERNS = {
    "pvc": r"(?P<name>[^:]+):(?P<where>/[^:]*)",
    "host": r"(?P<name>/[^:]*):(?P<where>/[^:]*)",
    "nfs": r"(?P<server>[^:/]+|\[[^\]]+\]):(?P<name>/[^:]*):(?P<where>/[^:]*)",
}


def template(order: Order, command: list[str], container: str) -> dict[str, Any]:
    """Return the template of the pods.

    Args:
        command: a training command whose recipe lies in RECIPE_FOLDER.
        container: its name; operators look for theirs.
    """
    mounts = _mounts(order)
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": order.grace,
        **({"nodeSelector": dict(order.selector)} if order.selector else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if order.host_network else {}),
        **({"imagePullSecrets": [{"name": name} for name in order.pull_secrets]} if order.pull_secrets else {}),
        "containers": [_container(order, command, container, mounts)],
        "volumes": [{"name": name, **one.source} for name, one in mounts.items()],
    }
    return {**({"metadata": {"labels": order.labels}} if order.labels else {}), "spec": spec}


def _container(order: Order, command: list[str], name: str, mounts: dict[str, Volume]) -> dict[str, Any]:
    env: list[dict[str, Any]] = [{"name": key, "value": literal(value)} for key, value in order.env]
    env += [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": inner}}}
        for key, secret, inner in order.secrets
    ]
    return {
        "name": name,
        "image": order.image,
        "imagePullPolicy": order.pull_policy,
        "command": [literal(word) for word in _words(order, command)],
        **({"workingDir": order.workdir} if order.workdir else {}),
        **({"env": env} if env else {}),
        **({"envFrom": [{"secretRef": {"name": one}} for one in order.env_from]} if order.env_from else {}),
        "ports": [{"name": "pytorchjob-port", "containerPort": order.port}],
        "resources": _resources(order),
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if order.rdma else {}),
        "volumeMounts": [
            {"name": key, "mountPath": one.path, **({"readOnly": True} if one.read_only else {})}
            for key, one in mounts.items()
        ],
    }


def literal(text: str) -> str:
    """Return a text of which Kubernetes expands nothing: it takes `$(NAME)` in commands and variables for a variable.

    Source: kubernetes.io, "Define Dependent Environment Variables": `$$(NAME)` stays `$(NAME)`.
    """
    return text.replace("$(", "$$(")


def _words(order: Order, command: list[str]) -> list[str]:
    launch = ["anabatic", "launch", f"--nproc={order.nproc}", f"--max-restarts={order.restarts}"]
    if order.nodes > 1:
        machines = str(order.nodes) if order.least == order.nodes else f"{order.least}:{order.nodes}"
        launch += [f"--nnodes={machines}", f"--master-port={order.port}", f"--job-id={order.name}"]
    words = [*launch, "--", *command, "-c", f"{RECIPE_FOLDER}/{RECIPE_FILE}"]
    if not order.setup:
        return words
    return ["bash", "-c", "\n".join([*order.setup, f"exec {shlex.join(words)}"])]


def _resources(order: Order) -> dict[str, Any]:
    name = order.resource or order.accelerator.resource
    asked = {
        **({name: str(order.nproc)} if name else {}),
        **({order.rdma: "1"} if order.rdma else {}),
        **({"cpu": order.cpu} if order.cpu else {}),
        **({"memory": order.memory} if order.memory else {}),
    }
    return {"requests": dict(asked), "limits": dict(asked)} if asked else {}


def _mounts(order: Order) -> dict[str, Volume]:
    found = {
        _RECIPE: Volume({"configMap": {"name": f"{order.name}-recipe"}}, RECIPE_FOLDER, True),
        _SHM: Volume({"emptyDir": {"medium": "Memory", "sizeLimit": order.shm}}, "/dev/shm"),
    }
    if order.driver_mounts:
        for path, kind in order.accelerator.mounts:
            name = re.sub(r"[^a-z0-9]+", "-", path.lower().rpartition("/")[2])
            found[name] = Volume({"hostPath": {"path": path, "type": kind}}, path, True)
    found.update({f"volume-{number}": one for number, one in enumerate(order.volumes)})
    return found
