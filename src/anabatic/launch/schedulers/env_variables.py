"""What schedulers tell a machine of a job about its place, in the words of `anabatic launch`.

Sources: Volcano's plugins env and svc (volcano-sh/volcano, pkg/controllers/job/plugins): VC_TASK_INDEX, VC_TASK_HOSTS
and _NUM by the names of tasks; ModelArts: MA_NUM_HOSTS, MA_NUM_GPUS beside Volcano's; Kubeflow's training operator
(kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go) and Volcano's plugin pytorch: MASTER_ADDR, RANK and
WORLD_SIZE, which count pods, and from v1.7 on PET_NODE_RANK, PET_NNODES, PET_NPROC_PER_NODE; Kubeflow's trainer and
torch.distributed.run: PET_*; Kubernetes' indexed Job: JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping

from anabatic.core import log

LAUNCH_VARIABLES = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")
"""Variables that stand in for options of `anabatic launch`."""
_VOLCANO_HOSTS = re.compile(r"VC_([A-Z0-9_]+)_HOSTS")
_POLL_SECONDS = 1.0
_REMINDER_SECONDS = 15.0


def read_launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of NAMES that are known: the user's own, else what a scheduler has told."""
    found = {name: environ[name] for name in LAUNCH_VARIABLES if environ.get(name)}
    if found.get("NNODES"):  # the user has said it all, and a scheduler's numbers may be those of something else
        return found
    for told in (_from_torch_elastic, _from_volcano, _from_pytorch_job, _from_indexed_job):
        for name, value in told(environ).items():
            found.setdefault(name, value)
    return found


def _from_torch_elastic(environ: Mapping[str, str]) -> dict[str, str]:
    told = {name: environ.get(f"PET_{name}", "") for name in LAUNCH_VARIABLES}
    host, _, port = environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")
    told = {**told, "MASTER_ADDR": told["MASTER_ADDR"] or host, "MASTER_PORT": told["MASTER_PORT"] or port}
    if not told["NPROC_PER_NODE"].isdecimal():  # auto, cpu and gpu leave it to us
        told["NPROC_PER_NODE"] = ""
    return {name: value for name, value in told.items() if value}


def _from_volcano(environ: Mapping[str, str]) -> dict[str, str]:
    """The hosts of all tasks, a master's first; several tasks count on where one ends."""
    if not environ.get("VC_TASK_INDEX", "").isdecimal():
        return {}
    tasks = {found[1]: value.split(",") for name, value in environ.items() if (found := _VOLCANO_HOSTS.fullmatch(name))}
    order = sorted(tasks, key=lambda name: (name != "MASTER", name))
    hosts = [host for name in order for host in tasks[name] if host]
    own = environ.get("HOSTNAME", "")
    here = [number for number, host in enumerate(hosts) if host.partition(".")[0] == own]
    told = {
        "NNODES": environ.get("MA_NUM_HOSTS") or str(len(hosts) or ""),
        "NODE_RANK": str(here[0]) if here else environ["VC_TASK_INDEX"],
        "MASTER_ADDR": hosts[0] if hosts else "",
        "NPROC_PER_NODE": environ.get("MA_NUM_GPUS", ""),
    }
    return {name: value for name, value in told.items() if value}


def _from_pytorch_job(environ: Mapping[str, str]) -> dict[str, str]:
    """A PyTorchJob before v1.7, or Volcano's plugin pytorch: RANK and WORLD_SIZE are those of pods.

    Later operators count processes in WORLD_SIZE, and have told PET_NNODES.
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or "LOCAL_RANK" in environ or not environ.get("MASTER_ADDR"):
        return {}
    told = {"NNODES": environ.get("WORLD_SIZE", ""), "NODE_RANK": environ.get("RANK", "")}
    return {name: value for name, value in told.items() if value.isdecimal()}


def _from_indexed_job(environ: Mapping[str, str]) -> dict[str, str]:
    index = environ.get("JOB_COMPLETION_INDEX", "")
    return {"NODE_RANK": index} if index.isdecimal() else {}


def await_host_name(name: str, seconds: float, look: Callable[[str], object] = socket.gethostbyname) -> None:
    """Wait until a machine's name has an address: a pod's has none before it runs. Says so; returns when time is up.

    Args:
        look: finds the address of a name, or raises socket.gaierror.
    """
    began = asked = time.monotonic()
    while True:
        try:
            look(name)
            return
        except socket.gaierror:
            now = time.monotonic()
            if now - began > seconds:
                return  # what follows tells that the name has no address
            if now - asked > _REMINDER_SECONDS or asked == began:
                asked = now
                log.info(f"waiting for {name} to get an address")
            time.sleep(min(_POLL_SECONDS, seconds))
