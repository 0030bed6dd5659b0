"""As much of the two hubs' HTTP interfaces as fetching takes, on a port of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
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
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: str = ""
    """File of which only half is sent."""
    spoilt: str = ""
    """File that comes with another byte."""
    page: bytes = b""
    """Sent whatever is asked."""
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def got(self) -> list[str]:
        """Names of the files that were sent."""
        return sorted({path.rsplit("/", 1)[-1] for method, path in map(str.split, self.asked) if method == "FILE"})


class _Handler(BaseHTTPRequestHandler):
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
        if hub.status != 200 or hub.name not in url.path:
            self._send(hub.status if hub.status != 200 else 404, b'{"error": "no"}', body, hub.headers)
        elif hub.page:
            self._send(200, hub.page, body, {})
        elif url.path.endswith("/repo/files"):
            rows = [
                {"Path": path, "Type": "blob", "Size": len(data), "Sha256": _sha(data)} for path, data in self._all()
            ]
            rows.append({"Path": "original", "Type": "tree", "Size": 0})
            self._json({"Code": 200, "Data": {"Files": rows}}, body)
        elif url.path.endswith("/repo"):
            self._file(parse_qs(url.query)["FilePath"][0], body)
        elif "/resolve/" in url.path:
            self._file(unquote(url.path.split(f"/resolve/{SHA}/")[1]), body)
        elif "/tree/" in url.path:
            self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _sha(data)[:40]}
                    for path, data in self._all()
                ],
                body,
            )
        else:
            self._json({"id": hub.name, "sha": SHA, "siblings": [{"rfilename": path} for path in hub.files]}, body)

    def _all(self) -> list[tuple[str, bytes]]:
        return list(self.hub.files.items())

    def _json(self, value: object, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), body, {"Content-Type": "application/json"})

    def _file(self, path: str, body: bool) -> None:
        data = self.hub.files[path]
        headers = {"ETag": f'"{_sha(data)[:40]}"', "X-Repo-Commit": SHA}
        if body:
            self.hub.asked.append(f"FILE {path}")
        if path == self.hub.spoilt:
            data = data[:-1] + b"?"
        self._send(200, data, body, headers, half=path == self.hub.cut)

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str], half: bool = False) -> None:
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


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` while the block runs."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
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
