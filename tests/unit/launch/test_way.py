"""The way to machine 0: ports that answer, refuse, or are taken, and addresses that lead elsewhere."""

from __future__ import annotations

import socket
import threading

import pytest

from anabatic.cli import launch_hosts
from anabatic.config.launch import Launch
from anabatic.core.errors import ConfigError
from anabatic.launch import cluster, way
from anabatic.testing.spawn import free_port


def test_who_does_not_answer_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "_PAUSE", 0.0)
    ticks = iter(range(0, 1000, 5))
    why = way.await_port("127.0.0.1", port := free_port(), 20, now=lambda: next(ticks))
    assert why == (
        f"machine 0 does not answer at 127.0.0.1:{port}: connection refused: it has not begun, or uses another port"
    )
    assert f"waiting for machine 0 at 127.0.0.1:{port}: connection refused" in capfd.readouterr().err


def test_a_machine_that_begins_later_is_waited_for() -> None:
    port = free_port()
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def begin() -> None:
        server.bind(("127.0.0.1", port))
        server.listen()

    timer = threading.Timer(0.2, begin)
    timer.start()
    assert way.await_port("127.0.0.1", port, 60) == ""
    timer.join()
    server.close()


def test_an_address_that_leads_here_and_one_that_does_not() -> None:
    way.require_arrival("127.0.0.1", free_port())
    with pytest.raises(ConfigError, match="does not lead to this machine, which is machine 0"):
        way.require_arrival("host.invalid", free_port())


def test_two_jobs_on_one_port() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        launch = Launch(max_nodes=2, min_nodes=2, node_rank=0, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ConfigError, match=f"port {port} cannot be opened here: Address already in use"):
            cluster.prepare(launch)
    assert cluster.prepare(launch) == "127.0.0.1"


@pytest.mark.parametrize(("text", "host", "port"), [("a:1", "a", "1"), ("[fe80::1]:29500", "fe80::1", "29500")])
def test_rdzv(text: str, host: str, port: str) -> None:
    assert launch_hosts.meeting(text, None, None) == (host, port)


@pytest.mark.parametrize("text", ["a", ":29500", "a:"])
def test_rdzv_without_a_part(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv is"):
        launch_hosts.meeting(text, None, None)
    with pytest.raises(ConfigError, match="--rdzv stands beside"):
        launch_hosts.meeting("a:1", "b", None)
