"""Every manifest fits the published schemas of its kind, and the schemas refuse what a strict API server refuses."""

from __future__ import annotations

import copy
import re
import string
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from anabatic.core.errors import ConfigError
from anabatic.launch.k8s import job_kinds, manifests, name_rules
from unit.launch import published_schemas
from unit.launch.rendered import RECIPE, SECRET, find_pod, order

EVERYTHING: dict[str, Any] = {
    "name": "big",
    "namespace": "team",
    "nnodes": "3",
    "image": "reg.example.com/a/b:1@sha256:00",
    "queue": "q",
    "priority": "high",
    "cpu": "64",
    "memory": "512Gi",
    "rdma": "rdma/hca_shared_devices_a",
    "host_network": True,
    "workdir": "/data",
    "volume": ["pvc:d:/data", "host:/mnt:/mnt:ro", "nfs:[fd00::1]:/s:/s"],
    "env": ["A=$(B)", "C=", "D=line\nline"],
    "secret_env": ["WANDB_API_KEY=trackers/wandb"],
    "env_from": ["cloud"],
    "node_selector": ["accelerator-type=module-910b-8"],
    "label": ["team=nlp", "example.com/a=b"],
    "annotation": ["sp-block=16", "note=\u4f60 '\"\\\n#"],
    "pull_secret": ["reg"],
    "setup": ["source '/opt/my env/set.sh'"],
}
MINDCLUSTER: dict[str, Any] = {
    "fault_scheduling": "force",
    "fault_retry_times": 7,
    "pod_rescheduling": True,
    "ranktable": True,
}


def documents(**given: Any) -> list[dict[str, Any]]:
    """Return all manifests, read back from their text."""
    return list(yaml.safe_load_all(manifests.render_manifests(order(**given), ["sft"], RECIPE, SECRET)))


@pytest.mark.parametrize("kind", sorted(job_kinds.JOB_KINDS))
@pytest.mark.parametrize("chip", ["910b", "310p", "950", "nvidia", "none"])
def test_every_kind_and_chip(kind: str, chip: str) -> None:
    if kind == "ascendjob" and chip in ("nvidia", "none"):
        pytest.skip("an AscendJob is for NPUs")
    mindcluster = MINDCLUSTER if job_kinds.JOB_KINDS[kind].mindcluster and chip not in ("nvidia", "none") else {}
    for given_settings in ({}, EVERYTHING, {**EVERYTHING, **mindcluster}):
        for document in documents(kind=kind, chip=chip, **given_settings):
            assert published_schemas.find_faults(document) == []


