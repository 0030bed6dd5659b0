"""Objects that processes of a job send each other: data, and what torch's checkpoints consist of."""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import importlib
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

from anabatic.core import errors
from anabatic.core.errors import Failure

_CHECKPOINT_MODULES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._state_dict_utils",
    "anabatic.train.checkpoint.",
)
"""Plans of torch's checkpoints and what became of them go from rank to rank (torch/distributed/checkpoint/utils.py,
`_DistWrapper`)."""


def get_enum_member(kind: Any, name: Any) -> enum.Enum:
    """Return a member by its name, as the pickles of Python 3.11.0 to 3.11.3 have it: by the builtin getattr.

    Raises:
        UnpicklingError: it is anything but a member of an enumeration.
    """
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum) and type(name) is str and name in kind.__members__):
        raise pickle.UnpicklingError(f"{kind!r} has no member {name!r}")
    return kind.__members__[name]


def _find_torch_layout(name: str) -> torch.layout:
    """Return the memory layout that torch prints as this name.

    Raises:
        KeyError: there is none.
    """
    return {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}[name]


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("builtins", "getattr"): get_enum_member,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _find_torch_layout,
    ("traceback", "StackSummary"): traceback.StackSummary,
    ("traceback", "FrameSummary"): traceback.FrameSummary,
}


class _GroupUnpickler(pickle.Unpickler):
    """Builds plain objects, the parts of checkpoints and exceptions alone.

    Raises:
        Failure: the pickle names anything else.
    """

    def find_class(self, module: str, name: str, /) -> Any:
        """Return an allowed class, or a dtype of torch."""
        found = _ALLOWED.get((module, name)) or _find_known_class(module, name)
        if found is None:
            raise Failure(
                f"a process sent {module}.{name}, which no process of this job sends",
                "another user of this machine, or a machine that does not belong to the job, has joined it: see the "
                "guide on ports and the network",
            )
        return found


def _find_known_class(module: str, name: str) -> Any:
    if module == "torch":
        found = vars(torch).get(name)
        return found if isinstance(found, torch.dtype) else None
    if module in (builtins.__name__, errors.__name__):
        found = vars(sys.modules[module]).get(name)
        return found if isinstance(found, type) and issubclass(found, Exception) else None
    if module.startswith(_CHECKPOINT_MODULES) and "." not in name:
        found = vars(importlib.import_module(module)).get(name)
        return found if _is_plain_class(found) else None
    return None


def _is_plain_class(found: Any) -> bool:
    """Return whether a class holds fields and does nothing else when it is built."""
    if not isinstance(found, type):
        return False
    is_named_tuple = issubclass(found, tuple) and hasattr(found, "_fields")
    return dataclasses.is_dataclass(found) or issubclass(found, (enum.Enum, BaseException)) or is_named_tuple


def refuse_code() -> None:
    """Let torch's collectives of objects build data alone, in this process.

    They unpickle what a group sends, and whoever reaches its ports before the last rank can join a group.
    """
    distributed_c10d._unpickler = _GroupUnpickler  # type: ignore[attr-defined]
