"""Manifests hold what was asked for, fit their schemas, and read back as they were meant, whatever was typed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from anabatic.cli import app
from anabatic.core.errors import ConfigError, Failure
from anabatic.launch.k8s import job_kinds, manifests, pod_template
from anabatic.launch.k8s import kubectl as kubectl_module
from anabatic.launch.k8s.pod_template import PodVolume
from unit.launch.rendered import RECIPE, SECRET, all_made, made, order

WORDS = ["anabatic", "launch", "--nproc=8", "--max-restarts=3"]


def test_a_volcano_job() -> None:
    job = made(name="big", image="reg/a:1", nnodes="4", queue="q", priority="high", namespace="team")
    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    assert job["metadata"] == {"name": "big", "namespace": "team", "labels": {"ring-controller.atlas": "ascend-910b"}}
    spec = job["spec"]
    assert (spec["minAvailable"], spec["schedulerName"], spec["queue"], spec["priorityClassName"]) == (
        4,
        "volcano",
        "q",
        "high",
    )
    assert spec["plugins"] == {"env": [], "svc": []}
    codes = {one.get("exitCode"): one["action"] for one in spec["policies"]}
    assert codes[2] == "TerminateJob" and codes[143] == "RestartJob"
    events = [one.get("event") for one in spec["policies"]]
    assert events[:2] == [None, None], "exit codes are asked before events"
    (task,) = spec["tasks"]
    assert (task["name"], task["replicas"], task["minAvailable"]) == ("worker", 4, 4)
    inner = task["template"]["spec"]
    assert (inner["restartPolicy"], inner["terminationGracePeriodSeconds"]) == ("Never", 600)
    (container,) = inner["containers"]
    assert container["command"] == [
        *WORDS,
        "--nnodes=4",
        "--master-port=29500",
        "--job-id=big",
        "--",
        "sft",
        "-c",
        "/etc/anabatic/job.yaml",
    ]
    assert container["resources"]["limits"] == {"huawei.com/Ascend910": "8"} == container["resources"]["requests"]
    mounted = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    assert {
        "/dev/shm",
        "/usr/local/Ascend/driver",
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/etc/ascend_install.info",
        "/etc/hccn.conf",
        "/etc/anabatic",
    } == set(mounted)
    volumes = {one["name"]: one for one in inner["volumes"]}
    assert volumes[mounted["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert volumes[mounted["/etc/hccn.conf"]]["hostPath"] == {"path": "/etc/hccn.conf", "type": "File"}
    assert sorted(volumes) == sorted(mounted.values())


def test_a_pytorchjob() -> None:
    job = made(kind="pytorchjob", name="big", nnodes="2:3", nproc=4, queue="q")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec["nprocPerNode"] == "4"
    assert spec["runPolicy"]["schedulingPolicy"] == {"minAvailable": 2, "queue": "q"}
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 2}
    for one in replicas.values():
        assert one["restartPolicy"] == "ExitCode" and "restartPolicy" not in one["template"]["spec"]
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["ports"][0]["name"] == "pytorchjob-port"
        assert "--nnodes=2:3" in container["command"]
        assert one["template"]["spec"]["schedulerName"] == "volcano"
    assert set(made(kind="pytorchjob")["spec"]["pytorchReplicaSpecs"]) == {"Master"}


@pytest.mark.parametrize(
    ("chip", "resource"),
    [("910b", "huawei.com/Ascend910"), ("a3", "huawei.com/Ascend910"), ("310p", "huawei.com/Ascend310P"),
     ("950", "huawei.com/npu"), ("910a", "huawei.com/Ascend910"),
     ("cce", "huawei.com/ascend-1980"), ("nvidia", "nvidia.com/gpu"), ("none", None)],
)  # fmt: skip
@pytest.mark.parametrize("kind", sorted(job_kinds.JOB_KINDS))
def test_every_chip_on_every_operator(kind: str, chip: str, resource: str | None) -> None:
    if kind == "ascendjob" and chip in ("cce", "nvidia", "none"):
        with pytest.raises(ConfigError, match="--kind ascendjob need MindCluster"):
            made(kind=kind, chip=chip)
        return
    text = yaml.safe_dump(all_made(kind=kind, chip=chip))
    assert ("/usr/local/Ascend/driver" in text) is bool(pod_template.ACCELERATORS[chip].mounts)
    assert resource is None or f"{resource}: '8'" in text
    assert "driver" not in str(all_made(kind=kind, chip=chip, driver_mounts=False))


def test_what_else_a_pod_may_have() -> None:
    job = made(
        host_network=True,
        rdma="rdma/hca_shared_devices_a",
        cpu="64",
        memory="512Gi",
        resource="huawei.com/Ascend910B3",
        node_selector=["accelerator-type=module-910b-8"],
        pull_secret=["reg"],
        secret_env=["WANDB_API_KEY=trackers/wandb"],
        env_from=["cloud"],
        workdir="/data",
        volume=["pvc:d:/data", "host:/mnt:/mnt:ro", "nfs:[fd00::1]:/s:/s"],
        setup=["source '/opt/my env/set.sh'"],
    )
    inner = job["spec"]["tasks"][0]["template"]["spec"]
    assert (inner["hostNetwork"], inner["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert inner["nodeSelector"] == {"accelerator-type": "module-910b-8"}
    (container,) = inner["containers"]
    assert container["resources"]["limits"] == {
        "huawei.com/Ascend910B3": "8",
        "rdma/hca_shared_devices_a": "1",
        "cpu": "64",
        "memory": "512Gi",
    }
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["env"][0] == {
        "name": "WANDB_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "trackers", "key": "wandb"}},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "cloud"}}]
    sources = {tuple(one)[1] for one in inner["volumes"][-3:]}
    assert sources == {"persistentVolumeClaim", "hostPath", "nfs"}
    shell, flag, script = container["command"]
    assert (shell, flag) == ("bash", "-c")
    setup, run = script.split("\n")
    assert setup == "source '/opt/my env/set.sh'" and shlex.split(run)[:3] == ["exec", "anabatic", "launch"]


@pytest.mark.parametrize(
    "text", ["pvc:a", "pvc::/d", "host:d:/d", "nfs:/s:/d", "disk:a:/d", "", "pvc:a:d", "host:/a:/b:rw"]
)
def test_volumes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--volume"):
        pod_template.parse_volume(text)


def test_a_claims_name_may_look_like_a_suffix() -> None:
    assert pod_template.parse_volume("pvc:ro:/ro:ro") == PodVolume(
        {"persistentVolumeClaim": {"claimName": "ro"}}, "/ro", True
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "My_Job"}, "--name is 'My_Job'"),
        ({"name": "9lives"}, "begins with a letter"),
        ({"name": "a" * 51}, "51 characters"),
        ({"name": "a\n"}, "--name is"),
        ({"name": "a: b"}, "--name is"),
        ({"namespace": "a.b"}, "--namespace is"),
        ({"image": "reg/a b"}, "--image is 'reg/a b'"),
        ({"image": "-x"}, "not an image"),
        ({"cpu": "many"}, "not a quantity"),
        ({"memory": "-1Gi"}, "not a quantity"),
        ({"shm": "64 GB"}, "--shm is"),
        ({"resource": "huawei.com/"}, "--resource is"),
        ({"env": ["A B=x"]}, "--env: the key is 'A B'"),
        ({"secret_env": ["A=Not_A_Secret/k"]}, "--secret-env 'A' is 'Not_A_Secret/k'"),
        ({"node_selector": ["key=has blanks"]}, "a label's value"),
        ({"node_selector": ["-key=v"]}, "--node-selector: the key"),
        ({"volume": ["pvc:A:/d"]}, "--volume: the claim is 'A'"),
        ({"workdir": "relative"}, "--workdir is"),
        ({"label": ["-a=b"]}, "--label: the key is '-a'"),
        ({"label": ["a/b/c=d"]}, "--label: the key is 'a/b/c'"),
        ({"label": [f"{'a' * 254}/b=c"]}, "--label: the key"),
        ({"label": [f"{'b' * 64}=c"]}, "--label: the key"),
        ({"label": ["a=b c"]}, "--label 'a' is 'b c'"),
        ({"label": [f"a={'b' * 64}"]}, "--label 'a' has 64 characters"),
        ({"label": ["a=\u00e9"]}, "--label 'a' is '\u00e9'"),
        ({"annotation": ["a b=c"]}, "--annotation: the key is 'a b'"),
        ({"master_port": 70000}, "--master-port is 70000"),
        ({"queue": "Q"}, "is 'Q', not a name of small letters"),
    ],
)
def test_names_that_kubernetes_does_not_take(changed: dict[str, Any], message: str) -> None:
    for kind in job_kinds.JOB_KINDS:
        with pytest.raises(ConfigError) as caught:
            manifests.render_manifests(order(kind=kind, **changed), ["sft"], RECIPE, SECRET)
        assert message in str(caught.value)


@pytest.mark.process
@given(st.text(st.characters(blacklist_categories=["Cs"]), max_size=40))
def test_any_value_of_a_variable_arrives_as_it_was_typed(value: str) -> None:
    job = made(env=[f"A={value}"])
    read = job["spec"]["tasks"][0]["template"]["spec"]["containers"][0]["env"][0]["value"]
    assert read.replace("$$(", "$(") == value


@pytest.mark.parametrize(
    "value", ["y", "n", "0o17", "1_000", "1:30", "012", "1e3", "~", "", "=", "nan", "0x1f", "2001-01-01"]
)
def test_words_that_a_reader_of_yaml_might_change_are_quoted(value: str) -> None:
    text = manifests.render_manifests(order(env=[f"A={value}"]), ["sft"], RECIPE, SECRET)
    assert f'value: "{value}"' in text


def kubectl(folder: Path, body: str) -> str:
    """Put a kubectl in `folder` and return a PATH with it."""
    (folder / "kubectl").write_text(f'#!/bin/bash\ncat > {folder}/last.yaml\necho "$@" >> {folder}/said\n{body}\n')
    (folder / "kubectl").chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


@pytest.mark.process
def test_submitting_asks_the_server_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", kubectl(tmp_path, "echo job.batch.volcano.sh/a created"))
    assert kubectl_module.submit_manifests("kind: Job\n", "lab") == "job.batch.volcano.sh/a created"
    said = (tmp_path / "said").read_text().splitlines()
    assert said == ["--context=lab create -f - --dry-run=server", "--context=lab create -f -"]
    assert (tmp_path / "last.yaml").read_text() == "kind: Job\n"


@pytest.mark.process
def test_a_cluster_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", kubectl(tmp_path, 'echo "error: no matches for kind \\"Job\\"" >&2; exit 1'))
    with pytest.raises(Failure, match="no matches for kind") as caught:
        kubectl_module.submit_manifests("kind: Job\n")
    assert "install the operator" in caught.value.hint
    assert len((tmp_path / "said").read_text().splitlines()) == 1, "nothing was created"
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no kubectl"):
        kubectl_module.submit_manifests("kind: Job\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--image i", "which command?"),
        ("-- sft -c GOOD", "which image?"),
        ("--image i --kind job -- sft -c GOOD", '--kind is "job", expected one of volcano'),
        ("--image i --chip 910d -- sft -c GOOD", '--chip is "910d"'),
        ("--image i --env A -- sft -c GOOD", '--env has "A", not KEY=VALUE'),
        ("--image i --secret-env A=B -- sft -c GOOD", "not KEY=SECRET/KEY"),
        ("--image i --nnodes 3:2 -- sft -c GOOD", "nnodes is 3:2"),
        ("--image i --nnodes two -- sft -c GOOD", "nnodes is two"),
        ("--image i --npus 0 -- sft -c GOOD", "nproc is 0"),
        ("--image i --grace soon -- sft -c GOOD", '--grace is "soon", expected a whole number'),
        ("--image i -- chat", "not a command that trains"),
    ],
)
def test_what_is_wrong_on_the_command_line(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.yaml").write_text(RECIPE)
    with pytest.raises(SystemExit) as caught:
        app.main(["launch", "k8s", *words.replace("GOOD", str(tmp_path / "good.yaml")).split()])
    assert caught.value.code == 2
    out = capsys.readouterr()
    assert message in out.err and out.out == ""


def test_the_command_prints_what_can_be_applied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.yaml").write_text(RECIPE)
    with pytest.raises(SystemExit) as caught:
        app.main(
            [
                "launch",
                "k8s",
                "--image",
                "i",
                "--npus",
                "4",
                "--env",
                "A=1",
                "B=",
                "--",
                "sft",
                "-c",
                str(tmp_path / "good.yaml"),
                "--seed",
                "7",
            ]
        )
    assert caught.value.code == 0
    config, job = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(config["data"]["job.yaml"])["seed"] == 7
    (container,) = job["spec"]["tasks"][0]["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"huawei.com/Ascend910": "4"}
    assert container["env"][:2] == [{"name": "A", "value": "1"}, {"name": "B", "value": ""}]
