"""Each kind of job holds what its operator expects, and what MindCluster reads."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from anabatic.core.errors import ConfigError
from anabatic.launch.k8s import job_kinds, pod_template
from unit.launch.rendered import SECRET, all_made, find_pod, made


def test_what_mindcluster_reads() -> None:
    job = made(nnodes="2", host_network=True, fault_scheduling="grace", fault_retry_times=3, pod_rescheduling=True)
    assert job["metadata"]["labels"] == {
        "fault-scheduling": "grace",
        "fault-retry-times": "3",
        "pod-rescheduling": "on",
        "ring-controller.atlas": "ascend-910b",
    }
    assert [one["action"] for one in job["spec"]["policies"]] == ["TerminateJob", "RestartJob", "RestartJob"]
    assert "PodFailed" not in str(job["spec"]["policies"]), "MindCluster restarts failed pods, not Volcano as well"
    template = job["spec"]["tasks"][0]["template"]
    assert template["metadata"]["labels"] == {"ring-controller.atlas": "ascend-910b"}
    *fields, secret = template["spec"]["containers"][0]["env"]
    reference = {"name": "a-secret", "key": "job-secret"}
    assert secret == {"name": "ANABATIC_JOB_SECRET", "valueFrom": {"secretKeyRef": reference}}
    env = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in fields}
    assert env == {
        "ASCEND_VISIBLE_DEVICES": "metadata.annotations['huawei.com/Ascend910']",
        "HCCL_IF_IP": "status.hostIP",
    }
    (term,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchExpressions"] == [
        {"key": "volcano.sh/job-name", "operator": "In", "values": ["a"]}
    ]


def get_env_names(**given: Any) -> list[str]:
    """Return the names of the variables of a pod."""
    (container,) = find_pod(all_made(**given))["spec"]["containers"]
    return [one["name"] for one in container.get("env", [])]


def test_variables_of_mindcluster_only_where_they_hold() -> None:
    assert get_env_names() == ["ASCEND_VISIBLE_DEVICES"]
    assert get_env_names(visible_devices=False) == []
    assert get_env_names(resource="huawei.com/Ascend910B3") == [], "another plugin's device"
    assert get_env_names(chip="cce", host_network=True) == ["HCCL_IF_IP"]
    assert get_env_names(chip="nvidia", host_network=True) == []
    assert get_env_names(kind="pytorchjob") == [], "the default scheduler writes no annotation"
    assert get_env_names(kind="pytorchjob", queue="q") == ["ASCEND_VISIBLE_DEVICES"]
    assert get_env_names(kind="jobset") == get_env_names(kind="trainjob") == []
    assert get_env_names(env=["ASCEND_VISIBLE_DEVICES=0,1", "HCCL_IF_IP=10.0.0.1"], host_network=True) == [
        "ASCEND_VISIBLE_DEVICES",
        "HCCL_IF_IP",
    ], "the user's value stands alone"


def test_pods_of_one_machine_need_no_anti_affinity() -> None:
    for kind in job_kinds.JOB_KINDS:
        assert "affinity" not in find_pod(all_made(kind=kind))["spec"]
        assert "affinity" not in find_pod(all_made(kind=kind, nnodes="2", anti_affinity=False))["spec"]
        assert "affinity" in find_pod(all_made(kind=kind, nnodes="2"))["spec"]


def test_labels_and_annotations_are_on_the_job_and_its_pods() -> None:
    for kind in job_kinds.JOB_KINDS:
        documents = all_made(
            kind=kind, label=["team=nlp", "empty="], annotation=["example.com/note=a: 'b' \"c\"\n\u4f60"]
        )
        for one in (documents[-1], find_pod(documents)):
            assert {"team": "nlp", "empty": ""}.items() <= one["metadata"]["labels"].items()
            assert one["metadata"]["annotations"] == {"example.com/note": "a: 'b' \"c\"\n\u4f60"}


def test_an_ascendjob() -> None:
    job = made(kind="ascendjob", name="big", nnodes="3", queue="q", attempts=200)
    assert (job["apiVersion"], job["kind"]) == ("mindxdl.gitee.com/v1", "AscendJob")
    assert job["metadata"]["labels"] == {
        "framework": "pytorch",
        "fault-scheduling": "grace",
        "fault-retry-times": "100",
        "ring-controller.atlas": "ascend-910b",
    }
    spec = job["spec"]
    assert (spec["schedulerName"], spec["successPolicy"]) == ("volcano", "AllWorkers")
    assert spec["runPolicy"] == {"backoffLimit": 200, "schedulingPolicy": {"minAvailable": 3, "queue": "q"}}
    assert {name: (one["replicas"], one["restartPolicy"]) for name, one in spec["replicaSpecs"].items()} == {
        "Master": (1, "Never"),
        "Worker": (2, "Never"),
    }
    (container,) = spec["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert (container["name"], container["ports"]) == ("ascend", [{"name": "ascendjob-port", "containerPort": 29500}])
    labels = made(kind="ascendjob", fault_scheduling="off", fault_retry_times=0)["metadata"]["labels"]
    assert (labels["fault-scheduling"], labels["fault-retry-times"]) == ("off", "0")


def test_a_trainjob() -> None:
    secret, runtime, job = all_made(kind="trainjob", name="big", nnodes="2", queue="team-a", priority="high")
    assert (secret["kind"], secret["metadata"], secret["stringData"]) == (
        "Secret",
        {"name": "big-secret"},
        {"job-secret": SECRET},
    )
    assert (runtime["apiVersion"], runtime["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime")
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    (task,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert task["name"] == "node"
    assert task["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = task["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["name"], pod["priorityClassName"]) == ("node", "high")
    assert "ports" not in container, "the trainer adds its own"
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"] == {
        "runtimeRef": {"name": "big", "kind": "TrainingRuntime"},
        "trainer": {"numNodes": 2, "numProcPerNode": 8},
    }
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "kueue" not in str(runtime), "Kueue holds the job back, not its parts"


def test_a_jobset() -> None:
    job = made(kind="jobset", name="big", nnodes="2", queue="team-a", attempts=4)
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["spec"]["network"] == {"enableDNSHostnames": True}
    policy = job["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["rules"][0]["action"]) == (4, "FailJobSet")
    (task,) = job["spec"]["replicatedJobs"]
    inner = task["template"]["spec"]
    assert (inner["parallelism"], inner["completions"], inner["completionMode"]) == (2, 2, "Indexed")
    (rule,) = inner["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    assert inner["backoffLimit"] == 0 and inner["template"]["spec"]["restartPolicy"] == "Never"
    (container,) = inner["template"]["spec"]["containers"]
    assert "--master-addr=big-worker-0-0.big" in container["command"]
    assert "kueue" not in str(inner)
    assert "--master-addr" not in str(made(kind="jobset"))


def test_the_rank_table_of_a_volcano_job() -> None:
    table, job = all_made(name="big", ranktable=True)
    assert table["metadata"] == {"name": "rings-config-big", "labels": {"ring-controller.atlas": "ascend-910b"}}
    assert json.loads(table["data"]["hccl.json"]) == {"status": "initializing"}
    inner = find_pod([job])["spec"]
    assert {"name": "ranktable", "configMap": {"name": "rings-config-big"}} in inner["volumes"]
    (container,) = inner["containers"]
    assert {"name": "RANK_TABLE_FILE", "value": "/user/serverid/devindex/config/hccl.json"} in container["env"]
    mount = {"name": "ranktable", "mountPath": "/user/serverid/devindex/config", "readOnly": True}
    assert mount in container["volumeMounts"]


def test_the_rank_table_of_an_ascendjob() -> None:
    (job,) = all_made(kind="ascendjob", name="big", namespace="team", ranktable=True)
    source = {"name": "ranktable", "hostPath": {"path": "/user/mindx-dl/ranktable/team.big"}}
    assert source in find_pod([job])["spec"]["volumes"]


@pytest.mark.process
def test_a_pod_waits_for_the_whole_rank_table(tmp_path: Path) -> None:
    (container,) = find_pod(all_made(ranktable=True))["spec"]["containers"]
    shell, flag, script = container["command"]
    wait, run = script.replace("$$(", "$(").split("\n")
    assert run.startswith("exec anabatic launch")
    table = tmp_path / "hccl.json"
    wait = wait.replace(pod_template.RANK_TABLE_FILE, str(table)).replace("timeout 600", "timeout 2")
    table.write_text('{"status": "initializing"}')
    begun = subprocess.Popen([shell, flag, f"{wait}\necho begun"], stdout=subprocess.PIPE, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        begun.wait(0.5)
    table.write_text('{"status":"completed","server_list":[]}')
    assert begun.communicate(timeout=20)[0] == "begun\n"
    table.unlink()
    failed = subprocess.run([shell, flag, f"{wait}\necho begun"], capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "was not completed within 600 s" in failed.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "jobset", "nnodes": "1:4"}, "--nnodes is 1:4, but a job of --kind jobset has a fixed number"),
        ({"kind": "ascendjob", "nnodes": "1:4"}, "fixed number of pods"),
        ({"kind": "jobset", "ranktable": True}, "--ranktable need MindCluster"),
        ({"chip": "nvidia", "fault_scheduling": "force"}, "--fault-scheduling need MindCluster"),
        (
            {"chip": "cce", "pod_rescheduling": True, "fault_retry_times": 0},
            "--fault-retry-times and --pod-rescheduling",
        ),
        ({"kind": "ascendjob", "ranktable": True}, "there is no --namespace"),
        ({"fault_retry_times": 101}, "--fault-retry-times is 101"),
        ({"label": ["a"]}, '--label has "a", not KEY=VALUE'),
        ({"annotation": ["a"]}, '--annotation has "a", not KEY=VALUE'),
    ],
)
def test_what_an_operator_cannot_do(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        all_made(**given)
    assert caught.value.hint
