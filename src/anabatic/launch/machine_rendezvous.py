"""The rendezvous of a job on several machines, for torch's agent.

torch's own lets every machine rewrite one pickled state that names all of them, which grows with the cube of their
number, and its store asks the name service for the name of whoever connects (`formatSockAddr` of torch 2.13,
csrc/distributed/c10d/socket.cpp): five seconds each where that does not answer. It imports torch: only the agent and
the preflight may import it.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from anabatic.launch.coordinator import Coordinator
from anabatic.launch.coordinator_client import CoordinatorClient, CoordinatorLost, CoordinatorTimeout
from anabatic.launch.coordinator_server import CoordinatorServer
from anabatic.launch.rendezvous_endpoint import BACKEND


class MachineRendezvous(RendezvousHandler):
    """This machine's part in the rendezvous.

    Args:
        host, port: where machine 0 waits for the others.
        job: job id; machines of another job are refused.
        nodes: fewest and most machines that take part.
        node_rank: this machine's number; None: the order of arrival decides.
        address: of this machine.
        nproc: workers on this machine.
        facts: about this machine, compared with those of the others; parts `recipe` and `versions`.
        join_seconds: timeout for the others to come.
        is_host: this is machine 0.
        on_refused: called with the differences when recipes differ; it must raise.
        on_replaced: called with the address of a later process with the same number; it must raise.

    Attributes:
        first_rank, world_size: rank of the first worker here, and number of all workers, in the last round.
        is_unused_spare: the job has ended while this machine waited for a place.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        job: str,
        nodes: tuple[int, int],
        node_rank: int | None,
        address: str,
        nproc: int,
        facts: Mapping[str, Any],
        join_seconds: float,
        is_host: bool,
        on_refused: Callable[[list[str]], NoReturn],
        on_replaced: Callable[[str], NoReturn],
    ) -> None:
        self.first_rank = self.world_size = 0
        self.is_unused_spare = False
        self._endpoint, self._job, self._nodes, self._is_host = (host, port), job, nodes, is_host
        self._node_rank, self._address, self._nproc, self._facts = node_rank, address, nproc, facts
        self._join_seconds = join_seconds
        self._on_refused, self._on_replaced = on_refused, on_replaced
        self._server: CoordinatorServer | None = None
        self._client: CoordinatorClient | None = None

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job id."""
        return self._job

    @property
    def use_agent_store(self) -> bool:
        """False: the workers of each round meet at a store of their own."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round and return this machine's place in it.

        Raises:
            RendezvousTimeoutError: too few machines came; RendezvousClosedError: the job has ended;
            RendezvousConnectionError: machine 0 is lost, or another program answers there.
        """
        try:
            with socket.socket() as probe:
                probe.bind(("", 0))
                own_port = probe.getsockname()[1]
            place = (self._node_rank, self._address, own_port, self._nproc)
            answer = self._open().join(*place, self._join_seconds)
        except CoordinatorTimeout as error:
            raise RendezvousTimeoutError(str(error)) from error
        except (CoordinatorLost, OSError) as error:
            raise RendezvousConnectionError(str(error)) from error
        if answer["kind"] == "refused":
            self._on_refused(answer["lines"])
        if answer["kind"] == "replaced":
            self._on_replaced(answer["address"])
        if answer["kind"] == "closed":
            self.is_unused_spare = answer["was_spare"]
            raise RendezvousClosedError(f"the job {self._job} has ended")
        self.first_rank, self.world_size = answer["first_rank"], answer["world_size"]
        where = RendezvousStoreInfo(answer["master_addr"], answer["master_port"])
        # The agent asks for a store, and uses it where it divides the ranks and waits for the others at the end:
        # `first_rank` and `wait_for_all` are for these.
        return RendezvousInfo(HashStore(), answer["rank"], answer["size"], where)

    def num_nodes_waiting(self) -> int:
        """Return 1 when the round is over, so that the agent joins the next one; the agent asks ten times a second.

        Raises:
            RendezvousConnectionError: machine 0 is lost.
        """
        try:
            return int(self._client is not None and self._client.is_over())
        except CoordinatorLost as error:
            raise RendezvousConnectionError(str(error)) from error

    def wait_for_all(self, seconds: float) -> bool:
        """Wait until the workers of all machines have finished; return False if they did not, or machine 0 is lost."""
        with suppress(CoordinatorLost):
            return self._client is not None and self._client.wait_for_all(seconds)
        return False

    def is_closed(self) -> bool:
        """Return False: who joins learns it."""
        return False

    def set_closed(self) -> None:
        """Say that the job has ended: no further round begins."""
        if self._server is not None:
            self._server.close_job()
            return
        with suppress(CoordinatorLost):  # machine 0 has gone before
            if self._client is not None:
                self._client.close_job()

    def shutdown(self) -> bool:
        """Close the rendezvous and leave it."""
        self.set_closed()
        self.leave()
        return True

    def leave(self) -> None:
        """Say that this machine goes."""
        if self._client is not None:
            self._client.leave()
            self._client = None
        if self._server is not None:
            self._server.stop()
            self._server = None

    def _open(self) -> CoordinatorClient:
        if self._client is None:
            host, port = self._endpoint
            if self._is_host:
                coordinator = Coordinator(*self._nodes, time.monotonic)
                self._server = CoordinatorServer(port, f"{host}:{port}", self._job, coordinator)
            key = uuid.uuid4().hex[:12]
            self._client = CoordinatorClient(
                "localhost" if self._is_host else host, port, self._job, key, self._facts, self._join_seconds
            )
        return self._client
