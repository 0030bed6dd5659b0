"""The chart renders with helm to what the published schemas take, and asks for the same devices as a training job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabatic.launch.k8s.pod_template import ACCELERATORS
from house import tree
from unit.launch import published_schemas
from unit.launch.rendered import find_pod, find_tool, made

CHART = tree.ROOT / "charts" / "anabatic-serve"
HELM = find_tool("helm")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(HELM is None, reason="no helm: python scripts/fetch_kubernetes_tools.py"),
]


def run_helm(*arguments: str, values: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run helm with values, away from the user's own settings and repositories."""
    (folder / "values.json").write_text(json.dumps(values))
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    command = [str(HELM), *arguments, str(CHART), "-f", str(folder / "values.json")]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def render(values: dict[str, Any], folder: Path) -> dict[str, dict[str, Any]]:
    """Return the objects by kind, each checked against its schema."""
    done = run_helm("template", "demo", values=values, folder=folder)
    assert done.returncode == 0, done.stderr
    objects = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    for one in objects.values():
        assert published_schemas.find_faults(one) == []
    return objects


def get_serving_pod(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the pod template of the deployment."""
    template = render(values, folder)["Deployment"]["spec"]["template"]
    assert isinstance(template, dict)
    return template


def test_the_chart_has_no_lint(tmp_path: Path) -> None:
    done = run_helm("lint", "--strict", values={}, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_service_finds_the_pods(tmp_path: Path) -> None:
    objects = render({}, tmp_path)
    assert set(objects) == {"Deployment", "Service"}
    deployment, service = objects["Deployment"]["spec"], objects["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    assert service["selector"].items() <= labels.items()
    (container,) = deployment["template"]["spec"]["containers"]
    assert service["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert f"--port={container['ports'][0]['containerPort']}" in container["args"]
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 1800


@pytest.mark.parametrize("chip", sorted(ACCELERATORS))
def test_a_chip_is_the_same_as_in_a_training_job(chip: str, tmp_path: Path) -> None:
    training = find_pod([made(chip=chip, nproc=2)])
    values = {"accelerator": {"chip": chip, "count": 2}, "schedulerName": "volcano"}
    serving = get_serving_pod(values, tmp_path)
    (ours,), (theirs,) = training["spec"]["containers"], serving["spec"]["containers"]
    assert theirs.get("resources", {}) == ours["resources"]
    assert training.get("metadata", {}).get("labels", {}).items() <= serving["metadata"]["labels"].items()
    assert theirs.get("env", []) == ours.get("env", [])
    files = {"/etc/hccn.conf", "/etc/anabatic"}  # of several machines, and of the recipe
    assert {one["mountPath"] for one in theirs["volumeMounts"]} == {
        one["mountPath"] for one in ours["volumeMounts"]
    } - files
    without = get_serving_pod({"accelerator": {"chip": chip, "driverMounts": False}}, tmp_path)
    assert "Ascend/driver" not in str(without) and "ASCEND_VISIBLE_DEVICES" not in str(without)


def test_everything_a_chart_may_set(tmp_path: Path) -> None:
    texts = ['a: "b" #c', "line\nline", "\u4f60\u597d", "$(PATH)", "{{ .Values }}"]
    pod = get_serving_pod(
        {
            "image": {"repository": "reg.example.com:5000/a/b", "tag": "1.0"},
            "models": ["qwen=/models/q", *texts],
            "extraArgs": ["--batching.batch", "32"],
            "modelVolume": {"claim": "models"},
            "apiKeys": {"secret": "keys"},
            "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
            "resources": {"cpu": 8, "memory": "64Gi"},
            "podLabels": {"fault-scheduling": "grace"},
            "podAnnotations": {"note": texts[0]},
            "nodeSelector": {"accelerator-type": "module-910b-8"},
            "tolerations": [{"key": "npu", "operator": "Exists"}],
            "imagePullSecrets": [{"name": "reg"}],
            "accelerator": {"chip": 950, "resource": "example.com/npu"},
        },
        tmp_path,
    )
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "reg.example.com:5000/a/b:1.0"
    assert container["args"][:7] == ["serve", "qwen=/models/q", *texts]
    assert container["args"][-2:] == ["--batching.batch", "32"]
    assert container["resources"]["limits"] == {"example.com/npu": "1", "cpu": "8", "memory": "64Gi"}
    assert pod["metadata"]["labels"]["fault-scheduling"] == "grace"
    assert pod["metadata"]["annotations"] == {"note": texts[0]}
    assert [one["name"] for one in container["env"]] == ["ANABATIC_API_KEYS", "HF_HUB_OFFLINE"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod["spec"][
        "volumes"
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"accelerator": {"chip": "910d"}},
        {"accelerator": {"count": 0}},
        {"image": {"repository": "a b"}},
        {"image": {"tag": "a\nb"}},
        {"models": []},
        {"modelVolume": {"claim": "Not_A_Claim"}},
        {"modelVolume": {"hostPath": "relative"}},
        {"shm": "64 GB"},
        {"service": {"type": "Ingress"}},
        {"service": {"port": 70000}},
    ],
)
def test_values_that_the_schema_refuses(values: dict[str, Any], tmp_path: Path) -> None:
    done = run_helm("template", "demo", values=values, folder=tmp_path)
    assert done.returncode and "values don't meet the specifications" in done.stderr
