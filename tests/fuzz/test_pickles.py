"""No reader unpickles: every file that a command opens is replaced by pickles that leave a marker."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from fuzz.planted import every_form
from fuzz.reading import Reader, attempt
from fuzz.test_readers import READERS

_SLOW = ("a machine's files", "reports", "plans of models")
_MANY = 4
"""Files of a reader beyond which each comes in one of the forms only."""
_READERS = [pytest.param(one, marks=[pytest.mark.process] if one.name in _SLOW else [], id=one.name) for one in READERS]


@pytest.mark.parametrize("reader", _READERS)
def test_no_reader_unpickles(reader: Reader, tmp_path: Path) -> None:
    """In place of each file, and beside it under the names that pickles of models have."""
    if reader.needs:
        pytest.importorskip(reader.needs)
    marker, folder = tmp_path / "marker", tmp_path / "files"
    good = reader.good()
    for one in good:
        (folder / one.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / one.name).write_bytes(one.data)
    faults = []
    forms = list(every_form(marker))
    for number, one in enumerate(good):
        path = folder / one.name
        beside = [path.parent / name for name in ("pytorch_model.bin", "adapter_model.bin", "tokenizer.pkl")]
        for form, content in forms if len(good) <= _MANY else [forms[number % len(forms)]]:
            for target in (path, *beside):
                target.write_bytes(content)
            fault = attempt(lambda path=path: reader.read(path), reader.refuses)
            if fault or marker.exists():
                faults.append(f"{one.name} as {form}: {fault or 'code has run'}")
            marker.rmdir() if marker.exists() else None
            path.write_bytes(one.data)
        for target in beside:
            target.unlink()
    assert not faults, "\n  ".join(faults)


def test_what_is_planted_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    """A marker that nothing could create would prove nothing."""
    marker = tmp_path / "marker"
    loaders = {
        "pickle": lambda path: pickle.loads(path.read_bytes()),
        "torch.save": lambda path: torch.load(path, weights_only=False),
        "numpy": lambda path: np.load(path, allow_pickle=True),
        "npz": lambda path: np.load(path, allow_pickle=True)["a"],
    }
    for form, content in every_form(marker):
        (tmp_path / "file").write_bytes(content)
        loaders[form.split()[0]](tmp_path / "file")
        assert marker.exists(), form
        marker.rmdir()
