"""The address that the server listens at, and the signals that end it."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import pytest

import anabatic
from anabatic.core.errors import ConfigError
from anabatic.infer.server import listening


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux cuts off who reads nothing")
def test_a_client_that_reads_nothing_is_cut_off(monkeypatch):
    monkeypatch.setattr(listening, "UNREAD_TIMEOUT_SECONDS", 0.3)
    with (
        listening.open_listening_socket("127.0.0.1", 0) as server,
        socket.create_connection(server.getsockname()),
    ):
        served, _ = server.accept()
        with served, pytest.raises(OSError, match="timed out"):
            while True:
                served.sendall(bytes(2**20))


def test_connections_are_known_to_be_tcp():
    """asyncio sets TCP_NODELAY only on sockets with this protocol; without it every answer of two parts waits."""
    with (
        listening.open_listening_socket("127.0.0.1", 0) as server,
        socket.create_connection(server.getsockname()),
    ):
        served, _ = server.accept()
        with served:
            assert served.proto == socket.IPPROTO_TCP


def test_a_port_that_is_taken():
    with (
        listening.open_listening_socket("127.0.0.1", 0) as first,
        pytest.raises(ConfigError, match="cannot be opened for listening"),
    ):
        listening.open_listening_socket("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("host", ["nowhere.invalid.", "a..b", "a\0b", "::g", "192.0.2.1"])
def test_a_host_that_is_none_of_this_machine(host):
    with pytest.raises(ConfigError, match="cannot be opened for listening"):
        listening.open_listening_socket(host, 0)


def test_a_signal_that_uvicorn_raises_again_ends_nothing():
    before = signal.getsignal(signal.SIGTERM)
    with listening.ignore_reraised_signal():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_headers_of_proxies_are_off(monkeypatch):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    config = listening.make_server_config(lambda *_: None, 15.0, 3)
    config.load()
    assert not config.proxy_headers and config.loaded_app.__class__.__name__ != "ProxyHeadersMiddleware"


def test_every_server_has_these_settings():
    root = Path(anabatic.__file__).parent
    texts = {file.relative_to(root).as_posix(): file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
    assert [name for name, text in texts.items() if "uvicorn.Config(" in text] == ["infer/server/listening.py"]
    assert not [name for name, text in texts.items() if "uvicorn.run(" in text]


@pytest.mark.parametrize(("mode", "open_to"), [(0o600, False), (0o640, True), (0o604, True), (0o622, False)])
def test_a_file_of_secrets_that_others_may_read_is_named(mode, open_to, tmp_path, caplog):
    path = tmp_path / "keys"
    path.write_text("sk-one\n", encoding="utf-8")
    path.chmod(mode)
    listening.warn_of_open_secret(path)
    assert ("chmod 600" in caplog.text) is open_to
    assert not listening.can_others_read(stat.S_IFCHR | 0o666) and not listening.can_others_read(os.stat("/").st_mode)
