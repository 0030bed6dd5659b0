"""Parameters of a model that other stages of a pipeline hold.

A stage keeps all modules, so that every parameter has its name in the whole model. Parameters of other stages are no
parameters of their modules here: they stay on the meta device, as plain attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabatic.parallel.mesh import RankGroup
from anabatic.parallel.sharded_tensors import gather_full_tensor
from anabatic.parallel.sharding import ABSENT, get_absent

_OWNERS = "_anabatic_stage_of_parameters"


def remove_absent(model: nn.Module, owners: dict[str, set[int]], rank: int) -> None:
    """Take the parameters of other stages out of a model on the meta device.

    Args:
        owners: name -> stages that hold the parameter, tied ones under each of their names.
        rank: number of this stage.
    """
    absent = {name: p for name, p in model.named_parameters(remove_duplicate=False) if rank not in owners[name]}
    for name, parameter in absent.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        del module._parameters[own]
        module.__dict__[own] = parameter
    model.__dict__[ABSENT], model.__dict__[_OWNERS] = absent, owners


@contextmanager
def gathered_parameters(model: nn.Module, group: RankGroup, trained_only: bool = False) -> Iterator[None]:
    """Hold the parameters of all stages in the memory of the first process's host.

    Every rank calls this. Ranks that share a stage's parameters gather them; the first process of all, which writes the
    model, receives them whole.

    Args:
        trained_only: frozen parameters stay where they are.
    """
    absent = get_absent(model)
    if group.size == 1 or not model.__dict__.get(_OWNERS):
        yield
        return
    with torch.no_grad():
        filled = _exchange_parameters(model, group, trained_only)
    for name, value in filled.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        module.__dict__.pop(own)
        module._parameters[own] = value
    try:
        yield
    finally:
        for name in filled:
            owner, _, own = name.rpartition(".")
            module = model.get_submodule(owner)
            del module._parameters[own]
            module.__dict__[own] = absent[name]


def _exchange_parameters(model: nn.Module, group: RankGroup, trained_only: bool) -> dict[str, nn.Parameter]:
    owners: dict[str, set[int]] = model.__dict__[_OWNERS]
    own, absent = dict(model.named_parameters(remove_duplicate=False)), get_absent(model)
    process_group = group.process_group or dist.group.WORLD
    assert process_group is not None
    ranks = [dist.get_global_rank(process_group, rank) for rank in range(group.size)]
    device = next(iter(own.values())).device
    filled: dict[str, nn.Parameter] = {}
    for name in sorted(owners):
        source = min(owners[name])
        shape: Tensor = own[name] if name in own else absent[name]
        if source == 0 or (trained_only and not shape.requires_grad):
            continue
        whole = gather_full_tensor(own[name].detach()) if group.rank == source else None
        if ranks[0]:  # the copy of another process
            continue
        if whole is not None:
            dist.send(whole.contiguous(), 0, group=process_group)
        elif group.rank == 0:
            value = torch.empty(shape.shape, dtype=shape.dtype, device=device)
            dist.recv(value, ranks[source], group=process_group)
            filled[name] = nn.Parameter(value.cpu(), requires_grad=shape.requires_grad)
    return filled
