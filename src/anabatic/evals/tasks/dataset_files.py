"""Where the rows of a task lie: named files, a data set in a folder of the user's, or one fetched from the hub."""

from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path

from anabatic.config.task import TaskData
from anabatic.core import log
from anabatic.core.errors import DataError
from anabatic.data.readers.raw_rows import SUPPORTED_EXTENSIONS

_PARQUET_REVISION = "refs/convert/parquet"
"""Branch of every data set on Hugging Face that holds it as CONFIG/SPLIT/NNNN.parquet."""
_SHA256_HEX_DIGITS = 64
"""Letters of a SHA-256; the hub's cache names large files by theirs."""


def locate_files(data: TaskData, name: str, beside: Path | None, folder: Path | None) -> list[Path]:
    """Return the files of a task's rows, in the order of their names.

    With a `folder` nothing is fetched.

    Args:
        name: of the task, for messages.
        beside: where the task's own file lies.
        folder: of the user's data sets (`--tasks-from`).

    Raises:
        DataError: they are not there, or a file is not the one that was meant.
    """
    if data.files:
        found = [path for pattern in data.files for path in _match_pattern(pattern, name, beside, folder)]
    elif folder is not None:
        found = _find_in_folder(data, name, folder)
    else:
        found = _fetch_from_hub(data, name)
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


def _fetch_from_hub(data: TaskData, name: str) -> list[Path]:
    """From `HF_ENDPOINT`, by huggingface_hub, which keeps what it has fetched and resumes where it broke off."""
    import huggingface_hub
    from huggingface_hub import constants

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    pattern = f"{data.config or 'default'}/{data.split}/*.parquet"
    log.info(f"{name}: {data.hub} {pattern} from {endpoint}")
    try:
        root = huggingface_hub.snapshot_download(
            data.hub, repo_type="dataset", revision=_PARQUET_REVISION, endpoint=endpoint, allow_patterns=[pattern]
        )
    except Exception as error:  # the HTTP library changes with the versions of huggingface_hub
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{name}: {data.hub} cannot be fetched from {endpoint}: {reason}",
            "set HF_ENDPOINT to a mirror such as https://hf-mirror.com, or give a folder with --tasks-from FOLDER",
        ) from error
    found = sorted(Path(root).glob(pattern))
    if not found:
        raise DataError(f"{name}: {data.hub} has no {pattern}", "look at data.config and data.split of the task")
    for path in found:
        blob = path.resolve().name
        _check_sha256(path, blob if len(blob) == _SHA256_HEX_DIGITS else None)
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
