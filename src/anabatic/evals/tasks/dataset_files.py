"""Find the rows of a task: named files, a data set in a folder of the user's, or one fetched from the hub."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from anabatic.config.task import TaskData
from anabatic.core.errors import DataError
from anabatic.data.readers.raw_rows import SUPPORTED_EXTENSIONS
from anabatic.hub import datasets
from anabatic.hub.dataset_layout import CONVERTED_REVISION, DEFAULT_SUBSET
from anabatic.hub.dataset_name import DatasetName
from anabatic.hub.datasets import DatasetSnapshot

ResolveDataset = Callable[[DatasetName], DatasetSnapshot]
"""Returns the files of a data set at the commit that the evaluation reads."""


def locate_files(
    data: TaskData,
    name: str,
    beside: Path | None,
    folder: Path | None,
    resolve: ResolveDataset = datasets.resolve_dataset,
) -> list[Path]:
    """Return the files of a task's rows, in the order of their names.

    With a `folder` nothing is fetched.

    Args:
        name: of the task, for messages.
        beside: where the task's own file lies.
        folder: of the user's data sets (`--tasks-from`).
        resolve: chooses the commit of a data set of Hugging Face, whose own Parquet conversion is read.

    Raises:
        DataError: they are not there, or a file is not the one that was meant.
    """
    if data.files:
        found = [path for pattern in data.files for path in _match_pattern(pattern, name, beside, folder)]
    elif folder is not None:
        found = _find_in_folder(data, name, folder)
    else:
        found = _fetch_from_hub(data, name, resolve)
    for path in found:
        _check_sha256(path, data.sha256.get(path.name))
    return found


def _match_pattern(pattern: str, name: str, beside: Path | None, folder: Path | None) -> list[Path]:
    bases = [base for base in (beside, folder, Path()) if base is not None]
    for base in bases:
        found = sorted(Path(one) for one in glob.glob(str(base / Path(pattern).expanduser())) if os.path.isfile(one))
        if found:
            return found
    places = ", ".join(dict.fromkeys(str(base) for base in bases))
    raise DataError(
        f"{name}: no file {pattern} in {places}", "put it there, or name its folder with --tasks-from FOLDER"
    )


def _find_in_folder(data: TaskData, name: str, folder: Path) -> list[Path]:
    """As a copy of the hub's repository has it, or nanochat's cache, or files that are called as set and split."""
    owner, _, short = data.hub.partition("/")
    for name_of_file in (*data.also, f"{short}_{data.split}.*", f"{short}-{data.split}.*"):
        found = [
            Path(one)
            for one in sorted(glob.glob(str(folder / name_of_file)))
            if one.lower().endswith(SUPPORTED_EXTENSIONS)
        ]
        if found:
            return found
    for root in (data.hub, f"{owner}--{short}", f"{owner}___{short}", short):
        for part in dict.fromkeys((data.config, f"data/{data.config}", "data", "")):
            for file in (f"{data.split}/*", f"{data.split}-*", f"{data.split}.*", f"{data.config}_{data.split}.*"):
                pattern = folder / root / part / file
                found = [
                    Path(one) for one in sorted(glob.glob(str(pattern))) if one.lower().endswith(SUPPORTED_EXTENSIONS)
                ]
                if found:
                    return found
    raise DataError(
        f"{name}: {data.hub} ({' '.join(filter(None, (data.config, data.split)))}) is not in {folder}",
        f"copy it to {folder / data.hub / data.config}/{data.split}.parquet (or .jsonl), or leave --tasks-from out to"
        " fetch it",
    )


def _fetch_from_hub(data: TaskData, name: str, resolve: ResolveDataset) -> list[Path]:
    try:
        snapshot = resolve(DatasetName("hf", data.hub, CONVERTED_REVISION, data.config or DEFAULT_SUBSET, data.split))
        found = [path for path, _ in datasets.iter_local_files(snapshot)]
    except DataError as error:
        raise DataError(f"{name}: {error}", f"{error.hint}; or give a folder with --tasks-from FOLDER") from error
    for path, file in zip(found, snapshot.files, strict=True):
        if damage := file.describe_damage(path):
            raise DataError(f"{name}: {path}: {damage}", "remove it, and start again: it is downloaded anew")
    return found


def _check_sha256(path: Path, wanted: str | None) -> None:
    if wanted is None:
        return
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    found = digest.hexdigest()
    if found != wanted.lower():
        raise DataError(
            f"{path} has the checksum {found[:12]}..., and should have {wanted[:12]}...",
            "fetch it again: it is damaged",
        )
