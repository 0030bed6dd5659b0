"""Older releases of torch: gradients of a CPU's processes are averaged there, too."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch.distributed as dist

from anabatic.core.errors import Failure
from anabatic.parallel import sharding

COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


class Four:
    """A group of four processes."""

    def size(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((None, None), (1.0, 4.0)),
        ((None, None, dist.ReduceOp.AVG, dist.ReduceOp.AVG), (1.0, 4.0, dist.ReduceOp.SUM, dist.ReduceOp.SUM)),
    ],
    ids=["2.7", "2.8"],
)
def test_sums_are_divided(monkeypatch: pytest.MonkeyPatch, known: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    collectives = importlib.import_module(COLLECTIVES)
    monkeypatch.setattr(collectives, sharding._DIVISORS, lambda *args, **options: known)
    sharding._patch_to_average.__wrapped__()
    assert getattr(collectives, sharding._DIVISORS)(Four(), None, "fp32") == expected


def test_a_torch_that_cannot_be_told_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{COLLECTIVES}.{sharding._DIVISORS}")
    with pytest.raises(Failure, match="sums gradients"):
        sharding._patch_to_average.__wrapped__()
