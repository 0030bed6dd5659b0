"""The folder of a machine in host memory that holds copies of the training's state: sealed files, none half.

A part is two files: `NAME-STEP.bin` with tensors one after the other, and `NAME-STEP.json`, the seal: what is in it,
its checksum and of which run it is. The seal is written last and by a rename; a part without a seal does not exist.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabatic.core import json_reader, log
from anabatic.core.errors import CheckpointError, Failure
from anabatic.core.formatting import format_size
from anabatic.train.checkpoint.manifest import compute_crc32

MEMORY_DIR_VARIABLE = "ANABATIC_MEMORY_DIR"
DEFAULT_MEMORY_DIR = "/dev/shm"
FOLDER_PREFIX = "anabatic-copies-"
_ALIGNMENT = 64
_BLOCK_BYTES = 64 << 20
_CHECKING_THREADS = 8
_SHARD_NAME = re.compile(r"(?P<key>shared|rank-\d+)\.(?P<kind>own|held|\d+)-(?P<step>\d+)\.(json|bin)")


def get_memory_folder(run: Path) -> Path:
    """Return this machine's folder for the copies of a run: below `$ANABATIC_MEMORY_DIR`, else `/dev/shm`."""
    name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return Path(os.environ.get(MEMORY_DIR_VARIABLE) or DEFAULT_MEMORY_DIR) / f"{FOLDER_PREFIX}{name}"


@dataclass(frozen=True)
class StateShard:
    """A sealed part: its key (`shared` or `rank-<n>`), its step, and its name without suffix."""

    key: str
    step: int
    name: str


class ShardBuffer:
    """A file of fixed size in memory, mapped; filled by tensors or by bytes of another machine."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        try:
            with open(path, "wb+", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                if size:  # reserved at once: a page that cannot be had later would end the process by SIGBUS
                    os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size) if size else None
        except OSError as error:
            raise Failure(
                f"a copy of {format_size(size)} does not fit into {path.parent}: {error.strerror}",
                f"give {MEMORY_DIR_VARIABLE} a larger folder in memory, or set --save.memory-every 0",
            ) from error
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8) if self._map else torch.empty(0, dtype=torch.uint8)

    def compute_crc32(self) -> int:
        """Return the checksum of the content."""
        value, view = 0, memoryview(self._map or b"")
        for start in range(0, self.size, _BLOCK_BYTES):
            value = zlib.crc32(view[start : start + _BLOCK_BYTES], value)
        return value


def plan_layout(tensors: Mapping[str, Tensor]) -> tuple[list[dict[str, Any]], int]:
    """Return where each tensor goes in a part, and the part's bytes."""
    layout, offset = [], 0
    for name, tensor in tensors.items():
        row = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        layout.append({**row, "offset": offset, "bytes": tensor.nbytes})
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return layout, offset


