"""acl.util: addresses of host memory as numbers, and back."""

from __future__ import annotations

import ctypes
from typing import Any

from acl._binding import find_missing

__all__ = ["bytes_to_ptr", "numpy_to_ptr", "ptr_to_bytes"]
__getattr__ = find_missing("acl.util")


def bytes_to_ptr(data: bytes) -> int:
    """Return the address of the bytes; it is valid as long as they are."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


def ptr_to_bytes(address: int, size: int) -> bytes:
    """Return a copy of `size` bytes at an address of the host."""
    return ctypes.string_at(address, size)


def numpy_to_ptr(array: Any) -> int:
    """Return the address of a numpy array's data."""
    return int(array.ctypes.data)
