"""A checkpoint folder runs no code, whatever is in it; and every flip of its manifest is noticed."""

from __future__ import annotations

import enum
import io
import json
import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from anabatic.config.sections.common import DeviceSettings as DeviceConfig
from anabatic.config.sections.common import Save
from anabatic.core.errors import AnabaticError, CheckpointError
from anabatic.core.paths import RunFolder
from anabatic.device.device import select_device
from anabatic.parallel.world import World
from anabatic.train.checkpoint import dcp_reader, listing, manifest, memory_store, storage
from anabatic.train.checkpoint.run_state import RunState, TrainProgress
from anabatic.train.checkpoint.saver import CheckpointSaver
from fuzz.planted import Planted, every_form

DEVICE = select_device(DeviceConfig(type="cpu", threads=1))
FILES = (".metadata", "__0_0.distcp", "rng-0.safetensors", "state.json", "config.yaml", "manifest.json")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run with one checkpoint."""
    folder = RunFolder(tmp_path / "run")
    folder.create_folder()
    folder.config.write_text("seed: 1\n")
    tensors = {"model.a": torch.full((3, 4), 2.0), "optim.b": torch.arange(5.0)}
    with CheckpointSaver(folder, Save(background="off"), DEVICE, World()) as saver:
        saver.save(7, tensors, RunState(TrainProgress(step=7), about={"command": "pretrain", "strategy": "single"}))
    return folder


def reseal(path: Path) -> None:
    """Write the manifest that belongs to the files: whoever plants a file can do so, too."""
    content = json.loads((path / "manifest.json").read_text())
    for name in content["files"]:
        data = (path / name).read_bytes()
        content["files"][name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    content["sha256"] = manifest._compute_seal(content)
    (path / "manifest.json").write_text(json.dumps(content))


def resume(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Continue as a training does."""
    found = storage.find_newest_checkpoint(folder, World())
    tensors = {"model.a": torch.zeros(3, 4), "optim.b": torch.zeros(5)}
    if found is None:
        raise CheckpointError("there is none")
    storage.load_checkpoint(found, tensors, DEVICE, World())
    return tensors


def index_of(folder: RunFolder) -> dcp.Metadata:
    return dcp_reader.read_index(folder.checkpoint_path(7))


def plant_index(folder: RunFolder, index: Any) -> None:
    """Give the checkpoint another index, sealed."""
    path = folder.checkpoint_path(7)
    content = index if isinstance(index, bytes) else pickle.dumps(index)
    (path / ".metadata").write_bytes(content)
    reseal(path)


READERS: dict[str, Callable[[RunFolder], object]] = {
    "resume": resume,
    "list": lambda folder: listing.list_checkpoints(folder.root, []),
    "verify": lambda folder: listing.verify_checkpoints(folder.root, lambda _: None),
    "newest": lambda folder: manifest.find_newest_valid(folder.root),
    "index": index_of,
}


@pytest.mark.parametrize("victim", FILES)
@pytest.mark.parametrize("reader", READERS)
def test_a_planted_pickle_is_not_run(run: RunFolder, reader: str, victim: str, tmp_path: Path) -> None:
    path, marker = run.checkpoint_path(7), tmp_path / "marker"
    for form, content in every_form(marker):
        (path / victim).write_bytes(content)
        if victim != "manifest.json":
            reseal(path)
        try:
            READERS[reader](run)
        except AnabaticError as error:
            assert str(error)
        assert not marker.exists(), form


def test_the_message_names_the_file_and_the_class(run: RunFolder, tmp_path: Path) -> None:
    plant_index(run, Planted(tmp_path / "marker"))
    file = run.checkpoint_path(7) / ".metadata"
    for reader in (resume, index_of):
        with pytest.raises(CheckpointError, match="posix.mkdir") as caught:
            reader(run)
        assert str(file) in str(caught.value) and caught.value.hint


def test_code_inside_of_a_good_index_is_refused(run: RunFolder, tmp_path: Path) -> None:
    """Everything around it is as torch writes it."""
    marker = tmp_path / "marker"
    for field in ("planner_data", "storage_meta", "version", "storage_data", "state_dict_metadata"):
        plant_index(run, replace(_clean(index_of_good(run)), **{field: {"model.a": Planted(marker)}}))
        for reader in (resume, index_of):
            with pytest.raises(CheckpointError, match="no part of a checkpoint's index"):
                reader(run)
        assert not marker.exists()


