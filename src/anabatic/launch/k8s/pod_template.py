"""Build the pod template of a job, one pod per machine: image, device resources, driver files, volumes, variables."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

from anabatic.config.sections.kubernetes import Kubernetes, parse_pairs
from anabatic.core.errors import ConfigError
from anabatic.launch import job_secret

RECIPE_FOLDER = "/etc/anabatic"
RANK_TABLE_FILE = "/user/serverid/devindex/config/hccl.json"
"""Where MindCluster's operator puts the rank table in a pod (mind-cluster, hccl.json File Description)."""
RANK_TABLE_SECONDS = 600
"""How long a pod waits for it."""
RECIPE_FILE = "job.yaml"
_SHM_VOLUME = "shm"
_RECIPE_VOLUME = "recipe"
_RANK_TABLE_VOLUME = "ranktable"
"""The operator writes the file for an AscendJob only if a volume has this name (ascend-operator, consts.go)."""


@dataclass(frozen=True)
class PodVolume:
    """A volume mounted into the pod.

    Attributes:
        source: the volume's fields in Kubernetes.
        path: mount path in the container.
    """

    source: dict[str, Any]
    path: str
    read_only: bool = False


def parse_volume(text: str) -> PodVolume:
    """Parse `pvc:NAME:/data[:ro]`, `host:/data:/data[:ro]` or `nfs:SERVER:/share:/data[:ro]`.

    Raises:
        ConfigError: the text has none of these forms.
    """
    kind, _, rest = text.partition(":")
    rest, read_only = (rest.removesuffix(":ro"), True) if rest.endswith(":ro") else (rest, False)
    match = re.fullmatch(_VOLUME_PATTERNS.get(kind, r"(?!)"), rest)
    if match is None:
        raise ConfigError(
            f"--volume {text} is not understood",
            "use pvc:NAME:/where, host:/path:/where or nfs:SERVER:/path:/where, with :ro at the end to read only",
        )
    source = {
        "pvc": lambda: {"persistentVolumeClaim": {"claimName": match["name"]}},
        "host": lambda: {"hostPath": {"path": match["name"], "type": "Directory"}},
        "nfs": lambda: {"nfs": {"server": match["server"], "path": match["name"]}},
    }[kind]()
    return PodVolume(source, match["where"], read_only)


_VOLUME_PATTERNS = {
    "pvc": r"(?P<name>[^:]+):(?P<where>/[^:]*)",
    "host": r"(?P<name>/[^:]*):(?P<where>/[^:]*)",
    "nfs": r"(?P<server>[^:/]+|\[[^\]]+\]):(?P<name>/[^:]*):(?P<where>/[^:]*)",
}


@dataclass(frozen=True)
class PodNames:
    """What an operator expects of the pods of its jobs, and gives them.

    Attributes:
        container: name of the container.
        port: name of the port on which the pods meet; empty: the operator adds the port by itself.
        job_label: label with the job's name that the operator gives every pod.
        volcano: Volcano schedules the pods.
    """

    container: str
    port: str
    job_label: str
    volcano: bool


def build_pod_template(settings: Kubernetes, command: list[str], names: PodNames) -> dict[str, Any]:
    """Return the pod template.

    Args:
        command: a training command whose recipe is in RECIPE_FOLDER.
    """
    mounts = _build_volumes(settings)
    metadata = {
        **({"labels": labels} if (labels := get_labels(settings)) else {}),
        **({"annotations": dict(parse_pairs(settings.annotation))} if settings.annotation else {}),
    }
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": settings.grace,
        **({"nodeSelector": dict(parse_pairs(settings.node_selector))} if settings.node_selector else {}),
        **({"affinity": _build_anti_affinity(names.job_label, settings.name)} if _spreads(settings) else {}),
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if settings.host_network else {}),
        **({"imagePullSecrets": [{"name": name} for name in settings.pull_secret]} if settings.pull_secret else {}),
        "containers": [_build_container(settings, command, names, mounts)],
        "volumes": [{"name": name, **volume.source} for name, volume in mounts.items()],
    }
    return {**({"metadata": metadata} if metadata else {}), "spec": spec}


def get_labels(settings: Kubernetes) -> dict[str, str]:
    """Return the labels of the job and its pods: the chip for the vendor's scheduler, and those of `--label`."""
    return {**dict(ACCELERATORS[settings.chip].labels), **dict(parse_pairs(settings.label))}


def _spreads(settings: Kubernetes) -> bool:
    return settings.anti_affinity and settings.max_pods > 1


