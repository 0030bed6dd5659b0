"""Manifests as the command writes them, read back from their text."""

from __future__ import annotations

import shutil
from typing import Any

import yaml

from anabatic.config.sections.kubernetes import Kubernetes
from anabatic.launch.k8s import manifests
from house import tree

SECRET = "0123456789abcdef"
RECIPE = "model: m\ndata: {train: [a]}\n"


def order(**given: Any) -> Kubernetes:
    """What is asked for; eight devices each unless told."""
    return Kubernetes(**{"name": "a", "image": "i", "nproc": 8, **given})


def made(**given: Any) -> dict[str, Any]:
    """Return the job's manifest, read back from its text."""
    return all_made(**given)[-1]


def all_made(**given: Any) -> list[dict[str, Any]]:
    """Return the manifests after the ConfigMap with the recipe, read back from their text."""
    config, *others = yaml.safe_load_all(manifests.render_manifests(order(**given), ["sft"], RECIPE, SECRET))
    assert config["data"] == {"job.yaml": RECIPE}
    assert all(isinstance(one, dict) for one in others)
    return others


def find_pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the pod template of the job of any kind."""
    pending: list[Any] = list(documents)
    while pending:
        value = pending.pop()
        if isinstance(value, dict) and "containers" in value.get("spec", {}):
            return value
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    raise AssertionError("no pod")


def find_tool(name: str) -> str | None:
    """Return the path of helm or kubectl: the fetched one, or that of the PATH."""
    fetched = tree.ROOT / ".cache" / name
    return str(fetched) if fetched.exists() else shutil.which(name)
