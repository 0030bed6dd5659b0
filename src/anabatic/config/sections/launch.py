"""Options of `anabatic launch`: which machines, how many processes, what happens when one fails."""

from __future__ import annotations

from dataclasses import dataclass

from anabatic.config.sections.common import require_setting

MAX_NODES = 9999
"""Machines of a job."""
MAX_SECONDS = 30 * 24 * 3600
"""To wait for them."""


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """How the processes of a job are started and kept alive."""

    nproc: int = 1
    """Processes on this machine, one per device."""
    min_nodes: int = 1
    """Machines with which the job begins, and continues."""
    max_nodes: int = 1
    """Machines that may take part."""
    node_rank: int | None = None
    """Place of this machine among them, from 0; None: the order is found at the start. A job that continues with fewer
    machines takes higher ones too: those are spares."""
    master_addr: str | None = None
    """Name or address of machine 0, which all others reach."""
    master_port: int = 29500
    """Port there on which the machines meet."""
    job_id: str = "anabatic"
    """Keeps machines of different jobs on the same port apart."""
    max_restarts: int = 0
    """How often the processes are started again after a failure."""
    max_requeues: int = 3
    """Starts in a row by Slurm, without a new checkpoint, after which the job ends with an error; 0: any number."""
    hang_seconds: float = 1800.0
    """Seconds without a heartbeat from any process after which they count as hung; 0: never."""
    join_seconds: float = 600.0
    """Seconds to wait for the other machines."""

    def __post_init__(self) -> None:
        require_setting(self.nproc >= 1, f"--nproc is {self.nproc}", "use 1 or more")
        require_setting(self.nproc <= 256, f"--nproc is {self.nproc}", "use at most 256 on one machine, one per device")
        require_setting(
            1 <= self.min_nodes <= self.max_nodes,
            f"{self.min_nodes} to {self.max_nodes} machines",
            "--nnodes takes 2, or 1:4 for a job that continues with fewer",
        )
        require_setting(
            self.max_nodes <= MAX_NODES, f"--nnodes is {self.max_nodes}", f"use at most {MAX_NODES} machines"
        )
        require_setting(
            self.max_nodes == 1 or self.master_addr is not None,
            f"--nnodes is {self.max_nodes}, but where do the machines meet?",
            "give --master-addr with the name or address of machine 0, the same on every machine",
        )
        places = self.max_nodes if self.min_nodes == self.max_nodes else MAX_NODES  # those above are spares
        require_setting(
            self.node_rank is None or 0 <= self.node_rank < places,
            f"--node-rank is {self.node_rank} of {self.max_nodes} machines",
            f"use 0 to {self.max_nodes - 1}, another on every machine; a spare needs none",
        )
        require_setting(
            0 < self.master_port < 65536, f"--master-port is {self.master_port}", "use a port from 1 to 65535"
        )
        require_setting(self.max_restarts >= 0, f"--max-restarts is {self.max_restarts}", "use 0 or more")
        require_setting(self.max_requeues >= 0, f"--max-requeues is {self.max_requeues}", "use 0 (any number) or more")
        require_setting(self.hang_seconds >= 0, f"--hang-seconds is {self.hang_seconds:g}", "use 0 (never) or more")
        require_setting(
            1 <= self.join_seconds <= MAX_SECONDS,
            f"--join-seconds is {self.join_seconds:g}",
            f"use 1 to {MAX_SECONDS} (30 days)",
        )

    @property
    def is_multi_node(self) -> bool:
        """True when the job may span machines."""
        return self.max_nodes > 1