def _build_anti_affinity(label: str, name: str) -> dict[str, Any]:
    term = {
        "labelSelector": {"matchExpressions": [{"key": label, "operator": "In", "values": [name]}]},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _build_container(
    settings: Kubernetes, command: list[str], names: PodNames, mounts: dict[str, PodVolume]
) -> dict[str, Any]:
    env = _build_env(settings, names)
    ports = [{"name": names.port, "containerPort": settings.master_port}] if names.port else []
    return {
        "name": names.container,
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": [escape_expansion(argument) for argument in _build_command(settings, command)],
        **({"workingDir": settings.workdir} if settings.workdir else {}),
        **({"env": env} if env else {}),
        **({"envFrom": [{"secretRef": {"name": item}} for item in settings.env_from]} if settings.env_from else {}),
        **({"ports": ports} if ports else {}),
        "resources": _build_resources(settings),
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if settings.rdma else {}),
        "volumeMounts": [
            {"name": key, "mountPath": item.path, **({"readOnly": True} if item.read_only else {})}
            for key, item in mounts.items()
        ],
    }


def _build_env(settings: Kubernetes, names: PodNames) -> list[dict[str, Any]]:
    """Return the user's variables, and those for MindCluster and HCCL that the user has not set."""
    env: list[dict[str, Any]] = [
        {"name": key, "value": escape_expansion(value)} for key, value in parse_pairs(settings.env)
    ]
    for key, reference in parse_pairs(settings.secret_env):
        secret, _, secret_key = reference.partition("/")
        env.append({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": secret_key}}})
    accelerator = ACCELERATORS[settings.chip]
    own: dict[str, dict[str, Any]] = {}
    if settings.visible_devices and names.volcano and accelerator.mindcluster and not settings.resource:
        path = f"metadata.annotations['{accelerator.resource}']"
        own["ASCEND_VISIBLE_DEVICES"] = {"valueFrom": {"fieldRef": {"fieldPath": path}}}
    if settings.host_network and accelerator.is_npu:
        own["HCCL_IF_IP"] = {"valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
    if settings.ranktable:
        own["RANK_TABLE_FILE"] = {"value": RANK_TABLE_FILE}
    if needs_job_secret(settings):
        key_of_secret = {"name": job_secret_name(settings.name), "key": JOB_SECRET_KEY}
        own[job_secret.VARIABLE] = {"valueFrom": {"secretKeyRef": key_of_secret}}
    named = {entry["name"] for entry in env}
    return env + [{"name": name, **source} for name, source in own.items() if name not in named]


JOB_SECRET_KEY = "job-secret"


def job_secret_name(job: str) -> str:
    """Return the name of the Secret that the pods of a job share."""
    return f"{job}-secret"


def needs_job_secret(settings: Kubernetes) -> bool:
    """Return whether the pods rendezvous, and the user has named no Secret for it."""
    given = {key for key, _ in (*parse_pairs(settings.env), *parse_pairs(settings.secret_env))}
    return settings.max_pods > 1 and job_secret.VARIABLE not in given


def escape_expansion(text: str) -> str:
    """Escape a text so that Kubernetes expands nothing in it: in commands and variables it expands `$(NAME)`.

    Source: kubernetes.io, "Define Dependent Environment Variables": `$$(NAME)` stays `$(NAME)`.
    """
    return text.replace("$(", "$$(")


def _build_command(settings: Kubernetes, command: list[str]) -> list[str]:
    launch = ["anabatic", "launch", f"--nproc={settings.nproc}", f"--max-restarts={settings.max_restarts}"]
    if settings.max_pods > 1:
        launch += [f"--nnodes={settings.nnodes}", f"--master-port={settings.master_port}", f"--job-id={settings.name}"]
        if settings.kind == "jobset":
            launch.append(f"--master-addr={settings.name}-{JOBSET_TASK}-0-0.{settings.name}")
    arguments = [*launch, "--", *command, "-c", f"{RECIPE_FOLDER}/{RECIPE_FILE}"]
    setup = [*settings.setup, *([WAIT_FOR_RANK_TABLE] if settings.ranktable else [])]
    if not setup:
        return arguments
    return ["bash", "-c", "\n".join([*setup, f"exec {shlex.join(arguments)}"])]


JOBSET_TASK = "worker"
"""Name of the replicated job: pod 0 of a JobSet NAME has the host name NAME-worker-0-0.NAME (jobset, Network)."""
WAIT_FOR_RANK_TABLE = (
    f"timeout {RANK_TABLE_SECONDS} bash -c 'until grep -Eqs \"status.*completed\" {RANK_TABLE_FILE}; do sleep 1; done'"
    f' || {{ echo "error: {RANK_TABLE_FILE} was not completed within {RANK_TABLE_SECONDS} s" >&2; exit 1; }}'
)
"""HCCL reads the file once; until the operator knows all devices it says "status": "initializing"."""


def _build_resources(settings: Kubernetes) -> dict[str, Any]:
    name = settings.resource or ACCELERATORS[settings.chip].resource
    amounts = {
        **({name: str(settings.nproc)} if name else {}),
        **({settings.rdma: "1"} if settings.rdma else {}),
        **({"cpu": settings.cpu} if settings.cpu else {}),
        **({"memory": settings.memory} if settings.memory else {}),
    }
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def _build_volumes(settings: Kubernetes) -> dict[str, PodVolume]:
    volumes = {
        _RECIPE_VOLUME: PodVolume({"configMap": {"name": f"{settings.name}-recipe"}}, RECIPE_FOLDER, True),
        _SHM_VOLUME: PodVolume({"emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}}, "/dev/shm"),
    }
    if settings.ranktable:
        volumes[_RANK_TABLE_VOLUME] = PodVolume(_rank_table_source(settings), RANK_TABLE_FILE.rpartition("/")[0], True)
    if settings.driver_mounts:
        for path, kind in ACCELERATORS[settings.chip].mounts:
            name = re.sub(r"[^a-z0-9]+", "-", path.lower().rpartition("/")[2])
            volumes[name] = PodVolume({"hostPath": {"path": path, "type": kind}}, path, True)
    volumes.update({f"volume-{index}": parse_volume(text) for index, text in enumerate(settings.volume)})
    return volumes


def _rank_table_source(settings: Kubernetes) -> dict[str, Any]:
    """Return where the operator writes: a folder of the machines (AscendJob), or a ConfigMap (Volcano Job)."""
    if settings.kind == "ascendjob":
        return {"hostPath": {"path": f"/user/mindx-dl/ranktable/{settings.namespace}.{settings.name}"}}
    return {"configMap": {"name": rank_table_config_map(settings.name)}}


def rank_table_config_map(job: str) -> str:
    """Return the name of the ConfigMap that MindCluster's operator fills for a Volcano Job."""
    return f"rings-config-{job}"


_DRIVER_MOUNTS = (("/usr/local/Ascend/driver", "Directory"), ("/usr/local/dcmi", "Directory"),
           ("/usr/local/bin/npu-smi", "File"), ("/etc/ascend_install.info", "File"))  # fmt: skip
_HCCN_MOUNTS = (("/etc/hccn.conf", "File"),)
"""Addresses of the devices' network ports (RoCE), which HCCL reads for communication between machines."""


@dataclass(frozen=True)
class Accelerator:
    """One value of `--chip`.

    Attributes:
        resource: resource name of the device plugin; empty: no devices are requested.
        labels: labels of the job and its pods that tell the vendor's scheduler plugin the chip.
        mounts: (host path, kind) that a container needs, read-only.
    """

    resource: str
    labels: tuple[tuple[str, str], ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()

    @property
    def is_npu(self) -> bool:
        """True for Ascend chips."""
        return bool(self.mounts)

    @property
    def mindcluster(self) -> bool:
        """True where MindCluster schedules the chip, and writes the devices of a pod into its annotations."""
        return any(key == "ring-controller.atlas" for key, _ in self.labels)


ACCELERATORS: dict[str, Accelerator] = {
    "910b": Accelerator(
        "huawei.com/Ascend910", (("ring-controller.atlas", "ascend-910b"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "a3": Accelerator(
        "huawei.com/Ascend910", (("ring-controller.atlas", "ascend-910b"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "910a": Accelerator(
        "huawei.com/Ascend910", (("ring-controller.atlas", "ascend-910"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "310p": Accelerator("huawei.com/Ascend310P", (("ring-controller.atlas", "ascend-310P"),), _DRIVER_MOUNTS),
    "950": Accelerator("huawei.com/npu", (("ring-controller.atlas", "ascend-npu"),), _DRIVER_MOUNTS),
    "cce": Accelerator(
        "huawei.com/ascend-1980", (("ring-controller.cce", "ascend-1980"),), _DRIVER_MOUNTS + _HCCN_MOUNTS
    ),
    "nvidia": Accelerator("nvidia.com/gpu"),
    "none": Accelerator(""),
}
