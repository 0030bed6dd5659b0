"""Map the environment variables of schedulers to the variables of `anabatic launch`.

Sources: Volcano's plugins env and svc (volcano-sh/volcano, pkg/controllers/job/plugins): VC_TASK_INDEX, VC_TASK_HOSTS
and _NUM by the names of tasks; ModelArts: MA_NUM_HOSTS, MA_NUM_GPUS besides Volcano's; Kubeflow's training operator
(kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go) and Volcano's plugin pytorch: MASTER_ADDR, RANK and
WORLD_SIZE, which count pods, and from v1.7 on PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE; MindCluster's operator
(mind-cluster, component/ascend-operator/pkg/controllers/v1/env.go): RANK counts pods, WORLD_SIZE and LOCAL_WORLD_SIZE
processes, LOCAL_RANK is a list, REPLICA_TYPE is Master or Worker; Kubeflow's trainer and
torch.distributed.run: PET_*; Kubernetes' indexed Job: JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping

from anabatic.core import log
from anabatic.core.formatting import parse_whole

LAUNCH_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
"""Variables that stand in for options of `anabatic launch`."""
_VOLCANO_HOSTS = re.compile(r"VC_([A-Z0-9_]+)_HOSTS")
_MAX_DIGITS = 6
_POLL_SECONDS = 1.0
_REMINDER_SECONDS = 15.0


def read_launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the known LAUNCH_VARIABLES: the user's values, else those of a scheduler."""
    variables = {name: environ[name] for name in LAUNCH_VARIABLES if environ.get(name)}
    if variables.get("NNODES"):  # the user's values are complete, and a scheduler's may belong to another job
        return variables
    for read_scheduler in (
        _from_torch_elastic,
        _from_ascend_job,
        _from_volcano,
        _from_pytorch_job,
        _from_indexed_job,
    ):
        for name, value in read_scheduler(environ).items():
            variables.setdefault(name, value)
    return variables


def _from_torch_elastic(environ: Mapping[str, str]) -> dict[str, str]:
    variables = {name: environ.get(f"PET_{name}", "") for name in LAUNCH_VARIABLES}
    host, _, port = environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    variables = {
        **variables,
        "MASTER_ADDR": variables["MASTER_ADDR"] or host,
        "MASTER_PORT": variables["MASTER_PORT"] or port,
    }
    if parse_whole(variables["NPROC_PER_NODE"]) is None:  # auto, cpu and gpu leave the number to the launcher
        variables["NPROC_PER_NODE"] = ""
    return {name: value for name, value in variables.items() if value}


def _from_ascend_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Read an AscendJob's variables; where they count anything else than pods of one size, they are not its own."""
    numbers = [environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    are_numbers = all(parse_whole(text, _MAX_DIGITS) is not None for text in numbers)
    if environ.get("REPLICA_TYPE") not in ("Master", "Worker") or not are_numbers:
        return {}
    rank, world_size, local_size = map(int, numbers)
    local_ranks = ",".join(map(str, range(local_size)))
    if not local_size or environ.get("LOCAL_RANK") != local_ranks or world_size % local_size:
        return {}
    nnodes = world_size // local_size
    return {"NNODES": str(nnodes), "NODE_RANK": str(rank), "NPROC_PER_NODE": str(local_size)} if rank < nnodes else {}


def _from_volcano(environ: Mapping[str, str]) -> dict[str, str]:
    """Read Volcano's variables: node ranks count through the hosts of all tasks, those of a master first."""
    if parse_whole(environ.get("VC_TASK_INDEX")) is None:
        return {}
    tasks = {match[1]: value.split(",") for name, value in environ.items() if (match := _VOLCANO_HOSTS.fullmatch(name))}
    ordered_tasks = sorted(tasks, key=lambda name: (name != "MASTER", name))
    hosts = [host for name in ordered_tasks for host in tasks[name] if host]
    hostname = environ.get("HOSTNAME", "")
    own_indices = [index for index, host in enumerate(hosts) if host.partition(".")[0] == hostname]
    variables = {
        "NNODES": environ.get("MA_NUM_HOSTS") or str(len(hosts) or ""),
        "NODE_RANK": str(own_indices[0]) if own_indices else environ["VC_TASK_INDEX"],
        "MASTER_ADDR": hosts[0] if hosts else "",
        "NPROC_PER_NODE": environ.get("MA_NUM_GPUS", ""),
    }
    return {name: value for name, value in variables.items() if value}


def _from_pytorch_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Read a PyTorchJob before v1.7, or Volcano's plugin pytorch: RANK and WORLD_SIZE count pods.

    Later operators count processes in WORLD_SIZE, and set PET_NNODES.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or "LOCAL_RANK" in environ or not environ.get("MASTER_ADDR"):
        return {}
    variables = {"NNODES": environ.get("WORLD_SIZE", ""), "NODE_RANK": environ.get("RANK", "")}
    return {name: value for name, value in variables.items() if parse_whole(value) is not None}


def _from_indexed_job(environ: Mapping[str, str]) -> dict[str, str]:
    index = environ.get("JOB_COMPLETION_INDEX", "")
    return {"NODE_RANK": index} if parse_whole(index) is not None else {}


def await_host_name(name: str, seconds: float, resolve: Callable[[str], object] = socket.gethostbyname) -> None:
    """Wait, with log lines, until a host name has an address, or for `seconds`: a pod has none before it runs.

    Args:
        resolve: returns the address of a name, or raises socket.gaierror.
    """
    started_at = reminded_at = time.monotonic()
    while True:
        try:
            resolve(name)
            return
        except socket.gaierror:
            now = time.monotonic()
            if now - started_at > seconds:
                return  # the next step reports that the name has no address
            if now - reminded_at > _REMINDER_SECONDS or reminded_at == started_at:
                reminded_at = now
                log.info(f"waiting for {name} to get an address")
            time.sleep(min(_POLL_SECONDS, seconds))
