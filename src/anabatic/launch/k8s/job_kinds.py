"""Build a job in the form of each operator: Volcano, Kubeflow v1 and v2, MindCluster, JobSet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabatic.config.sections.kubernetes import Kubernetes, parse_pairs
from anabatic.core import relaunch
from anabatic.core.errors import ConfigError
from anabatic.launch.k8s.pod_template import (
    ACCELERATORS,
    JOBSET_TASK,
    PodNames,
    build_pod_template,
    get_labels,
)

Manifest = dict[str, Any]
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label with the name of a LocalQueue (kueue, pkg/controller/constants/constants.go)."""

_RESTART_POLICIES = (
    {"exitCode": relaunch.EXIT_USER_ERROR, "action": "TerminateJob"},
    {"exitCode": relaunch.EXIT_PREEMPTED, "action": "RestartJob"},
    {"event": "PodEvicted", "action": "RestartJob"},
    {"event": "PodFailed", "action": "RestartJob"},
)
"""The first match applies (volcano, job_controller_util.go, applyPolicies), so exit codes come before events."""
_TRAINER_TASK = "node"
"""Name of the replicated job and of its container that Kubeflow's trainer changes (trainer, constants.go)."""


def build_volcano_job(settings: Kubernetes, command: list[str]) -> list[Manifest]:
    """Return a Volcano Job.

    The plugins `env` and `svc` give each pod its index and the host names of all pods. The pod's restartPolicy is
    Never: the policies of the job do not apply to a pod that the kubelet restarts. Where MindCluster restarts failed
    pods (`--fault-retry-times`), Volcano must not (mind-cluster, 06_configuring_the_job_yaml_file.md).
    """
    pod = build_pod_template(settings, command, JOB_KINDS["volcano"].pod_names)
    pod["spec"]["restartPolicy"] = "Never"
    policies = [dict(policy) for policy in _RESTART_POLICIES]
    if settings.fault_retry_times:
        policies = [policy for policy in policies if policy.get("event") != "PodFailed"]
    job: Manifest = {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": build_metadata(settings, _get_fault_labels(settings)),
        "spec": {
            "minAvailable": settings.min_pods,
            "schedulerName": "volcano",
            **({"queue": settings.queue} if settings.queue else {}),
            **({"priorityClassName": settings.priority} if settings.priority else {}),
            "maxRetry": settings.attempts,
            "plugins": {"env": [], "svc": []},
            "policies": policies,
            "tasks": [
                {"name": "worker", "replicas": settings.max_pods, "minAvailable": settings.min_pods, "template": pod}
            ],
        },
    }
    return [job]


def build_pytorch_job(settings: Kubernetes, command: list[str]) -> list[Manifest]:
    """Return a PyTorchJob of Kubeflow's training operator.

    `restartPolicy: ExitCode` treats 1 to 127 as final and retries after 128 to 255, a job that was asked to stop (143)
    or killed. The container must be named `pytorch`, its port `pytorchjob-port`.
    """
    names = dataclasses.replace(JOB_KINDS["pytorchjob"].pod_names, volcano=bool(settings.queue))
    pod = build_pod_template(settings, command, names)
    if settings.queue:  # the operator creates a pod group for Volcano only if the pods name its scheduler
        pod["spec"]["schedulerName"] = "volcano"
    if settings.priority:
        pod["spec"]["priorityClassName"] = settings.priority
    job: Manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": build_metadata(settings),
        "spec": {
            "nprocPerNode": str(settings.nproc),
            "runPolicy": {
                "backoffLimit": settings.attempts,
                "cleanPodPolicy": "None",
                "schedulingPolicy": _build_scheduling_policy(settings),
            },
            "pytorchReplicaSpecs": _build_replicas(settings, pod, "ExitCode"),
        },
    }
    return [job]