def index_of_good(folder: RunFolder) -> dcp.Metadata:
    """The index as it was saved, whatever has been planted since."""
    kept = folder.root / "kept"
    if not kept.exists():
        shutil.copytree(folder.checkpoint_path(7), kept)
    return dcp_reader.read_index(kept)


def _clean(index: dcp.Metadata) -> dcp.Metadata:
    return replace(index, storage_meta=dcp.StorageMeta())


def test_entries_that_torch_would_unpickle_are_refused(run: RunFolder, tmp_path: Path) -> None:
    """torch reads an entry that is no tensor with `weights_only=False`, from the file of tensors."""
    marker, path = tmp_path / "marker", run.checkpoint_path(7)
    index = _clean(index_of_good(run))
    content = io.BytesIO()
    torch.save(Planted(marker), content)
    (path / "__0_0.distcp").write_bytes(content.getvalue())
    place = _StorageInfo("__0_0.distcp", 0, len(content.getvalue()))
    entries = {**index.state_dict_metadata, "model.a": dcp.BytesStorageMetadata()}
    plant_index(run, replace(index, state_dict_metadata=entries, storage_data={dcp.MetadataIndex("model.a"): place}))
    with pytest.raises(CheckpointError, match="model.a is a BytesStorageMetadata"):
        resume(run)
    entries = {**index.state_dict_metadata}
    places = {**index.storage_data, **dict.fromkeys(index.storage_data, place)}
    plant_index(run, replace(index, state_dict_metadata=entries, storage_data=places))
    with pytest.raises(CheckpointError, match="something else in it"):
        resume(run)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (_StorageInfo("../../secret", 0, 9), "is in another folder: ../../secret"),
        (_StorageInfo("/etc/passwd", 0, 9), "is in another folder: /etc/passwd"),
        (_StorageInfo("__0_0.distcp", 0, 9, ["zstd"]), "which we never write"),
        (_StorageInfo("__0_0.distcp", -1, 9), "has no place"),
        (_StorageInfo(3, 0, 9), "is in another folder"),  # type: ignore[arg-type]
    ],
)
def test_an_index_leads_nowhere_else(run: RunFolder, place: _StorageInfo, said: str) -> None:
    index = _clean(index_of(run))
    plant_index(run, replace(index, storage_data=dict.fromkeys(index.storage_data, place)))
    with pytest.raises(CheckpointError, match=said):
        resume(run)


@pytest.mark.parametrize(
    "odd", [None, {}, [], "x", dcp.TensorProperties(), dcp.Metadata({"a": None}), dcp.Metadata({}), dcp.Metadata([])]
)  # fmt: skip
def test_an_index_of_something_else_is_our_error(run: RunFolder, odd: Any) -> None:
    plant_index(run, odd)
    for reader in (resume, index_of):
        with pytest.raises(CheckpointError, match="is no index of tensors"):
            reader(run)


def test_a_pickle_changes_no_class(run: RunFolder) -> None:
    """BUILD with a pair of states sets attributes of whatever lies on the stack, of a class, too."""
    module = b"ctorch.distributed.checkpoint.metadata\n"
    before = dict(vars(dcp.Metadata))
    for target in (module + b"Metadata\n", b"cpathlib\nPosixPath\n"):
        plant_index(run, target + b"(N(V__len__\nctorch\nSize\ndtb.")
        with pytest.raises(CheckpointError, match="it changes"):
            index_of(run)
    assert dict(vars(dcp.Metadata)) == before and not hasattr(dcp_reader._SavedPath, "__len__")
    assert "model.a" in index_of_good_after(run)


def index_of_good_after(folder: RunFolder) -> dict[str, Any]:
    """Classes are as they were: what is made now can be written and read."""
    entry = dcp.TensorStorageMetadata(dcp.TensorProperties(), torch.Size([2]), [])
    plant_index(folder, dcp.Metadata({"model.a": entry}, storage_data={}))
    return dict(index_of(folder).state_dict_metadata)


