"""`anabatic launch k8s`: the manifests of a job on Kubernetes, printed or submitted."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from anabatic.cli.launch_words import machines, positive, training_job, whole
from anabatic.config import load
from anabatic.core.errors import ConfigError
from anabatic.launch import accelerators, kubernetes, manifests, pod

_Word = Annotated[str, Parameter(negative=())]
_Words = Annotated[tuple[str, ...], Parameter(negative=(), consume_multiple=False)]
_Switch = Annotated[bool, Parameter(negative=())]


def k8s(
    *command: str,
    image: _Word = "",
    kind: _Word = "volcano",
    name: _Word = "anabatic",
    namespace: _Word = "",
    nnodes: Annotated[str, Parameter(name=("--nnodes", "--nodes"), negative=())] = "1",
    nproc: Annotated[str | None, Parameter(name=("--nproc", "--nproc-per-node", "--npus"), negative=())] = None,
    chip: _Word = accelerators.DEFAULT,
    resource: _Word = "",
    cpu: _Word = "",
    memory: _Word = "",
    shm: _Word = "64Gi",
    rdma: _Word = "",
    host_network: _Switch = False,
    no_driver_mounts: _Switch = False,
    volume: _Words = (),
    env: _Words = (),
    secret_env: _Words = (),
    env_from: _Words = (),
    node_selector: _Words = (),
    pull_secret: _Words = (),
    pull_policy: _Word = "IfNotPresent",
    workdir: _Word = "",
    queue: _Word = "",
    priority: _Word = "",
    master_port: _Word = "29500",
    grace: _Word = "600",
    attempts: _Word = "10",
    max_restarts: _Word = "3",
    setup: _Words = (),
    submit: _Switch = False,
    context: _Word = "",
) -> int:
    """Print the manifests of a job on Kubernetes that runs COMMAND, or submit them.

    The recipe is resolved here and travels along; its paths are those in the container.

    Parameters
    ----------
    command
        The command and its options, after `--`: sft -c recipe.yaml
    image
        Image with anabatic, torch and, for NPUs, CANN and torch_npu.
    kind
        volcano: a Volcano Job; pytorchjob: a PyTorchJob of Kubeflow.
    name
        Name of the job: small letters, digits and dashes.
    namespace
        Namespace; default: kubectl's.
    nnodes
        Pods, one on each machine: 2, or 1:4 for a job that begins with one and takes up to four.
    nproc
        Processes in each, one per device; default: the command's device.nproc.
    chip
        What a pod asks for: 910b, a3, 910a, 310p (MindCluster's names), cce (Huawei Cloud), nvidia, or none.
    resource
        Name of the devices where the cluster has another one: huawei.com/Ascend910B3
    cpu
        Cores of a pod.
    memory
        Memory of a pod: 512Gi
    shm
        Size of /dev/shm, which counts as memory of the pod.
    rdma
        Resource of RDMA devices to ask for, where the plugin for them runs: rdma/hca_shared_devices_a
    host_network
        Use the network of the machines instead of that of the pods.
    no_driver_mounts
        Do not mount the driver, dcmi, npu-smi and hccn.conf of the machine: the container runtime does.
    volume
        pvc:NAME:/where, host:/path:/where or nfs:SERVER:/path:/where, `:ro` at the end to read only; several times.
    env
        A variable, several times: HF_HOME=/data/hf
    secret_env
        A variable from a secret, several times: WANDB_API_KEY=SECRET/KEY
    env_from
        A secret all of whose keys become variables, several times.
    node_selector
        A label of the machines, several times: accelerator-type=module-910b-8
    pull_secret
        A secret with which the image is pulled, several times.
    pull_policy
        Always, IfNotPresent or Never.
    workdir
        Folder in the container in which the command runs; `out` of a recipe is relative to it.
    queue
        Queue of Volcano.
    priority
        Priority class.
    master_port
        Port on which the pods meet.
    grace
        Seconds that a pod gets to save when it is told to leave.
    attempts
        How often the cluster starts the job again, after a pre-emption too.
    max_restarts
        How often the launcher in a pod starts processes that fail again.
    setup
        A line of the shell before the command, several times: "source /usr/local/Ascend/ascend-toolkit/set_env.sh"
    submit
        Hand the manifests to kubectl, once the API server has said that it takes them.
    context
        Context of the kubeconfig to submit to.
    """
    if not command:
        raise ConfigError("which command?", "for example: anabatic launch k8s --image IMAGE -- sft -c recipe.yaml")
    if not image:
        raise ConfigError(
            "which image?", "give --image REGISTRY/NAME:TAG, one that has anabatic and the data's readers"
        )
    _choice("kind", kind, tuple(manifests.KINDS))
    _choice("chip", chip, tuple(accelerators.ACCELERATORS))
    row, job = training_job(list(command))
    least, most = machines(nnodes)
    if not 1 <= least <= most:
        raise ConfigError(f"--nnodes is {nnodes}", "use 2, or 1:4 for a job that goes on with fewer")
    order = pod.Order(
        name=name,
        image=image,
        nodes=most,
        least=least,
        nproc=positive("nproc", nproc) if nproc else load.tree_of(job)["device"]["nproc"],
        chip=chip,
        resource=resource,
        namespace=namespace,
        cpu=cpu,
        memory=memory,
        shm=shm,
        rdma=rdma,
        host_network=host_network,
        driver_mounts=not no_driver_mounts,
        volumes=tuple(pod.volume(text) for text in volume),
        env=tuple(_pair("env", text, "=") for text in env),
        secrets=tuple((key, *_pair("secret-env", rest, "/")) for key, rest in _pairs("secret-env", secret_env)),
        env_from=env_from,
        selector=tuple(_pairs("node-selector", node_selector)),
        pull_secrets=pull_secret,
        pull_policy=pull_policy,
        workdir=workdir,
        queue=queue,
        priority=priority,
        port=positive("master-port", master_port),
        grace=positive("grace", grace),
        attempts=whole("attempts", attempts) or 0,
        restarts=whole("max-restarts", max_restarts) or 0,
        setup=setup,
    )
    text = manifests.write(kind, order, row.name.split(), load.dump(job))
    sys.stdout.write(f"{kubernetes.submit(text, context)}\n" if submit else text)
    return 0


def _choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ConfigError(f'--{name} is "{given}"', f"choose one of {', '.join(choices)}")


def _pairs(name: str, given: tuple[str, ...]) -> list[tuple[str, str]]:
    return [_pair(name, text, "=") for text in given]


def _pair(name: str, text: str, middle: str) -> tuple[str, str]:
    key, found, value = text.partition(middle)
    if not found:
        shape = "KEY=SECRET/KEY" if name == "secret-env" else "KEY=VALUE"
        raise ConfigError(f'--{name} is "{text}", not {shape}', f"for example --{name} {_EXAMPLES[name]}")
    return key, value


_EXAMPLES = {
    "env": "HF_HOME=/data/hf",
    "secret-env": "WANDB_API_KEY=trackers/wandb",
    "node-selector": "accelerator-type=module-910b-8",
}