def job_and_pod(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest with the pods, and the pod template inside it."""
    found = [one for one in documents(kind=kind, **EVERYTHING) if "containers" in str(one)]
    (job,) = copy.deepcopy(found)
    return job, find_pod([job])


@pytest.mark.parametrize("kind", sorted(job_kinds.JOB_KINDS))
def test_the_schemas_refuse_unknown_fields_and_wrong_types(kind: str) -> None:
    job, pod = job_and_pod(kind)
    job["spec"]["replica"] = 1
    pod["spec"]["hostnetwork"] = True
    pod["spec"]["containers"][0]["imagee"] = "i"
    faults = " ".join(published_schemas.find_faults(job))
    for field in ("spec.replica: unknown", "hostnetwork: unknown", "imagee: unknown"):
        assert field in faults, faults
    job, pod = job_and_pod(kind)
    pod["spec"]["terminationGracePeriodSeconds"] = "600"
    pod["spec"]["containers"][0]["command"] = "anabatic"
    assert published_schemas.find_faults(job)
    job, pod = job_and_pod(kind)
    del pod["spec"]["containers"][0]["name"]
    assert published_schemas.find_faults(job)


def is_qualified_name(text: str) -> bool:
    """Kubernetes' rule of a label's key, letter by letter (kubernetes.io, Labels: Syntax and character set)."""
    prefix, slash, name = text.rpartition("/")
    parts = prefix.split(".")
    has_good_prefix = not slash or (0 < len(prefix) <= 253 and all(is_dns_label(part, 253) and part for part in parts))
    return has_good_prefix and bool(name) and is_label_value(name)


def is_label_value(text: str) -> bool:
    """The same of a label's value, which may be empty."""
    alphanumeric = string.ascii_letters + string.digits
    return not text or (
        len(text) <= 63
        and all(letter in alphanumeric + "-_." for letter in text)
        and text[0] in alphanumeric
        and text[-1] in alphanumeric
    )


def is_dns_label(text: str, most: int = 63) -> bool:
    """Kubernetes' rule of a name (RFC 1123)."""
    alphanumeric = string.ascii_lowercase + string.digits
    return (
        0 < len(text) <= most
        and all(letter in alphanumeric + "-" for letter in text)
        and text[0] != "-"
        and text[-1] != "-"
    )


HOSTILE = st.one_of(
    st.text("aZ09-_./ \n'\"\\\u4f60\u00e9\x00:#{}[]", max_size=12),
    st.builds(lambda letter, count: letter * count, st.sampled_from("aA0.-"), st.integers(60, 320)),
    st.builds(
        lambda prefix, name: f"{prefix}/{name}",
        st.one_of(st.text("ab-.", max_size=6), st.integers(250, 256).map(lambda count: "a" * count)),
        st.one_of(st.text("aB-_.", max_size=6), st.integers(61, 65).map(lambda count: "b" * count)),
    ),
)


def is_taken(rule: name_rules.NameRule, text: str) -> bool:
    """Return whether the rule finds no fault."""
    return not rule.find_fault(text)


@given(HOSTILE)
@settings(max_examples=1000)
def test_names_and_labels_follow_kubernetes_rules(text: str) -> None:
    assert is_taken(name_rules.LABEL_KEY, text) is is_qualified_name(text)
    assert is_taken(name_rules.LABEL_VALUE, text) is is_label_value(text)
    assert is_taken(name_rules.DNS_LABEL, text) is is_dns_label(text)


@given(
    st.sampled_from(sorted(job_kinds.JOB_KINDS)),
    st.sampled_from(["name", "namespace", "image", "cpu", "memory", "queue", "priority", "workdir", "resource"]),
    st.one_of(st.just("a"), HOSTILE),
    st.lists(st.tuples(HOSTILE, HOSTILE), max_size=1),
    HOSTILE,
)
def test_hostile_input_is_refused_or_arrives_whole(
    kind: str, field: str, text: str, pairs: list[tuple[str, str]], note: str
) -> None:
    given_settings: dict[str, Any] = {
        field: text or "a",
        "label": [f"{key}={value}" for key, value in pairs],
        "annotation": [f"note={note}"],
        "env": [f"A={note}"],
    }
    try:
        rendered = documents(kind=kind, **given_settings)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    job = rendered[-1]
    for document in rendered:
        assert published_schemas.find_faults(document) == []
    assert job["metadata"]["annotations"] == {"note": note}
    labels = {key: value for key, _, value in (one.partition("=") for one in given_settings["label"])}
    assert labels.items() <= job["metadata"]["labels"].items()
    assert all(is_qualified_name(key) and is_label_value(value) for key, value in job["metadata"]["labels"].items())
    assert is_dns_label(job["metadata"]["name"])


QUANTITY = (
    r"(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?"
)
"""The pattern that the operators' definitions have for a quantity."""


@given(st.text("0159.eEkKMGTi m+-", max_size=8))
def test_quantities_are_those_of_kubernetes_without_a_sign(text: str) -> None:
    if is_taken(name_rules.QUANTITY, text):
        assert re.fullmatch(QUANTITY, text) and text[0] not in "+-"
    elif re.fullmatch(QUANTITY, text):
        assert re.search(r"[+-]|[eE].*\.", text), "what is refused has a sign or a fraction of an exponent"
