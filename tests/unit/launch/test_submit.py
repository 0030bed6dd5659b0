"""`--submit` with the real kubectl, against a server with the published schemas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from anabatic.core.errors import Failure
from anabatic.launch.k8s import job_kinds, kubectl, manifests
from unit.launch import api_server
from unit.launch.rendered import RECIPE, SECRET, find_tool, order

KUBECTL = find_tool("kubectl")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(KUBECTL is None, reason="no kubectl: python scripts/fetch_kubernetes_tools.py"),
]
Connect = Callable[[api_server.ApiServer], str]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Return a function that points kubectl at a server and returns the context's name."""

    def write(server: api_server.ApiServer) -> str:
        (tmp_path / "kubectl").symlink_to(str(KUBECTL))
        address = f"http://127.0.0.1:{server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "one", "cluster": {"server": address}}],
            "users": [{"name": "me", "user": {}}],
            "contexts": [{"name": "lab", "context": {"cluster": "one", "user": "me", "namespace": "team"}}],
        }
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return "lab"

    return write


@pytest.mark.parametrize("kind", sorted(job_kinds.JOB_KINDS))
def test_every_kind_is_created(kind: str, connect: Connect) -> None:
    text = manifests.render_manifests(order(kind=kind, name="big", nnodes="2", queue="q"), ["sft"], RECIPE, SECRET)
    documents = list(yaml.safe_load_all(text))
    with api_server.serving() as server:
        said = kubectl.submit_manifests(text, connect(server))
    assert said.count("created") == len(documents)
    assert {one["kind"]: one["spec"] for one in server.objects.values() if "spec" in one} == {
        one["kind"]: one["spec"] for one in documents if "spec" in one
    }
    assert set(server.objects) >= {"team/configmaps/big-recipe"}
    assert [query.get("dryRun") for query in server.queries] == ["All"] * len(documents) + [None] * len(documents)
    assert {query["fieldValidation"] for query in server.queries} == {"Strict"}


def test_an_unknown_field_creates_nothing(connect: Connect) -> None:
    text = manifests.render_manifests(order(), ["sft"], RECIPE, SECRET).replace("maxRetry:", "maxRetries:")
    with api_server.serving() as server, pytest.raises(Failure, match="maxRetries: unknown field"):
        kubectl.submit_manifests(text, connect(server))
    assert not server.objects


def test_a_name_that_is_taken(connect: Connect) -> None:
    text = manifests.render_manifests(order(), ["sft"], RECIPE, SECRET)
    with api_server.serving() as server:
        context = connect(server)
        kubectl.submit_manifests(text, context)
        with pytest.raises(Failure, match="AlreadyExists") as caught:
            kubectl.submit_manifests(text, context)
    assert "another --name" in caught.value.hint
