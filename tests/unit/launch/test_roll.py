"""The roll call of machines that never all come."""

from __future__ import annotations

import time

from anabatic.launch.roll import Roll


def test_a_store_that_goes_ends_the_roll_call_quietly() -> None:
    """An exception in its thread would be a warning here, and a traceback before the agent's own message."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    refused: list[list[str]] = []
    roll = Roll("127.0.0.1", store.port, 0, 3, {"recipe": {}, "versions": {}}, refused.append)
    roll.start()
    while not store.check(["anabatic/machine/0/facts"]):
        time.sleep(0.05)
    del store
    roll.join(120)
    assert not roll.is_alive() and not refused
    assert roll.waiting().endswith("(1 of 3 are here)")