def build_ascend_job(settings: Kubernetes, command: list[str]) -> list[Manifest]:
    """Return an AscendJob of MindCluster's operator.

    The container must be named `ascend`, its port `ascendjob-port`, and the label `framework` tells the operator which
    variables the pods need: MASTER_ADDR, RANK and the like for pytorch. Volcano with MindCluster's plugin restarts the
    pods, so their own policy is Never, as in MindCluster's samples.
    """
    pod = build_pod_template(settings, command, JOB_KINDS["ascendjob"].pod_names)
    if settings.priority:
        pod["spec"]["priorityClassName"] = settings.priority
    job: Manifest = {
        "apiVersion": "mindxdl.gitee.com/v1",
        "kind": "AscendJob",
        "metadata": build_metadata(settings, {"framework": "pytorch", **_get_fault_labels(settings)}),
        "spec": {
            "schedulerName": "volcano",
            "runPolicy": {
                "backoffLimit": settings.attempts,
                "schedulingPolicy": _build_scheduling_policy(settings),
            },
            "successPolicy": "AllWorkers",
            "replicaSpecs": _build_replicas(settings, pod, "Never"),
        },
    }
    return [job]


def build_train_job(settings: Kubernetes, command: list[str]) -> list[Manifest]:
    """Return a TrainingRuntime with the pods, and a TrainJob of Kubeflow's trainer (v2) that uses it.

    A TrainJob by itself can change a few fields of the pods, under names that differ between the versions of the
    trainer; a runtime of our own holds all of them and works with each.
    """
    runtime: Manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {
            **build_metadata(settings),
            "labels": {**get_labels(settings), "trainer.kubeflow.org/framework": "torch"},
        },
        "spec": {
            "mlPolicy": {"numNodes": settings.max_pods, "torch": {}},
            "template": {
                "spec": _build_job_set_spec(settings, command, _TRAINER_TASK, JOB_KINDS["trainjob"].pod_names)
            },
        },
    }
    (task,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    task["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    job: Manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": build_metadata(settings, _get_kueue_labels(settings)),
        "spec": {
            "runtimeRef": {"name": settings.name, "kind": "TrainingRuntime"},
            "trainer": {"numNodes": settings.max_pods, "numProcPerNode": settings.nproc},
        },
    }
    return [runtime, job]


def build_job_set(settings: Kubernetes, command: list[str]) -> list[Manifest]:
    """Return a JobSet with one indexed Job, whose index is the node rank."""
    spec = _build_job_set_spec(settings, command, JOBSET_TASK, JOB_KINDS["jobset"].pod_names)
    spec["network"] = {"enableDNSHostnames": True}
    (task,) = spec["replicatedJobs"]
    task["replicas"] = 1
    task["template"]["spec"] = {
        "parallelism": settings.max_pods,
        "completions": settings.max_pods,
        **task["template"]["spec"],
    }
    job: Manifest = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": build_metadata(settings, _get_kueue_labels(settings)),
        "spec": spec,
    }
    return [job]


