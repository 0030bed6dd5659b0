"""What a process that joined a group sends is data: torch's collectives of objects run nothing."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint import api, filesystem, metadata, planner
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan, create_default_local_save_plan

from anabatic.core.errors import CheckpointError, Failure
from anabatic.parallel import group_objects


@pytest.fixture(autouse=True)
def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed_c10d, "_unpickler", pickle.Unpickler)
    group_objects.refuse_code()


def send(value: Any) -> Any:
    """Return a value as torch passes it on (`all_gather_object` and its like)."""
    tensor, size = distributed_c10d._object_to_tensor(value, torch.device("cpu"), None)
    return distributed_c10d._tensor_to_object(tensor, size, None)


class Runs:
    """Calls a function when it is built from a pickle."""

    def __init__(self, function: Any, *words: Any) -> None:
        self._call = function, words

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "call",
    [
        (os.system, "touch marker"),
        (subprocess.Popen, ["touch", "marker"]),
        (eval, "open('marker', 'w')"),
        (open, "marker", "w"),
        (getattr, "os", "system"),
        (Path.touch, Path("marker")),
        (torch.load, "marker"),
        (torch.serialization._get_layout, "torch.strided.__class__"),
        (filesystem.FileSystemWriter, "marker"),
    ],
)
def test_code_is_refused(call: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Failure, KeyError, pickle.UnpicklingError)):
        send({"text": [Runs(*call)]})
    assert not any(tmp_path.iterdir())


def test_a_name_within_a_class_is_refused() -> None:
    """Protocol 4 looks names with dots up."""
    pickled = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x0dmath.floor.os\x93."
    with pytest.raises(Failure, match="no process of this job sends"):
        distributed_c10d._unpickler(io.BytesIO(pickled)).load()


def test_data_and_plans_of_checkpoints_are_passed_on() -> None:
    state = {"weight": torch.zeros(2, 3), "rows": 4, "half": torch.zeros(2, dtype=torch.bfloat16)}
    plan = create_default_local_save_plan(state, is_coordinator=True)
    index = metadata.MetadataIndex("weight", torch.Size([0, 0]), 0)
    stored = {index: filesystem._StorageInfo("__0_0.distcp", 0, 24)}
    whole = metadata.Metadata({"weight": plan.items[0].tensor_data}, storage_data=stored)  # type: ignore[dict-item]
    result = planner.SavePlan([], storage_data=filesystem._StoragePrefix("__0_"))
    for value in (
        {"a": [1, 2.5, None, "é", b"x"], "b": {(1, 2)}},
        plan,
        stored,
        result,
        torch.Size([2]),
        torch.bfloat16,
    ):
        assert send(value) == value
    load = create_default_local_load_plan({"weight": torch.zeros(2, 3)}, _index_of(plan))
    assert send(load) == load
    assert send(whole).storage_data == stored


def _index_of(plan: planner.SavePlan) -> metadata.Metadata:
    chunk = next(item.tensor_data for item in plan.items if item.index.fqn == "weight")
    assert chunk is not None
    entry = metadata.TensorStorageMetadata(chunk.properties, chunk.size, [chunk.chunk])
    return metadata.Metadata({"weight": entry})


def test_errors_of_another_rank_are_passed_on() -> None:
    """torch sends them with the lines that they come from."""
    try:
        raise CheckpointError("it is damaged", "use another")
    except CheckpointError as error:
        sent = send(api._wrap_exception(error))
        assert str(sent[0]) == str(error) and isinstance(sent[1], traceback.StackSummary)
    assert isinstance(send(OSError(28, "No space left on device")), OSError)
    failures = {0: api._wrap_exception(ValueError("x"))}
    assert "ValueError" in str(send(api.CheckpointException("save", failures)))
