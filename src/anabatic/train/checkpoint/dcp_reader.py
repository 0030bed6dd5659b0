"""Reads what torch.distributed.checkpoint has written, as data: nothing in a checkpoint folder can run code.

torch's index of a checkpoint, `.metadata`, is a pickle, and torch's reader calls whatever function it names. Here an
index may name the classes that an index consists of, and nothing else. torch would also unpickle entries that are no
tensors; a checkpoint of ours has none, so they are refused. The files of tensors are read by torch with
`weights_only`. Imported when the first checkpoint is read: it imports sharded tensors.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from anabatic.core.errors import BROKEN_DATA_ERRORS, CheckpointError
from anabatic.parallel.group_objects import get_enum_member
from anabatic.train.checkpoint.manifest import USE_ANOTHER

INDEX_FILE = ".metadata"
_NOT_DATA = "a checkpoint of ours holds data only: ask who gave you this one, and use another"


class _SavedPath(PurePosixPath):
    """Where a checkpoint was written, as the index says; nothing looks there."""


_INDEX_CLASSES: tuple[type, ...] = (
    dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.TensorProperties,
    dcp.MetadataIndex, dcp.StorageMeta, dcp._MEM_FORMAT_ENCODING, _StorageInfo,
)  # fmt: skip
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _INDEX_CLASSES},
    ("builtins", "getattr"): get_enum_member,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch.serialization", "_get_layout"): _LAYOUTS.__getitem__,
    # Python 3.10 to 3.12 and from 3.14; 3.13.
    ("pathlib", "PosixPath"): _SavedPath,
    ("pathlib._local", "PosixPath"): _SavedPath,
}
"""What an index of torch 2.7.1 to 2.13 names, beside the dtypes of torch."""
_SHARED: tuple[Any, ...] = (*_INDEX_CLASSES, _SavedPath, *dcp._MEM_FORMAT_ENCODING)
"""Objects of this process that a pickle gets hold of and could set attributes of."""


class _IndexUnpickler(pickle.Unpickler):
    """Builds objects of the allowed classes alone.

    Raises:
        CheckpointError: the pickle names anything else.
    """

    def __init__(self, path: Path, file: Any) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str, /) -> Any:
        """Return an allowed class or a dtype."""
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise CheckpointError(
                f"{self._path} is not read: it names {module}.{name}, which is no part of a checkpoint's index",
                _NOT_DATA,
            )
        return found


@contextmanager
def _unchanged_classes(path: Path) -> Iterator[None]:
    """Undo what a pickle has set in the classes that it names, and refuse it.

    Raises:
        CheckpointError: it has.
    """
    before = [dict(vars(shared)) for shared in _SHARED]
    try:
        yield
    finally:
        changed = [shared for shared, known in zip(_SHARED, before, strict=True) if _restore(shared, known)]
    if changed:
        raise CheckpointError(f"{path} is not read: it changes {changed[0]}, a class of this program", _NOT_DATA)


def _restore(shared: Any, known: Mapping[str, Any]) -> bool:
    """Give an object the attributes that it had; return whether any was another."""
    now = dict(vars(shared))
    names = {name for name in now.keys() | known.keys() if now.get(name, now) is not known.get(name, now)}
    names.discard("__slotnames__")  # Python's own note, when any thread pickles an object of the class
    for name in names:
        if name in known:
            setattr(shared, name, known[name])
        else:
            delattr(shared, name)
    return bool(names)


def read_index(path: Path) -> dcp.Metadata:
    """Return torch's index of the checkpoint folder `path`.

    Raises:
        CheckpointError: it cannot be read, is damaged, or is anything but an index of tensors.
    """
    file = path / INDEX_FILE
    try:
        with _unchanged_classes(file), open(file, "rb") as stream:
            index = _IndexUnpickler(file, stream).load()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}", USE_ANOTHER) from error
    except (pickle.UnpicklingError, EOFError, MemoryError, RecursionError, *BROKEN_DATA_ERRORS) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}", USE_ANOTHER) from error
    try:
        fault = _find_index_fault(index)
    except BROKEN_DATA_ERRORS as error:  # a dataclass that lacks its fields
        fault = str(error) or type(error).__name__
    if fault:
        raise CheckpointError(f"{file} is no index of tensors: {fault}", USE_ANOTHER)
    if not isinstance(index.storage_meta, dcp.StorageMeta):
        index.storage_meta = dcp.StorageMeta()
    found: dcp.Metadata = index
    return found


def _find_index_fault(index: Any) -> str:
    """Return what an index has that ours never have, or an empty string. Shards are checked many at a time."""
    if type(index) is not dcp.Metadata or not isinstance(index.state_dict_metadata, dict):
        return f"it is a {type(index).__name__}"
    for name, entry in index.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not dcp.TensorStorageMetadata:
            return f"{name} is a {type(entry).__name__}"
        properties = entry.properties
        if type(properties) is not dcp.TensorProperties or type(properties.dtype) is not torch.dtype:
            return f"{name} has no dtype"
        if type(entry.size) is not torch.Size or set(map(type, entry.chunks)) - {dcp.ChunkStorageMetadata}:
            return f"{name} has no shape"
    places = index.storage_data
    if not isinstance(places, dict) or set(map(type, places)) - {dcp.MetadataIndex}:
        return "it does not say which file holds which tensor"
    return "" if set(map(type, places.values())) <= {_StorageInfo} else "it does not say where the tensors are"


class DataReader(FileSystemReader):
    """torch's reader of a checkpoint folder, which reads data alone.

    Raises:
        CheckpointError: as `read_index`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder, self._index = path, read_index(path)

    def read_metadata(self) -> dcp.Metadata:  # type: ignore[override, unused-ignore]
        """Return the index. Without arguments: torch then does not look for an index of one rank."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors of a plan.

        Raises:
            CheckpointError: one of them is a pickled object, or lies outside of the folder.
        """
        for item in plan.items:
            fault = self._find_item_fault(item)
            if fault:
                raise CheckpointError(f"{self._folder} is not read: {item.dest_index.fqn} {fault}", _NOT_DATA)
        found: Future[None] = super().read_data(plan, planner)
        return found

    def _find_item_fault(self, item: ReadItem) -> str:
        if item.type != LoadItemType.TENSOR:
            return "is a pickled object, not a tensor"
        place = self.storage_data.get(item.storage_index)
        if place is None:
            return "is in none of its files"
        name = place.relative_path
        if type(name) is not str or Path(name).name != name or "\0" in name:
            return f"is in another folder: {name}"
        if getattr(place, "transform_descriptors", None):
            return f"needs {place.transform_descriptors}, which we never write"
        if type(place.offset) is not int or type(place.length) is not int or min(place.offset, place.length) < 0:
            return f"has no place in {name}"
        return ""
