"""Where a machine stands in a job, from the variables of each scheduler as it sets them."""

from __future__ import annotations

import socket

import pytest

from anabatic.launch.schedulers import env_variables

VOLCANO = {
    "VC_TASK_INDEX": "1",
    "VK_TASK_INDEX": "1",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_WORKER_NUM": "2",
    "HOSTNAME": "job-worker-1",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
TASKS = {
    **VOLCANO,
    "VC_TASK_INDEX": "0",
    "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
    "VC_MASTER_HOSTS": "job-master-0.job",
    "HOSTNAME": "job-worker-0",
}
MODELARTS = {
    "VC_TASK_INDEX": "3",
    "VC_WORKER_HOSTS": "a.b,c.d,e.f,g.h",
    "MA_NUM_HOSTS": "4",
    "MA_NUM_GPUS": "8",
    "HOSTNAME": "node-of-the-machine",
}
PODS = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
LATER = {
    **PODS,
    "WORLD_SIZE": "24",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}
ASCEND = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "REPLICA_TYPE": "Worker",
    "MASTER_ADDR": "10.96.0.7",
    "MASTER_PORT": "2222",
    "RANK": "1",
    "WORLD_SIZE": "16",
    "LOCAL_WORLD_SIZE": "8",
    "LOCAL_RANK": "0,1,2,3,4,5,6,7",
}
"""As MindCluster's operator sets them in the second pod of two with eight devices each."""
ELASTIC = {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:29400", "PET_NPROC_PER_NODE": "auto"}


def place(nodes: str = "", rank: str = "", address: str = "", port: str = "", nproc: str = "") -> dict[str, str]:
    """Return the answer without what is not known."""
    values = zip(env_variables.LAUNCH_VARIABLES, (nodes, rank, address, port, nproc), strict=True)
    return {name: value for name, value in values if value}


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (VOLCANO, place("2", "1", "job-worker-0.job")),
        (TASKS, place("3", "1", "job-master-0.job")),
        (MODELARTS, place("4", "3", "a.b", nproc="8")),
        (PODS, place("3", "2", "job-master-0", "23456")),
        (LATER, place("3", "2", "job-master-0", "23456", "8")),
        (ASCEND, place("2", "1", "10.96.0.7", "2222", "8")),
        (
            {**ASCEND, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"},
            place("2", "1", "10.96.0.7", "2222", "1"),
        ),
        ({**ASCEND, "RANK": "9", "LOCAL_RANK": "1"}, place(address="10.96.0.7", port="2222")),  # a process, not a pod
        ({**ASCEND, "LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": ""}, place(address="10.96.0.7", port="2222")),
        ({**ASCEND, "LOCAL_WORLD_SIZE": "9" * 30}, place(address="10.96.0.7", port="2222")),
        (ELASTIC, place("1:4", "", "job-worker-0", "29400")),
        ({"JOB_COMPLETION_INDEX": "5"}, place(rank="5")),
        ({"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "me", **VOLCANO}, place("2", "0", "me")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "me"}, place(address="me")),  # no pod: a worker's numbers
        ({**PODS, "LOCAL_RANK": "0"}, place(address="job-master-0", port="23456")),
        ({"VC_TASK_INDEX": "x"}, {}),
        ({"VC_TASK_INDEX": "0"}, place(rank="0")),
        ({}, {}),
    ],
)
def test_every_schedulers_words(told: dict[str, str], expected: dict[str, str]) -> None:
    assert env_variables.read_launch_variables(told) == expected


def test_a_name_without_an_address_is_waited_for() -> None:
    asked = []

    def look(name: str) -> str:
        asked.append(name)
        if len(asked) < 2:
            raise socket.gaierror("not yet")
        return "10.0.0.7"

    env_variables.await_host_name("job-worker-0.job", 60, look)
    assert asked == ["job-worker-0.job"] * 2


def test_a_name_that_never_comes_is_left_to_the_error_that_follows() -> None:
    asked = []

    def look(name: str) -> str:
        asked.append(name)
        raise socket.gaierror("never")

    env_variables.await_host_name("no-such-host.invalid", 0.01, look)
    assert set(asked) == {"no-such-host.invalid"}
