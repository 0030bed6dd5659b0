"""The two hubs' HTTP interfaces, as far as downloads need them, on a port of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server holds and how it misbehaves; `asked` receives every path."""

    files: dict[str, bytes]
    name: str = "acme/tiny"
    commit: str = SHA
    """What `main` and `master` are; the files are always those of `files`."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: str = ""
    """File of which only half is sent, however often it is asked for."""
    cut_once: set[str] = field(default_factory=set)
    """Files of which the first answer is cut."""
    spoilt: str = ""
    """File that comes with another byte."""
    failing: int = 0
    """So many of the next requests are answered with 503."""
    delay: float = 0.0
    """Seconds before every answer."""
    lfs: set[str] = field(default_factory=set)
    """Files that are sent from another address after a redirect."""
    token: str = ""
    """Required of every request for a file list, if set."""
    page: bytes = b""
    """Sent whatever is asked."""
    page_size: int = 10**6
    """Entries of a page of a list."""
    asked: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """`Authorization` of the requests that were redirected."""
    url: str = ""

    @property
    def cdn_url(self) -> str:
        """The same server as another host."""
        return self.url.replace("127.0.0.1", "localhost")

    def got(self) -> list[str]:
        """Names of the files that were sent."""
        return sorted({path.rsplit("/", 1)[-1] for method, path in map(str.split, self.asked) if method == "FILE"})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        hub, url = self.hub, urlsplit(self.path)
        hub.asked.append(f"{self.command} {url.path}")
        time.sleep(hub.delay)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if hub.failing > 0:
            hub.failing -= 1
            self.send_answer(503, b"busy", body, {})
        elif hub.status != 200 or (hub.name not in url.path and "/cdn/" not in url.path):
            self.send_answer(hub.status if hub.status != 200 else 404, b'{"error": "no"}', body, hub.headers)
        elif hub.page:
            self.send_answer(200, hub.page, body, {})
        elif "/api/" in url.path and hub.token and self.headers["Authorization"] != f"Bearer {hub.token}":
            self.send_answer(401, b'{"error": "who"}', body, hub.headers)
        elif "/api/v1/" in url.path:
            self._modelscope(url.path, query, body)
        elif "/cdn/" in url.path:
            hub.tokens.append(self.headers["Authorization"] or "")
            self._file(unquote(url.path.split("/cdn/")[1]), body, {})
        elif "/resolve/" in url.path:
            self._resolve(*unquote(url.path.split("/resolve/")[1]).split("/", 1), body)
        elif "/tree/" in url.path:
            self._tree(url.path, query, body)
        else:
            self._info(url.path, body)

    def _modelscope(self, path: str, query: dict[str, str], body: bool) -> None:
        if query.get("Revision", "master") not in ("master", "v1"):
            self.send_answer(404, b'{"Code": 404}', body, {})
        elif path.endswith(("/repo/files", "/repo/tree")):
            rows = [
                {"Path": path, "Type": "blob", "Size": len(data), "Sha256": _sha(data)} for path, data in self._all()
            ]
            rows.append({"Path": "original", "Type": "tree", "Size": 0})
            if path.endswith("/repo/tree"):
                size, page = int(query["PageSize"]), int(query["PageNumber"])
                rows = rows[(page - 1) * size : page * size]
            self.send_json({"Code": 200, "Data": {"Files": rows}}, body)
        elif query["FilePath"] in self.hub.lfs:
            self.send_answer(302, b"", body, {"Location": f"{self.hub.cdn_url}/cdn/{query['FilePath']}"})
        else:
            self._file(query["FilePath"], body, {})

    def _resolve(self, revision: str, path: str, body: bool) -> None:
        hub = self.hub
        if path not in hub.files or revision not in ("main", hub.commit):
            self.send_answer(404, b"", body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit})
            return
        data = hub.files[path]
        headers = {"ETag": f'"{_git_id(data)}"', "X-Repo-Commit": hub.commit}
        if path in hub.lfs:
            headers |= {"X-Linked-Size": str(len(data)), "X-Linked-ETag": f'"{_sha(data)}"'}
            self.send_answer(302, b"", body, {**headers, "Location": f"{hub.cdn_url}/cdn/{path}"})
        else:
            self._file(path, body, headers)

    def _tree(self, path: str, query: dict[str, str], body: bool) -> None:
        start = int(query.get("cursor", 0))
        rows = [
            {"type": "file", "path": path, "size": len(data), "oid": _git_id(data)}
            | ({"lfs": {"oid": _sha(data), "size": len(data), "pointerSize": 130}} if path in self.hub.lfs else {})
            for path, data in self._all()
        ]
        end = start + self.hub.page_size
        link = f'<{self.hub.url}{path}?recursive=true&cursor={end}>; rel="next"'
        self.send_json(rows[start:end], body, {"Link": link} if end < len(rows) else {})

    def _info(self, path: str, body: bool) -> None:
        hub = self.hub
        revision = unquote(path.split("/revision/")[1]) if "/revision/" in path else "main"
        if path.endswith("/refs"):
            refs = [{"name": "main", "ref": "refs/heads/main", "targetCommit": hub.commit}]
            self.send_json({"branches": refs, "tags": [], "converts": []}, body)
        elif revision not in ("main", "refs/convert/parquet", hub.commit):
            self.send_answer(404, b"", body, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = [{"rfilename": path} for path in hub.files]
            self.send_json({"id": hub.name, "sha": hub.commit, "siblings": siblings}, body)

    def _all(self) -> list[tuple[str, bytes]]:
        return list(self.hub.files.items())

    def send_json(self, value: object, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_answer(200, json.dumps(value).encode(), body, {"Content-Type": "application/json", **(headers or {})})

    def _file(self, path: str, body: bool, headers: dict[str, str]) -> None:
        data = self.hub.files[path]
        if body:
            self.hub.asked.append(f"FILE {path}")
        if path == self.hub.spoilt:
            data = data[:-1] + b"?"
        status = 200
        if wanted := self.headers["Range"]:
            start = int(wanted.removeprefix("bytes=").partition("-")[0])
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
            status, data = 206, data[start:]
        half = path == self.hub.cut or (body and path in self.hub.cut_once)
        if body:
            self.hub.cut_once.discard(path)
        self.send_answer(status, data, body, headers, half=half)

    def send_answer(self, status: int, data: bytes, body: bool, headers: dict[str, str], half: bool = False) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            self.close_connection = True


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def serving(hub: Hub, handler_class: type[Handler] = Handler) -> Iterator[Hub]:
    """Serve `hub` while the block runs."""
    handler = type("Handler", (handler_class,), {"hub": hub})
    server = ThreadingHTTPServer(("localhost", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
