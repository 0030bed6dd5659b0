"""Options of `anabatic launch k8s`: what a cluster is asked for. Names and quantities are checked in the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import require_setting
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.formatting import parse_whole

Pair = tuple[str, str]


@dataclass(kw_only=True)
class Kubernetes:
    """The job on a cluster, its pods, and what is mounted into them."""

    image: str = ""
    """Image with anabatic, torch and, for NPUs, CANN and torch_npu."""
    kind: Literal["volcano", "pytorchjob", "ascendjob", "trainjob", "jobset"] = "volcano"
    """volcano: a Volcano Job; pytorchjob, trainjob: Kubeflow v1 and v2; ascendjob: MindCluster; jobset: a JobSet."""
    name: str = "anabatic"
    """Name of the job: small letters, digits and dashes."""
    namespace: str = ""
    """Namespace; default: kubectl's."""
    nnodes: str = "1"
    """Pods, one on each machine: 2, or 1:4 for a job that begins with one and takes up to four."""
    nproc: int | None = None
    """Processes in each, one per device; default: the command's device.nproc."""
    chip: Literal["910b", "a3", "910a", "310p", "950", "cce", "nvidia", "none"] = "910b"
    """What a pod asks for: MindCluster's names, cce for Huawei Cloud, nvidia, or none."""
    resource: str = ""
    """Name of the devices where the cluster has another one: huawei.com/Ascend910B3"""
    cpu: str = ""
    """Cores of a pod."""
    memory: str = ""
    """Memory of a pod: 512Gi"""
    shm: str = "64Gi"
    """Size of /dev/shm, which counts as memory of the pod."""
    rdma: str = ""
    """Resource of RDMA devices to ask for, where the plugin for them runs: rdma/hca_shared_devices_a"""
    host_network: bool = False
    """Use the network of the machines instead of that of the pods."""
    driver_mounts: bool = True
    """Mount driver, dcmi, npu-smi and hccn.conf of the machine; not needed where the container runtime does."""
    volume: list[str] = field(default_factory=list)
    """pvc:NAME:/where, host:/path:/where or nfs:SERVER:/path:/where, `:ro` at the end to read only."""
    env: list[str] = field(default_factory=list)
    """Variables: HF_HOME=/data/hf"""
    secret_env: list[str] = field(default_factory=list)
    """Variables from secrets: WANDB_API_KEY=SECRET/KEY"""
    env_from: list[str] = field(default_factory=list)
    """Secrets all of whose keys become variables."""
    node_selector: list[str] = field(default_factory=list)
    """Labels of the machines: accelerator-type=module-910b-8"""
    label: list[str] = field(default_factory=list)
    """Labels of the job and its pods: tor-affinity=normal-schema"""
    annotation: list[str] = field(default_factory=list)
    """Annotations of the job and its pods: sp-block=16"""
    anti_affinity: bool = True
    """Put each pod on another machine (pod anti-affinity)."""
    visible_devices: bool = True
    """Under Volcano, take ASCEND_VISIBLE_DEVICES from the annotation that MindCluster's plugin writes."""
    fault_scheduling: Literal["grace", "force", "off"] | None = None
    """How MindCluster moves a job away from a fault; default: grace for ascendjob, else no label."""
    fault_retry_times: int | None = None
    """How often MindCluster restarts failed pods, 0 to 100; default: attempts for ascendjob, else no label."""
    pod_rescheduling: bool = False
    """MindCluster replaces the faulty pod alone instead of all pods."""
    ranktable: bool = False
    """Wait for MindCluster's rank table, and give it to HCCL (RANK_TABLE_FILE)."""
    pull_secret: list[str] = field(default_factory=list)
    """Secrets with which the image is pulled."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When the image is pulled."""
    workdir: str = ""
    """Folder in the container in which the command runs; a relative `out` begins there."""
    queue: str = ""
    """Queue of Volcano; of Kueue for trainjob and jobset."""
    priority: str = ""
    """Priority class."""
    master_port: int = 29500
    """Port on which the pods meet."""
    grace: int = 600
    """Seconds that a pod gets to save when it is asked to leave; Kubernetes gives 30 unless told."""
    attempts: int = 10
    """How often the cluster starts the job again, after a pre-emption too."""
    max_restarts: int = 3
    """How often the launcher in a pod starts processes that fail again."""
    setup: list[str] = field(default_factory=list)
    """Lines of the shell before the command: `source /usr/local/Ascend/ascend-toolkit/set_env.sh`"""
    submit: bool = False
    """Hand the manifests to kubectl, once the API server has said that it takes them."""
    context: str = ""
    """Context of the kubeconfig to submit to."""

    def __post_init__(self) -> None:
        require_setting(bool(self.image), "which image?", "give --image REGISTRY/NAME:TAG, one that has anabatic")
        parts = self.nnodes.split(":")
        require_setting(
            len(parts) <= 2
            and all(parse_whole(part, 4) is not None for part in parts)
            and 1 <= self.min_pods <= self.max_pods,
            f"--nnodes is {self.nnodes}",
            "use 2, or 1:4 for a job that continues with fewer",
        )
        LaunchSettings(
            nproc=1 if self.nproc is None else self.nproc,
            max_restarts=self.max_restarts,
            master_port=self.master_port,
        )
        for name, example in _PAIRS.items():
            for text in getattr(self, name):
                require_setting(
                    "=" in text, f'--{name.replace("_", "-")} has "{text}", not KEY=VALUE', f"for example {example}"
                )
        require_setting(
            self.fault_retry_times is None or 0 <= self.fault_retry_times <= 100,
            f"--fault-retry-times is {self.fault_retry_times}, not within 0 and 100",
            "MindCluster reads 0 (never) to 100",
        )
        for text in self.secret_env:
            require_setting(
                "/" in text, f'--secret-env has "{text}", not KEY=SECRET/KEY', f"for example {_PAIRS['secret_env']}"
            )

    @property
    def min_pods(self) -> int:
        """Pods with which the job begins and continues."""
        return int(self.nnodes.split(":")[0])

    @property
    def max_pods(self) -> int:
        """Pods that may take part."""
        return int(self.nnodes.split(":")[-1])


_PAIRS = {
    "env": "--env HF_HOME=/data/hf",
    "secret_env": "--secret-env WANDB_API_KEY=trackers/wandb",
    "node_selector": "--node-selector accelerator-type=module-910b-8",
    "label": "--label tor-affinity=normal-schema",
    "annotation": "--annotation sp-block=16",
}


def parse_pairs(texts: list[str]) -> list[Pair]:
    """`["A=1"]` -> `[("A", "1")]`."""
    return [(key, value) for key, _, value in (text.partition("=") for text in texts)]