def _build_job_set_spec(settings: Kubernetes, command: list[str], task: str, names: PodNames) -> Manifest:
    """Return the spec: an error in the recipe ends the job, another failure starts all pods again.

    Sources: jobset v1alpha2, FailurePolicy: a Job that its podFailurePolicy failed has the reason PodFailurePolicy;
    kubernetes.io, Pod failure policy: it needs `restartPolicy: Never`.
    """
    pod = build_pod_template(settings, command, names)
    pod["spec"]["restartPolicy"] = "Never"
    if settings.priority:
        pod["spec"]["priorityClassName"] = settings.priority
    user_error = {
        "action": "FailJob",
        "onExitCodes": {"containerName": names.container, "operator": "In", "values": [relaunch.EXIT_USER_ERROR]},
    }
    job = {
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [user_error]},
        "template": pod,
    }
    return {
        "failurePolicy": {
            "maxRestarts": settings.attempts,
            "rules": [{"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
        },
        "replicatedJobs": [{"name": task, "template": {"spec": job}}],
    }


def build_metadata(settings: Kubernetes, labels: dict[str, str] | None = None) -> Manifest:
    """Return the metadata of a job: name, and labels and annotations of the settings.

    Args:
        labels: further labels of the job itself; a label of the settings wins.
    """
    all_labels = {**(labels or {}), **get_labels(settings)}
    annotations = dict(parse_pairs(settings.annotation))
    return {
        "name": settings.name,
        **({"namespace": settings.namespace} if settings.namespace else {}),
        **({"labels": all_labels} if all_labels else {}),
        **({"annotations": annotations} if annotations else {}),
    }


def _get_kueue_labels(settings: Kubernetes) -> dict[str, str]:
    return {_QUEUE_LABEL: settings.queue} if settings.queue else {}


def _get_fault_labels(settings: Kubernetes) -> dict[str, str]:
    """Return MindCluster's labels; an AscendJob without them ends with its first fault."""
    own = settings.kind == "ascendjob"
    scheduling = settings.fault_scheduling or ("grace" if own else None)
    times = settings.fault_retry_times
    if times is None and own:
        times = min(settings.attempts, 100)
    return {
        **({"fault-scheduling": scheduling} if scheduling else {}),
        **({} if times is None else {"fault-retry-times": str(times)}),
        **({"pod-rescheduling": "on"} if settings.pod_rescheduling else {}),
    }


def _build_scheduling_policy(settings: Kubernetes) -> Manifest:
    return {
        "minAvailable": settings.min_pods,
        **({"queue": settings.queue} if settings.queue else {}),
        **({"priorityClass": settings.priority} if settings.priority else {}),
    }


def _build_replicas(settings: Kubernetes, pod: Manifest, restart_policy: str) -> Manifest:
    replicas = {"Master": {"replicas": 1, "restartPolicy": restart_policy, "template": pod}}
    if settings.max_pods > 1:
        replicas["Worker"] = {"replicas": settings.max_pods - 1, "restartPolicy": restart_policy, "template": pod}
    return replicas


@dataclass(frozen=True)
class JobKind:
    """One value of `--kind`.

    Attributes:
        build: returns the manifests from the settings and the training command.
        pod_names: what the operator expects of the pods.
        elastic: a job may begin with fewer pods than take part (`--nnodes 1:4`).
        mindcluster: MindCluster's scheduler reads the job's labels, and its operator writes a rank table.
    """

    build: Callable[[Kubernetes, list[str]], list[Manifest]]
    pod_names: PodNames
    elastic: bool = False
    mindcluster: bool = False


_JOB_SET_LABEL = "jobset.sigs.k8s.io/jobset-name"
JOB_KINDS = {
    "volcano": JobKind(
        build_volcano_job, PodNames("anabatic", "master", "volcano.sh/job-name", True), elastic=True, mindcluster=True
    ),
    "pytorchjob": JobKind(
        build_pytorch_job,
        PodNames("pytorch", "pytorchjob-port", "training.kubeflow.org/job-name", False),
        elastic=True,
    ),
    "ascendjob": JobKind(build_ascend_job, PodNames("ascend", "ascendjob-port", "job-name", True), mindcluster=True),
    "trainjob": JobKind(build_train_job, PodNames(_TRAINER_TASK, "", _JOB_SET_LABEL, False)),
    "jobset": JobKind(build_job_set, PodNames("anabatic", "master", _JOB_SET_LABEL, False)),
}
"""Value of `--kind` -> its builder and its limits."""


def check_kind(settings: Kubernetes) -> None:
    """Check that the operator of `--kind` can do what is asked for.

    Raises:
        ConfigError: an option needs another kind or another chip.
    """
    kind, chip = JOB_KINDS[settings.kind], ACCELERATORS[settings.chip]
    if settings.min_pods < settings.max_pods and not kind.elastic:
        kinds = ", ".join(name for name, row in JOB_KINDS.items() if row.elastic)
        raise ConfigError(
            f"--nnodes is {settings.nnodes}, but a job of --kind {settings.kind} has a fixed number of pods",
            f"use --nnodes {settings.max_pods}, or one of --kind {kinds}",
        )
    wanted = [
        option
        for option, is_given in (
            ("--fault-scheduling", settings.fault_scheduling is not None),
            ("--fault-retry-times", settings.fault_retry_times is not None),
            ("--pod-rescheduling", settings.pod_rescheduling),
            ("--ranktable", settings.ranktable),
            ("--kind ascendjob", settings.kind == "ascendjob"),
        )
        if is_given
    ]
    if wanted and not (kind.mindcluster and chip.mindcluster):
        chips = ", ".join(name for name, row in ACCELERATORS.items() if row.mindcluster)
        raise ConfigError(
            f"{' and '.join(wanted)} need MindCluster, not --kind {settings.kind} with --chip {settings.chip}",
            f"use --kind volcano or ascendjob, and one of --chip {chips}",
        )
    if settings.ranktable and settings.kind == "ascendjob" and not settings.namespace:
        raise ConfigError(
            "--ranktable of an AscendJob is a folder with the namespace in its name, and there is no --namespace",
            "give --namespace, `--namespace default` if there is no other",
        )
