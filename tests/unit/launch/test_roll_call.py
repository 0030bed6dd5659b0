"""The roll call of machines that never all come."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from anabatic.launch.rendezvous import MachineRendezvous, describe_store_error


def test_a_store_that_goes_ends_the_roll_call_quietly() -> None:
    """An exception in its thread would be a warning here, and a traceback before the agent's own message."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    refused: list[list[str]] = []
    roll = MachineRendezvous("127.0.0.1", store.port, "job", 0, 3, {"recipe": {}, "versions": {}}, refused.append)
    roll.start()
    while not store.check(["anabatic/job/machine/0/facts"]):
        time.sleep(0.05)
    del store
    roll.join(120)
    assert not roll.is_alive() and not refused
    assert roll.describe_missing().endswith("(1 of 3 are here)")


def test_a_roll_call_that_is_ended_waits_no_longer() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    refused: list[list[str]] = []
    roll = MachineRendezvous("127.0.0.1", store.port, "job", 0, 2, {"recipe": {}, "versions": {}}, refused.append)
    roll.start()
    while not store.check(["anabatic/job/machine/0/facts"]):
        time.sleep(0.05)
    roll.stop_waiting()
    assert not roll.is_alive() and not refused and roll.missing_machines == [1]


def test_a_machine_of_another_job_on_the_port_is_none_of_ours() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours, others = (
        MachineRendezvous("127.0.0.1", store.port, job, number, 2, {"recipe": {"out": job}, "versions": {}}, None)
        for job, number in (("ours", 0), ("others", 1))
    )
    assert ours.gather_facts(0.1) == {} and others.gather_facts(0.1) == {}
    assert (ours.missing_machines, others.missing_machines) == ([1], [0])


def test_another_program_on_the_port_is_named() -> None:
    from torch.distributed import DistNetworkError

    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            while True:
                try:
                    with server.accept()[0] as one:
                        one.recv(100)
                        one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                except OSError:  # the test is over
                    return

        threading.Thread(target=talk, daemon=True).start()
        roll = MachineRendezvous(
            "127.0.0.1", server.getsockname()[1], "job", 1, 2, {"recipe": {}, "versions": {}}, None
        )
        with pytest.raises(DistNetworkError) as caught:
            roll.gather_facts(1.0)
        server.shutdown(socket.SHUT_RDWR)
    assert describe_store_error(caught.value) == "what answers there is another program, no training"
    assert describe_store_error(ValueError("a\n b")) == "ValueError: a b"
