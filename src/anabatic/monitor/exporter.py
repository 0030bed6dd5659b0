"""The web server that Prometheus asks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from anabatic.core.errors import Failure


@contextmanager
def serve_metrics(where: tuple[str, int], text: Callable[[], str]) -> Iterator[int]:
    """Answer `GET /metrics` with `text()` until the block ends; yield the port.

    Raises:
        Failure: the port is taken, or not permitted.
    """

    class MetricsHandler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:  # the name is http.server's
            known = self.path.split("?")[0] in ("/", "/metrics")
            body = text().encode() if known else b"the figures are at /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing: the terminal shows figures."""

    class MetricsServer(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET

    try:
        server = MetricsServer(where, MetricsHandler)
    except OSError as error:
        raise Failure(
            f"cannot listen on {where[0]}:{where[1]}: {error.strerror or error}", "choose another --prom PORT"
        ) from error
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="anabatic-exporter", daemon=True).start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
