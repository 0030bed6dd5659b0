"""TBE, CANN's compiler of operators, is not simulated: its names can be imported and raise when they are used.

What the platform says about the chip is real (`tbe.common.platform`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from acl._binding import Missing, find_missing

_PREFIX = "tbe."


class _MissingModules(MetaPathFinder, Loader):
    """Finds every submodule of tbe that there is no file for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(_PREFIX) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = find_missing(module.__name__)  # type: ignore[method-assign]


sys.meta_path.append(_MissingModules())


def __getattr__(name: str) -> Missing:
    return find_missing("tbe")(name)
