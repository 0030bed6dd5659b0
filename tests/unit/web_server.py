"""An ASGI application on a free port of this machine, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")


@contextmanager
def listening(app: Any, port: int = 0, **options: Any) -> Iterator[str]:
    """Serve `app` in a thread; yield its address. `options`: of uvicorn; port 0 is a free one."""
    options = {"log_level": "warning", "proxy_headers": False, "timeout_graceful_shutdown": 2, **options}
    server = uvicorn.Server(uvicorn.Config(app, port=port, **options))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
