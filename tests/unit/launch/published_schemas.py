"""The published schemas of Kubernetes objects, applied as a strict API server does: an unknown field is a fault.

| kind | schema |
|---|---|
| JobSet, TrainJob, TrainingRuntime | the models of kubeflow-trainer-api, which Kubeflow generates from its API |
| PyTorchJob | the models of kubeflow-training, which Kubeflow generates from its API |
| pods of every kind, ConfigMap, Deployment, Service | the models of the Kubernetes client |
| Volcano Job, AscendJob | no package has one: VOLCANO and ASCEND below, read from the operators' definitions |

These check names and types of fields. What values may be is checked by the API server and by admission webhooks, of
which there is none here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import kubeflow_trainer_api.models as trainer_models
from kubeflow.training import models as training_models
from kubernetes import client as kubernetes_models

Fields = dict[str, str]

_POD = "V1PodTemplateSpec"
VOLCANO: dict[str, Fields] = {
    "VolcanoJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "VolcanoJobSpec"},
    "VolcanoJobSpec": {
        "maxRetry": "int",
        "minAvailable": "int",
        "minSuccess": "int",
        "networkTopology": "object",
        "plugins": "dict(str, list[str])",
        "policies": "list[VolcanoPolicy]",
        "priorityClassName": "str",
        "queue": "str",
        "runningEstimate": "str",
        "schedulerName": "str",
        "tasks": "list[VolcanoTask]",
        "ttlSecondsAfterFinished": "int",
        "volumes": "object",
    },
    "VolcanoTask": {
        "dependsOn": "object",
        "maxRetry": "int",
        "minAvailable": "int",
        "name": "str",
        "partitionPolicy": "object",
        "policies": "list[VolcanoPolicy]",
        "replicas": "int",
        "template": _POD,
        "topologyPolicy": "str",
    },
    "VolcanoPolicy": {"action": "str", "event": "str", "events": "list[str]", "exitCode": "int", "timeout": "str"},
}
"""volcano v1.15.1, config/crd/volcano/bases/batch.volcano.sh_jobs.yaml."""
ASCEND: dict[str, Fields] = {
    "AscendJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "AscendJobSpec"},
    "AscendJobSpec": {
        "replicaSpecs": "dict(str, AscendReplica)",
        "runPolicy": "AscendRunPolicy",
        "schedulerName": "str",
        "successPolicy": "str",
    },
    "AscendReplica": {"replicas": "int", "restartPolicy": "str", "template": _POD},
    "AscendRunPolicy": {
        "activeDeadlineSeconds": "int",
        "backoffLimit": "int",
        "cleanPodPolicy": "str",
        "schedulingPolicy": "AscendSchedulingPolicy",
        "ttlSecondsAfterFinished": "int",
    },
    "AscendSchedulingPolicy": {
        "minAvailable": "int",
        "minResources": "dict(str, str)",
        "priorityClass": "str",
        "queue": "str",
    },
}
"""mind-cluster v26.1.0, component/ascend-operator/build/ascend-operator.yaml."""
_HAND_WRITTEN = {**VOLCANO, **ASCEND}
_TRAINER_MODELS = {
    "jobset.x-k8s.io/v1alpha2/JobSet": trainer_models.JobsetV1alpha2JobSet,
    "trainer.kubeflow.org/v1alpha1/TrainJob": trainer_models.TrainerV1alpha1TrainJob,
    "trainer.kubeflow.org/v1alpha1/TrainingRuntime": trainer_models.TrainerV1alpha1TrainingRuntime,
}
_OTHER_MODELS = {
    "batch.volcano.sh/v1alpha1/Job": "VolcanoJob",
    "mindxdl.gitee.com/v1/AscendJob": "AscendJob",
    "kubeflow.org/v1/PyTorchJob": "KubeflowOrgV1PyTorchJob",
    "apps/v1/Deployment": "V1Deployment",
    "v1/ConfigMap": "V1ConfigMap",
    "v1/Secret": "V1Secret",
    "v1/PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "v1/Service": "V1Service",
}
_BASIC_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "float": float}


def find_faults(manifest: dict[str, Any]) -> list[str]:
    """Return one line about each field of the manifest that its schema does not have or that is of another type.

    Raises:
        KeyError: no schema is known for this kind.
    """
    kind = f"{manifest['apiVersion']}/{manifest['kind']}"
    if kind not in _TRAINER_MODELS:
        return list(_check(manifest, _OTHER_MODELS[kind], manifest["kind"]))
    try:
        model = _TRAINER_MODELS[kind].from_dict(manifest)
    except ValueError as error:
        return [str(error)]
    return [
        *_find_lost(manifest, model.to_dict(), manifest["kind"]),
        *(fault for path, pod in _find_pods(manifest, manifest["kind"]) for fault in _check(pod, _POD, path)),
    ]


def _find_lost(given: Any, kept: Any, path: str) -> Iterator[str]:
    """Yield what a model did not take over; it may add defaults."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            if name in kept:
                yield from _find_lost(value, kept[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: unknown field"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from _find_lost(value, other, f"{path}[{index}]")
    elif given != kept or type(given) is not type(kept):
        yield f"{path}: {given!r} became {kept!r}"


def _find_pods(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value.get("spec", ()):
            yield path, value
        else:
            for name, item in value.items():
                yield from _find_pods(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_pods(item, f"{path}[{index}]")


def _check(value: Any, type_name: str, path: str) -> Iterator[str]:
    """Yield the faults of a value of a type as OpenAPI clients write it: `int`, `list[V1Volume]`, `dict(str, str)`."""
    if match := re.fullmatch(r"list\[(.+)\]", type_name):
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
            return
        for index, item in enumerate(value):
            yield from _check(item, match[1], f"{path}[{index}]")
    elif match := re.fullmatch(r"dict[\[(]str, (.+)[\])]", type_name):
        if not isinstance(value, dict):
            yield f"{path}: {value!r} is no map"
            return
        for name, item in value.items():
            yield from _check(name, "str", f"{path}: the key")
            yield from _check(item, match[1], f"{path}.{name}")
    elif type_name in _BASIC_TYPES:
        if type(value) is not _BASIC_TYPES[type_name]:
            yield f"{path}: {value!r} is no {type_name}"
    elif type_name != "object":  # anything, such as a number or a text for a port
        yield from _check_model(value, type_name, path)


def _check_model(value: Any, type_name: str, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: {value!r} is no map"
        return
    model, fields = _find_model(type_name)
    for name, item in value.items():
        if name in fields:
            yield from _check(item, fields[name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: unknown field"
    if model is not None:
        attributes = {wire_name: attribute for attribute, wire_name in model.attribute_map.items()}
        try:
            model(**{attributes[name]: item for name, item in value.items() if name in attributes})
        except ValueError as error:
            yield f"{path}: {error}"


def _find_model(type_name: str) -> tuple[Any, Fields]:
    if type_name in _HAND_WRITTEN:
        return None, _HAND_WRITTEN[type_name]
    model = getattr(training_models, type_name, None) or getattr(kubernetes_models, type_name)
    return model, {wire_name: model.openapi_types[name] for name, wire_name in model.attribute_map.items()}
