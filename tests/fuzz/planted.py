"""Files that create a marker when anything unpickles them, in the forms in which pickles come."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Planted:
    """Its pickle calls `os.mkdir` with the path of the marker."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self._marker),)


def pickled(marker: Path, protocol: int = pickle.DEFAULT_PROTOCOL) -> bytes:
    """The pickle itself."""
    return pickle.dumps(Planted(marker), protocol)


def torch_file(marker: Path) -> bytes:
    """A file of `torch.save`: a zip with a pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled(marker, 2))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return file.getvalue()


def numpy_file(marker: Path) -> bytes:
    """An array of objects (numpy's `lib/format.py`): a heading, then a pickle."""
    heading = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    heading += b" " * (-(len(heading) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(heading).to_bytes(2, "little") + heading + pickled(marker)


def every_form(marker: Path) -> Iterator[tuple[str, bytes]]:
    """Each form, with its name."""
    yield from ((f"pickle {protocol}", pickled(marker, protocol)) for protocol in (0, pickle.DEFAULT_PROTOCOL))
    yield "torch.save", torch_file(marker)
    yield "numpy", numpy_file(marker)
    array = io.BytesIO()
    with zipfile.ZipFile(array, "w") as archive:
        archive.writestr("a.npy", numpy_file(marker))
    yield "npz", array.getvalue()
