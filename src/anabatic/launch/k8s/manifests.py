"""Render the manifests of a job: a ConfigMap with its recipe, and the job in the form of its operator.

One pod runs on each machine and runs `anabatic launch`, which reads its node rank from the operator's variables
(`env_variables.py`).
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from anabatic.config.sections.kubernetes import Kubernetes
from anabatic.launch.k8s.job_kinds import JOB_KINDS, Manifest, check_kind
from anabatic.launch.k8s.name_rules import check_names
from anabatic.launch.k8s.pod_template import (
    ACCELERATORS,
    JOB_SECRET_KEY,
    RECIPE_FILE,
    job_secret_name,
    needs_job_secret,
    rank_table_config_map,
)

RANK_TABLE_START = '{"status": "initializing"}\n'
"""The rank table before the operator has written it."""


def render_manifests(settings: Kubernetes, command: list[str], recipe: str, secret: str) -> str:
    """Return the manifests as YAML: the job, the ConfigMap with its recipe, and its secret where pods meet.

    Args:
        secret: of the job (`job_secret.py`), unless the settings name one.

    Raises:
        ConfigError: Kubernetes would refuse a name or value, the message lists them; or the kind of job does not have
            what is asked for.
    """
    check_kind(settings)
    check_names(settings)
    manifests = [_build_config_map(settings, f"{settings.name}-recipe", {RECIPE_FILE: recipe})]
    if settings.ranktable and settings.kind == "volcano":
        # the operator finds the ConfigMap by its name and label, and fills it
        table = _build_config_map(settings, rank_table_config_map(settings.name), {"hccl.json": RANK_TABLE_START})
        table["metadata"]["labels"] = dict(ACCELERATORS[settings.chip].labels)
        manifests.append(table)
    if needs_job_secret(settings):
        metadata = {"name": job_secret_name(settings.name), **_get_namespace(settings)}
        data = {JOB_SECRET_KEY: secret}
        manifests.append({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})
    manifests += JOB_KINDS[settings.kind].build(settings, command)
    return yaml.dump_all(manifests, Dumper=_QuotingDumper, sort_keys=False, width=1 << 20, allow_unicode=True)


def _build_config_map(settings: Kubernetes, name: str, data: dict[str, str]) -> Manifest:
    metadata = {"name": name, **_get_namespace(settings)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _get_namespace(settings: Kubernetes) -> dict[str, str]:
    return {"namespace": settings.namespace} if settings.namespace else {}


class _QuotingDumper(yaml.SafeDumper):
    """Quotes every text that a parser of YAML 1.1 or 1.2 might read as another type, such as `y` and `0o17`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # a PyTorchJob contains the template twice


_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]+")
_YAML_KEYWORDS = {"yes", "no", "on", "off", "true", "false", "null", "nan", "inf"}


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    if "\n" in value:
        style: str | None = "|"
    else:
        style = None if _PLAIN_TEXT.fullmatch(value) and value.lower() not in _YAML_KEYWORDS else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_QuotingDumper.add_representer(str, _represent_text)
