"""A server that answers kubectl as an API server with strict field validation: no cluster, only schemas and names.

It knows the objects of `published_schemas`. What an API server does beyond them (CEL rules, admission webhooks, quotas)
and what operators do with an object, it does not do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from unit.launch import published_schemas

KINDS = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "Secret"): "secrets",
    ("batch.volcano.sh/v1alpha1", "Job"): "jobs",
    ("kubeflow.org/v1", "PyTorchJob"): "pytorchjobs",
    ("mindxdl.gitee.com/v1", "AscendJob"): "ascendjobs",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobsets",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainjobs",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "trainingruntimes",
}
"""Version of the API and kind -> plural in addresses."""
Answer = tuple[int, dict[str, Any]]


class ApiServer(ThreadingHTTPServer):
    """Holds the objects that were created, and the queries of all requests that create one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kinds = KINDS
        self.objects: dict[str, dict[str, Any]] = {}
        self.queries: list[dict[str, str]] = []

    def discover(self, path: str) -> Answer:
        """Answer which versions, kinds and query parameters there are."""
        prefixes = {f"api{'' if version == 'v1' else 's'}/{version}": version for version, _ in self.kinds}
        groups = [version for version, _ in self.kinds if version != "v1"]
        documents: dict[str, dict[str, Any]] = {
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(one) for one in set(groups)]},
            "/openapi/v3": {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}"} for prefix in prefixes}},
        }
        for prefix, version in prefixes.items():
            documents[f"/{prefix}"] = {
                "kind": "APIResourceList",
                "groupVersion": version,
                "resources": [
                    {"name": plural, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["create", "get"]}
                    for (other, kind), plural in self.kinds.items()
                    if other == version
                ],
            }
            documents[f"/openapi/v3/{prefix}"] = self._describe(prefix, version)
        return (200, documents[path]) if path in documents else _refuse(404, "NotFound", f"{path} is not here")

    def _describe(self, prefix: str, version: str) -> dict[str, Any]:
        """Return the OpenAPI document in which kubectl looks whether dry runs and strict validation are possible."""
        group, _, name = version.rpartition("/")
        names = ("dryRun", "fieldValidation")
        parameters = [{"name": one, "in": "query", "schema": {"type": "string"}} for one in names]
        paths = {
            f"/{prefix}/namespaces/{{namespace}}/{plural}/{{name}}": {
                "patch": {
                    "operationId": f"patch{kind}",
                    "parameters": parameters,
                    "responses": {"200": {"description": "OK"}},
                    "x-kubernetes-group-version-kind": {"group": group, "version": name, "kind": kind},
                }
            }
            for (other, kind), plural in self.kinds.items()
            if other == version
        }
        return {"openapi": "3.0.0", "info": {"title": "objects", "version": "1"}, "paths": paths}

    def create(self, path: str, query: dict[str, str], body: dict[str, Any]) -> Answer:
        """Create an object, or answer why not."""
        self.queries.append(query)
        plural = self.kinds.get((body["apiVersion"], body["kind"]), "")
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        if not path.endswith(f"/{body['apiVersion']}/namespaces/{namespace}/{plural}"):
            return _refuse(400, "BadRequest", f"{path} is not the place of {plural}")
        if faults := published_schemas.find_faults(body):
            return _refuse(400, "BadRequest", f"strict decoding error: {'; '.join(faults)}")
        key = f"{namespace}/{plural}/{name}"
        if key in self.objects:
            return _refuse(409, "AlreadyExists", f"{key} already exists")
        if query.get("dryRun") != "All":
            self.objects[key] = body
        return 201, body


def _group(version: str) -> dict[str, Any]:
    known = {"groupVersion": version, "version": version.rpartition("/")[2]}
    return {"name": version.rpartition("/")[0], "versions": [known], "preferredVersion": known}


def _refuse(code: int, reason: str, message: str) -> Answer:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
    return code, {**status, "reason": reason, "code": code, "message": message}


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        self._send(*self.server.discover(urlsplit(self.path).path))

    def do_POST(self) -> None:
        url = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self._send(*self.server.create(url.path, query, body))

    def _send(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Keep the output of the tests clean."""


@contextmanager
def serving() -> Iterator[ApiServer]:
    """Serve on a free port of this machine."""
    with ApiServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
