"""Captured graphs: the launches of a function, recorded once and replayed as one launch on the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anabatic.device.table import DEVICES


def has_graphs(device: torch.device) -> bool:
    """Return whether the device table uses graphs on devices of this type, and torch has them."""
    name = DEVICES[device.type].graph_class
    return bool(name) and hasattr(torch.get_device_module(device.type), name)


class CapturedGraph:
    """What `call` launches, captured at once after a first run that loads kernels and allocates their workspaces.

    Inputs are tensors that `call` closes over; they must stay where they are, and a replay reads what they hold then.

    Args:
        device: one for which `has_graphs` holds.
        call: makes the same launches each time, and waits for nothing; it runs twice.
        pool: memory shared with another graph, of which only one result is needed at a time.

    Attributes:
        outputs: what `call` returned; each replay writes them anew.

    Raises:
        RuntimeError: an operator cannot be captured, or waits for the device.
    """

    def __init__(self, device: torch.device, call: Callable[[], tuple[Tensor, ...]], pool: Any = None) -> None:
        module: Any = torch.get_device_module(device.type)
        call()
        self._graph = getattr(module, DEVICES[device.type].graph_class)()
        with module.graph(self._graph, pool=pool):
            self.outputs = call()

    @property
    def pool(self) -> Any:
        """The memory of the graph, for another one to share."""
        return self._graph.pool()

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()
