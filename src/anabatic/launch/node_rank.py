"""Fixed node ranks: a machine's number is its rank, and a restarted machine takes its rank again.

torch's rendezvous identifies machines by address and process: it orders them by these, and a restarted machine waits
until the heartbeat of its old process is 15 s old (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class RankedAddress(str):
    """A machine's address that sorts by the machine's number; machines exchange it by pickle.

    Python compares dataclasses (here torch's `_NodeDesc`) field by field, first for equality, then for order.
    """

    node_rank: int

    def __new__(cls, node_rank: int, address: str) -> RankedAddress:
        ranked = super().__new__(cls, address)
        ranked.node_rank = node_rank
        return ranked

    def __reduce__(self) -> Any:
        return RankedAddress, (self.node_rank, str(self))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankedAddress) and (self.node_rank, str(self)) == (other.node_rank, str(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        return self.node_rank < other.node_rank if isinstance(other, RankedAddress) else super().__lt__(other)

    def __hash__(self) -> int:
        return hash((self.node_rank, str(self)))


def take_node_rank(node_rank: int, on_replaced: Callable[[str], NoReturn]) -> None:
    """Make this process machine `node_rank` in torch's rendezvous.

    `DynamicRendezvousHandler._node_desc_generator` of torch 2.13 names machines by their address, and their ranks
    follow from the order of the names; `_RendezvousJoinOp` decides what a machine does next to take part.

    Args:
        on_replaced: called with the address of a later process with the same machine number; it must raise.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    generator = rendezvous.DynamicRendezvousHandler._node_desc_generator
    generate = generator.generate
    generator.generate = lambda local_addr=None: generate(RankedAddress(node_rank, local_addr or ""))  # type: ignore[method-assign]
    join = rendezvous._RendezvousJoinOp.__call__
    known: set[Any] = set()

    def join_replacing_former_self(op: Any, context: Any, deadline: float) -> Any:
        state, node = context.state, context.node
        if node in state.last_heartbeats:
            known.add(node)
        others = [other for other in state.last_heartbeats if other != node and _same_machine(other, node)]
        if others and node in known:
            on_replaced(str(others[0].addr))
        elif others and not state.closed:
            _remove_nodes(state, context.settings, others)
        return join(op, context, deadline)

    rendezvous._RendezvousJoinOp.__call__ = join_replacing_former_self  # type: ignore[method-assign, assignment]


def _same_machine(node: Any, other: Any) -> bool:
    return (
        isinstance(node.addr, RankedAddress)
        and isinstance(other.addr, RankedAddress)
        and node.addr.node_rank == other.addr.node_rank
    )


def _remove_nodes(state: Any, settings: Any, nodes: list[Any]) -> None:
    """Remove machines as torch removes those with an expired heartbeat (`_BackendRendezvousStateHolder._sanitize`)."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _remove_participant_epilogue

    took_part = [node for node in nodes if state.participants.pop(node, None) is not None]
    for node in nodes:
        state.last_heartbeats.pop(node, None)
        state.wait_list.discard(node)
        state.redundancy_list.discard(node)
    if took_part:
        _remove_participant_epilogue(state, settings)