def test_every_cut_and_many_flips_of_an_index_are_our_errors(run: RunFolder) -> None:
    path = run.checkpoint_path(7)
    good = (path / ".metadata").read_bytes()
    for at in range(0, len(good), 7):
        for content in (good[:at], good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]):
            (path / ".metadata").write_bytes(content)
            try:
                dcp_reader.read_index(path)
            except CheckpointError as error:
                assert len(str(error)) < 5000


@pytest.mark.parametrize("bit", range(8))
def test_every_flip_of_a_manifest_is_noticed(run: RunFolder, bit: int) -> None:
    path = run.checkpoint_path(7)
    file = path / "manifest.json"
    good = file.read_bytes()
    known = json.loads(good)
    assert len(good) > 500
    for at in range(len(good)):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        try:
            found = manifest.read_manifest(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        assert not manifest.is_sealed(found) or json.dumps(found) == json.dumps(known), at


def test_what_verify_says_of_flips(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The same through the command, on a sample: never whole, and not with exit code 0."""
    from anabatic.cli import checkpoint

    assert checkpoint.verify(run.root) == 0 and ": whole, " in capsys.readouterr().out
    file = run.checkpoint_path(7) / "manifest.json"
    good = file.read_bytes()
    for at in range(0, len(good), 23):
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        assert checkpoint.verify(run.root) == 1
        assert "whole" not in capsys.readouterr().out
        assert not listing.list_checkpoints(run.root, [])[0]["whole"]
    file.write_bytes(good.replace(b'"step": 7', b'"step": 8'))
    checkpoint.verify(run.root)
    assert "manifest.json does not match its own checksum" in capsys.readouterr().out


def test_an_older_manifest_is_not_sealed_and_resumes(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    from anabatic.cli import checkpoint

    path = run.checkpoint_path(7)
    content = json.loads((path / "manifest.json").read_text())
    del content["sha256"]
    (path / "manifest.json").write_text(json.dumps(content))
    assert torch.equal(resume(run)["model.a"], torch.full((3, 4), 2.0))
    assert manifest.find_newest_valid(run.root) == path
    assert checkpoint.verify(run.root) == 1
    assert f"{path}: not sealed: manifest.json has no checksum of its own; what it says matches, " in (
        capsys.readouterr().out
    )
    (row,) = listing.list_checkpoints(run.root, [])
    assert row["usable"] and not row["whole"] and "not sealed" in listing.format_table([row])
    (result,) = listing.verify_checkpoints(run.root, lambda _: None)
    assert not result.to_dict()["whole"] and not result.faults
    (path / "state.json").write_bytes(b"{}")
    assert storage.find_newest_checkpoint(run, World()) is None


def test_a_copy_in_memory_names_dtypes_alone(tmp_path: Path) -> None:
    row = {"name": "a", "dtype": "load", "shape": [2], "offset": 0, "bytes": 8}
    with pytest.raises(CheckpointError, match="names the type load"):
        memory_store._view_tensor(torch.zeros(8, dtype=torch.uint8), row)


def test_members_by_name_are_read(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 (Debian 12) pickles a member of an enumeration as `getattr(kind, name)`."""
    path = run.root / "checkpoint-7" / ".metadata"
    index = pickle.loads(path.read_bytes())
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    path.write_bytes(pickle.dumps(index))
    monkeypatch.undo()
    assert b"getattr" in path.read_bytes()
    reseal(path.parent)
    assert torch.equal(resume(run)["model.a"], torch.full((3, 4), 2.0))


@pytest.mark.parametrize(
    "words", [(dcp.Metadata, "__init__"), (dcp._MEM_FORMAT_ENCODING, "__members__"), ("x", "join")]
)
def test_getattr_of_anything_else_is_refused(run: RunFolder, words: tuple[Any, str]) -> None:
    class Gets:
        def __reduce__(self) -> Any:
            return getattr, words

    path = run.root / "checkpoint-7" / ".metadata"
    path.write_bytes(pickle.dumps({"a": Gets()}))
    reseal(path.parent)
    with pytest.raises(CheckpointError, match="is damaged"):
        dcp_reader.read_index(path.parent)
