"""The two hubs' HTTP interfaces, as far as uploads need them; what was uploaded is served by `hub_server`."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from unit.hub.hub_server import Handler, Hub


@dataclass
class PushHub(Hub):
    """A hub that takes uploads from whoever has `token`.

    Attributes:
        exists: the repository is there.
        created: what was said when it was created.
        blobs: SHA-256 -> bytes that were stored.
        stored: how often bytes were sent.
        commits: branch, message, paths of each commit.
        refuse: part of a path -> status that it is answered with.
        refuse_once: as `refuse`, the first time alone.
    """

    exists: bool = False
    created: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    stored: int = 0
    commits: list[tuple[str, str, list[str]]] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)
    branches: set[str] = field(default_factory=lambda: {"main", "master"})


class PushHandler(Handler):
    """Answers what huggingface_hub and modelscope_hub ask for when they upload."""

    hub: PushHub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not self._is_refused(path):
            if path in (f"/openapi/v1/models/{self.hub.name}", f"/api/v1/models/{self.hub.name}"):
                self.hub.asked.append(f"GET {path}")
                data = {"id": self.hub.name, "Path": "acme", "Name": self.hub.name.partition("/")[2]}
                if self.hub.exists:
                    self.send_json({"success": True, "Data": data, "data": data}, True)
                else:
                    self.send_answer(404, b'{"success": false, "message": "not there"}', True, {})
            else:
                super().do_GET()

    def do_POST(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        hub.asked.append(f"POST {path}")
        length = self.headers["Content-Length"]
        body = self.rfile.read(int(length)) if length else self._read_chunks()
        if self._is_refused(path):
            return
        if path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []}, True)
        elif path == "/api/repos/create":
            self._create(json.loads(body), {"url": f"{hub.url}/{hub.name}", "name": hub.name})
        elif path == "/api/v1/models":
            self._create(json.loads(body), {"Code": 200, "Success": True, "Data": {"Path": "acme", "Name": "tiny"}})
        elif path.endswith("/objects/batch"):
            self._list_missing(json.loads(body)["objects"], "/api/v1/" in path)
        elif "/preupload/" in path:
            files = json.loads(body)["files"]
            self.send_json({"files": [self._choose_mode(one) for one in files]}, True)
        elif "/branch/" in path:
            hub.branches.add(path.rpartition("/")[2])
            self.send_json({}, True)
        elif "/api/v1/" in path:
            self._commit_modelscope(path.rpartition("/")[2], json.loads(body))
        else:
            self._commit_huggingface(path.rpartition("/")[2], [json.loads(line) for line in body.splitlines()])

    def do_PUT(self) -> None:
        hub = self.hub
        data = self.rfile.read(int(self.headers["Content-Length"]))
        hub.asked.append(f"PUT {self.path}")
        if self._is_refused(self.path):
            return
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        hub.blobs[oid] = data
        hub.stored += 1
        self.send_json({"Code": 200, "Success": True}, True)

    def _read_chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _is_refused(self, path: str) -> bool:
        hub = self.hub
        status = next((status for part, status in hub.refuse.items() if part in path), 0)
        if (
            not status
            and self.command != "PUT"
            and hub.token
            and self.headers["Authorization"] != f"Bearer {hub.token}"
        ):
            status = 401
        if status:
            self.send_answer(status, json.dumps({"error": "no", "Message": "no", "Success": False}).encode(), True, {})
        return status != 0

    def _create(self, asked: dict[str, Any], answer: dict[str, Any]) -> None:
        if self.hub.exists:
            there = {"error": "it is there", "url": f"{self.hub.url}/{self.hub.name}"}
            self.send_answer(409, json.dumps(there).encode(), True, {})
            return
        self.hub.exists, self.hub.created = True, asked
        self.send_json(answer, True)

    def _list_missing(self, objects: list[dict[str, Any]], wrapped: bool) -> None:
        rows = []
        for one in objects:
            row = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.hub.blobs:
                row["actions"] = {"upload": {"href": f"{self.hub.url}/blobs/{one['oid']}", "header": {}}}
            rows.append(row)
        answer = {"objects": rows, "transfer": "basic"}
        self.send_json({"Code": 200, "Success": True, "Data": answer} if wrapped else answer, True)

    def _choose_mode(self, file: dict[str, Any]) -> dict[str, Any]:
        mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}

    def _commit_huggingface(self, branch: str, lines: list[dict[str, Any]]) -> None:
        summary, files = "", {}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.blobs[value["oid"]]
        self._store(branch, summary, files)
        answer = {"commitUrl": f"{self.hub.url}/{self.hub.name}/commit/{self.hub.commit}", "commitOid": self.hub.commit}
        self.send_json({"success": True, **answer}, True)

    def _commit_modelscope(self, branch: str, asked: dict[str, Any]) -> None:
        files = {}
        for action in asked["actions"]:
            stored = self.hub.blobs.get(action["sha256"])
            files[action["path"]] = stored if action["type"] == "lfs" else base64.b64decode(action["content"])
        assert None not in files.values()
        self._store(branch, asked["commit_message"], files)  # type: ignore[arg-type]
        self.send_json({"Code": 200, "Success": True, "Data": {"commit_id": self.hub.commit}}, True)

    def _store(self, branch: str, summary: str, files: dict[str, bytes]) -> None:
        assert branch in self.hub.branches
        self.hub.commits.append((branch, summary, sorted(files)))
        self.hub.files.update(files)
