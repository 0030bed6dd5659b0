"""A machine that comes back takes the place that was its own, whether the others have seen it go or not.

torch's own rendezvous in memory. It holds no machine for lost here, however long that is away: what the tests see come
back does not come back because a time is over.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from anabatic.launch.local import elastic_agent

Handler = dynamic_rendezvous.DynamicRendezvousHandler
NEVER = timedelta(days=1)


class Replaced(Exception):
    """Another process has taken the place."""


def replaced(address: str) -> NoReturn:
    raise Replaced(address)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, str], Handler]]:
    """Makes one process after another of the machines with these numbers and addresses."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(Handler._node_desc_generator, "generate", Handler._node_desc_generator.generate)
    monkeypatch.setattr(dynamic_rendezvous._RendezvousJoinOp, "__call__", dynamic_rendezvous._RendezvousJoinOp.__call__)
    elastic_agent.take_node_rank(0, replaced)
    store, found = HashStore(), []
    settings = dynamic_rendezvous.RendezvousSettings(
        "job", 2, 2, dynamic_rendezvous.RendezvousTimeout(join=timedelta(seconds=60)), NEVER, 3
    )

    def make(number: int, address: str) -> Handler:
        node = dynamic_rendezvous._NodeDesc(elastic_agent.RankedAddress(number, address), len(found), 0)
        state = dynamic_rendezvous._BackendRendezvousStateHolder(C10dRendezvousBackend(store, "job"), settings)
        found.append(Handler(node, settings, "c10d", store, state))
        return found[-1]

    yield make
    for handler in found:
        handler._stop_heartbeats()


class Joining(threading.Thread):
    """A process that waits for the others."""

    def __init__(self, handler: Handler) -> None:
        super().__init__(daemon=True)
        self.handler = handler
        self.info: RendezvousInfo | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.info = self.handler.next_rendezvous()
        except Exception as error:
            self.error = error

    def rank(self) -> int:
        self.join(120)
        assert self.error is None and self.info is not None and self.info.world_size == 2
        return self.info.rank


def test_a_place_sorts_by_its_number_and_survives_the_way() -> None:
    there = pickle.loads(pickle.dumps(elastic_agent.RankedAddress(10, "10.0.0.1")))
    assert there == elastic_agent.RankedAddress(10, "10.0.0.1") != "10.0.0.1" and there.node_rank == 10
    assert sorted([there, elastic_agent.RankedAddress(9, "10.0.0.2")])[1] is there


def test_back_before_the_others_have_seen_it_go(machine: Callable[[int, str], Handler]) -> None:
    one, zero = machine(1, "10.0.0.1"), machine(0, "10.0.0.2")
    assert [joining.rank() for joining in (Joining(one), Joining(zero))] == [1, 0]
    again = Joining(machine(1, "10.0.0.1"))  # the first one was killed: it says no more
    deadline = time.monotonic() + 60
    while not zero.num_nodes_waiting():  # by this torch's agent knows that the workers must start again
        assert time.monotonic() < deadline, "it waits for a sign of its former self, which will not come"
        time.sleep(0.05)
    assert [Joining(zero).rank(), again.rank()] == [0, 1]


def test_back_when_the_others_wait_for_it(machine: Callable[[int, str], Handler]) -> None:
    one, zero = machine(1, "10.0.0.1"), machine(0, "10.0.0.2")
    assert [joining.rank() for joining in (Joining(one), Joining(zero))] == [1, 0]
    waiting = Joining(zero)
    deadline = time.monotonic() + 60
    while not one.num_nodes_waiting():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = Joining(machine(1, "10.0.0.3"))  # a pod that is made anew has another address
    assert [waiting.rank(), again.rank()] == [0, 1]


def test_one_that_was_replaced_does_not_push_back(machine: Callable[[int, str], Handler]) -> None:
    one = machine(1, "10.0.0.1")
    cut_off = Joining(one)
    deadline = time.monotonic() + 60
    while one._this_node not in one._state_holder.state.last_heartbeats:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    again = Joining(machine(1, "10.0.0.3"))
    cut_off.join(120)
    assert isinstance(cut_off.error, Replaced) and str(cut_off.error) == "10.0.0.3"
    assert [Joining(machine(0, "10.0.0.2")).rank(), again.rank()] == [0, 1]
    with pytest.raises(Replaced):
        one.next_rendezvous()