class MemoryStore:
    """Copies of one run in this machine's memory.

    Args:
        run_id: of the run; parts of another run in the same folder are not seen.
        setup: what else must be equal: the number of processes and how the model is divided.

    Raises:
        Failure: the folder cannot be made, or is another user's.
    """

    def __init__(self, folder: Path, run_id: str, setup: str) -> None:
        self.folder, self._identity = folder, {"version": 1, "run": run_id, "setup": setup}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = folder.stat().st_uid
        except OSError as error:
            raise Failure(
                f"{folder} cannot hold copies in memory: {error.strerror}",
                f"give {MEMORY_DIR_VARIABLE} another folder, or set --save.memory-every 0",
            ) from error
        if owner != os.getuid() or folder.is_symlink():
            raise Failure(
                f"{folder} cannot hold copies in memory: it belongs to another user",
                f"give {MEMORY_DIR_VARIABLE} a folder of your own",
            )

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[ShardBuffer, dict[str, Any]]:
        """Copy tensors into an unsealed part; return it with what its seal will say of it, but for the checksum."""
        layout, size = plan_layout(tensors)
        part = ShardBuffer(self.folder / f"{name}.bin", size)
        for row, tensor in zip(layout, tensors.values(), strict=True):
            _view_tensor(part.bytes, row).copy_(tensor)
        return part, {**self._identity, "bytes": size, "tensors": layout}

    def seal(self, name: str, seal: Mapping[str, Any]) -> None:
        """Make a part exist."""
        temporary = self.folder / f".{name}.tmp"
        temporary.write_text(json.dumps(seal), encoding="utf-8")
        os.replace(temporary, self.folder / f"{name}.json")

    def read_seal(self, name: str) -> dict[str, Any]:
        """Return the seal of a part.

        Raises:
            OSError, ValueError: it is not there, or torn.
        """
        found: dict[str, Any] = json_reader.read_json_file(self.folder / f"{name}.json")
        return found

    def open_shard(self, name: str) -> Tensor:
        """Return the bytes of a sealed part, mapped."""
        with open(self.folder / f"{name}.bin", "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                return torch.empty(0, dtype=torch.uint8)
            return torch.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY), dtype=torch.uint8)

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a sealed part; they share the mapped memory."""
        content = self.open_shard(name)
        return {row["name"]: _view_tensor(content, row) for row in self.read_seal(name)["tensors"]}

    def list_whole_shards(self) -> list[StateShard]:
        """Return the parts of this run whose content matches its checksum."""
        found = []
        for path in sorted(self.folder.glob("*.json")):
            match = _SHARD_NAME.fullmatch(path.name)
            if match:
                found.append(StateShard(match["key"], int(match["step"]), path.stem))
        with ThreadPoolExecutor(_CHECKING_THREADS) as pool:
            faults = list(pool.map(self._find_fault, found))
        for fault in dict.fromkeys(filter(None, faults)):
            log.warn(f"copies in memory in {self.folder} are not used: {fault}")
        return [part for part, fault in zip(found, faults, strict=True) if not fault]

    def _find_fault(self, part: StateShard) -> str:
        """Return why a part cannot be used, or an empty string."""
        path = self.folder / f"{part.name}.bin"
        try:
            seal = self.read_seal(part.name)
            if seal.get("run") != self._identity["run"]:
                return "they are of an earlier run in this folder"
            if seal.get("setup") != self._identity["setup"] or seal.get("version") != self._identity["version"]:
                return "another number of processes, or other settings of `parallel`, made them"
            if path.stat().st_size != seal["bytes"] or compute_crc32(path) != seal["crc32"]:
                return f"{path.name} does not match its checksum"
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{part.name}.json is torn, or its part is missing"
        return ""

    def remove_except(self, names: Iterable[str]) -> None:
        """Remove all parts but those of the names, and what was left unsealed."""
        kept = {f"{name}{suffix}" for name in names for suffix in (".bin", ".json")}
        for path in sorted(self.folder.glob("*"), reverse=True):  # the seal before its part
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def remove_older(self, step: int) -> None:
        """Remove the parts of the steps before `step`; later ones may be in the making."""
        for path in sorted(self.folder.glob("*"), reverse=True):
            match = _SHARD_NAME.fullmatch(path.name)
            if match and int(match["step"]) < step:
                path.unlink(missing_ok=True)


def remove_memory_folder(run: Path) -> None:
    """Remove this machine's copies of a run."""
    shutil.rmtree(get_memory_folder(run), ignore_errors=True)


def copy_tensors(found: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: Path) -> None:
    """Copy what was found into tensors of the same names and shapes.

    Raises:
        CheckpointError: names, shapes or dtypes differ; nothing was copied.
    """
    for name, tensor in tensors.items():
        other = found.get(name)
        if other is None or other.shape != tensor.shape or other.dtype != tensor.dtype:
            have = "is missing" if other is None else f"is {other.dtype} {list(other.shape)}"
            raise CheckpointError(
                f"the copy in memory {where} does not fit: {name} {have}, not {tensor.dtype} {list(tensor.shape)}",
                "continue from the disk with --save.memory-every 0",
            )
    for name, tensor in tensors.items():
        tensor.copy_(found[name])


def _view_tensor(content: Tensor, row: Mapping[str, Any]) -> Tensor:
    part = content[row["offset"] : row["offset"] + row["bytes"]]
    dtype = getattr(torch, row["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"a copy in memory names the type {row['dtype']}", "continue with --save.memory-every 0")
    if not row["bytes"]:
        return torch.empty(row["shape"], dtype=dtype)
    return part.view(dtype).view(row["shape"])
