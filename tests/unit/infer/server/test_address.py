"""The address that the server listens at, and the signals that end it."""

from __future__ import annotations

import signal
import socket

import pytest

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
