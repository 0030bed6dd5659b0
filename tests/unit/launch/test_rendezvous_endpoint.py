"""The way to machine 0: ports that answer, refuse, or are taken, and addresses that lead elsewhere."""

from __future__ import annotations

import socket
import threading

import pytest

from anabatic.cli.launch import hosts
from anabatic.config.sections.launch import LaunchSettings
from anabatic.core.errors import ConfigError
from anabatic.launch import rendezvous_endpoint
from anabatic_testing.multiprocess import find_free_port


def test_who_does_not_answer_is_told(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_endpoint, "_PAUSE_SECONDS", 0.0)
    ticks = iter(range(0, 1000, 5))
    why = rendezvous_endpoint.await_port("127.0.0.1", port := find_free_port(), 20, now=lambda: next(ticks))
    assert why == (
        f"machine 0 does not answer at 127.0.0.1:{port}: connection refused: it has not begun, or uses another port"
    )
    assert f"waiting for machine 0 at 127.0.0.1:{port}: connection refused" in capfd.readouterr().err


def test_a_machine_that_begins_later_is_waited_for() -> None:
    port = find_free_port()
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def begin() -> None:
        server.bind(("127.0.0.1", port))
        server.listen()

    timer = threading.Timer(0.2, begin)
    timer.start()
    assert rendezvous_endpoint.await_port("127.0.0.1", port, 60) == ""
    timer.join()
    server.close()


def test_an_address_that_leads_here_and_one_that_does_not() -> None:
    rendezvous_endpoint.require_reachable_address("127.0.0.1", find_free_port())
    with pytest.raises(ConfigError, match="does not lead to this machine, which is machine 0"):
        rendezvous_endpoint.require_reachable_address("host.invalid", find_free_port())


def test_two_jobs_on_one_port() -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        launch = LaunchSettings(max_nodes=2, min_nodes=2, node_rank=0, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(ConfigError, match=f"port {port} cannot be opened here: Address already in use"):
            rendezvous_endpoint.prepare_rendezvous(launch)
    assert rendezvous_endpoint.prepare_rendezvous(launch) == "127.0.0.1"


@pytest.mark.parametrize(("text", "host", "port"), [("a:1", "a", "1"), ("[fe80::1]:29500", "fe80::1", "29500")])
def test_rdzv(text: str, host: str, port: str) -> None:
    assert hosts.parse_rendezvous(text, None, None) == (host, port)


@pytest.mark.parametrize("text", ["a", ":29500", "a:"])
def test_rdzv_without_a_part(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv is"):
        hosts.parse_rendezvous(text, None, None)
    with pytest.raises(ConfigError, match="--rdzv cannot be combined"):
        hosts.parse_rendezvous("a:1", "b", None)
