"""The rendezvous of a job for torch's agent, on several machines and on one.

torch's own lets every machine rewrite one pickled state that names all of them, which grows with the cube of their
number and runs the code of whoever reaches its port (`DynamicRendezvousHandler` of torch 2.13, on one machine too); its
store asks the name service for the name of whoever connects (`formatSockAddr`, csrc/distributed/c10d/socket.cpp):
five seconds each where that does not answer. It imports torch: only the agent and the preflight may import it.
"""

from __future__ import annotations

import socket
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from torch.distributed import HashStore, TCPStore
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


class JobRendezvous(RendezvousHandler):
    """A rendezvous of ours: torch's interface, and the ranks and the common end that our agent asks for.

    Attributes:
        first_rank, world_size: rank of the first worker here, and number of all workers, in the last round.
    """

    def __init__(self, job: str) -> None:
        self.first_rank = self.world_size = 0
        self._job = job

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return the job id."""
        return self._job

    def is_closed(self) -> bool:
        """Return False: who joins learns it."""
        return False

    @abstractmethod
    def wait_for_all(self, seconds: float) -> bool:
        """Wait until the workers of all machines have finished; return False if they did not, or machine 0 is lost."""

    def leave(self) -> None:
        """Say that this machine goes."""


class LocalRendezvous(JobRendezvous):
    """The rendezvous of a job on one machine: the workers meet at a store that only this machine reaches.

    Args:
        job: job id.
        nproc: number of workers.
    """

    def __init__(self, job: str, nproc: int) -> None:
        super().__init__(job)
        self._nproc = nproc
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """True: the first worker would open its store to all addresses of the machine."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the place of the only machine, and a new store."""
        self.world_size = self._nproc
        with socket.create_server(("127.0.0.1", 0)) as server:
            port, descriptor = server.getsockname()[1], server.detach()  # the store closes it
        self._store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine comes."""
        return 0

    def wait_for_all(self, seconds: float) -> bool:
        """Return True: there are no others."""
        return True

    def set_closed(self) -> None:
        """There is nobody to tell."""

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class MachineRendezvous(JobRendezvous):
    """This machine's part in the rendezvous of several.

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
        secret: of the job; empty: it has none.

    Attributes:
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
        secret: str = "",
    ) -> None:
        super().__init__(job)
        self.is_unused_spare = False
        self._endpoint, self._nodes, self._is_host, self._secret = (host, port), nodes, is_host, secret
        self._node_rank, self._address, self._nproc, self._facts = node_rank, address, nproc, facts
        self._join_seconds = join_seconds
        self._on_refused, self._on_replaced = on_refused, on_replaced
        self._server: CoordinatorServer | None = None
        self._client: CoordinatorClient | None = None

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
                self._server = CoordinatorServer(port, f"{host}:{port}", self._job, coordinator, self._secret)
            key = uuid.uuid4().hex[:12]
            near = "localhost" if self._is_host else host
            self._client = CoordinatorClient(near, port, self._job, key, self._facts, self._join_seconds, self._secret)
        return self._client
