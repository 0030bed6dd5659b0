"""Functions of the simulated runtime under their Python names, and refusals of everything else.

Names and results are those of the pyACL reference (hiascend.com, CANN 9.0, runtimeapi/aclpythondevg): what a C function
writes comes first, its error code last; addresses and handles are integers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

_TYPES: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
    "size": ctypes.c_size_t,
    "address": ctypes.c_void_p,
}

library = ctypes.CDLL("libascendcl.so")


class Missing:
    """A name that pyACL may have: it can be looked up, and says what it is when it is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not simulated (anabatic sim)")

    def __repr__(self) -> str:
        return f"<{self._name}: not simulated>"


def find_missing(module: str) -> Callable[[str], Missing]:
    """Return a module's `__getattr__`."""

    def find(name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return Missing(f"{module}.{name}")

    return find


def bind(python_name: str, c_name: str, signature: str) -> Callable[..., Any]:
    """Return a Python function for a C function; `signature` lists the C arguments, results with `>` before them."""
    function = getattr(library, c_name)
    function.restype = ctypes.c_int32
    words = signature.split()
    inputs = sum(not word.startswith(">") for word in words)

    def call(*arguments: Any) -> Any:
        if len(arguments) != inputs:
            raise TypeError(f"{python_name} takes {inputs} arguments, {len(arguments)} were given")
        rest = iter(arguments)
        results, passed = [], []
        for word in words:
            if word.startswith(">"):
                results.append(_TYPES[word[1:]]())
                passed.append(ctypes.byref(results[-1]))
            else:
                passed.append(_TYPES[word](next(rest)))
        code = function(*passed)
        return (*(result.value or 0 for result in results), code) if results else code

    call.__name__ = call.__qualname__ = python_name.rpartition(".")[2]
    call.__doc__ = f"Call {c_name} of the simulated runtime."
    return call
