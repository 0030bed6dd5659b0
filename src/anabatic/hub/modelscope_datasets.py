"""Data sets of ModelScope.

Its API names no commit of a branch. A revision is therefore recorded as `REVISION~DIGEST`, with a digest of the list of
its files and their checksums: the same digest means the same files.
"""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path

from anabatic.core.errors import DataError
from anabatic.core.paths import get_cache_root, make_write_error
from anabatic.hub import modelscope_api
from anabatic.hub.dataset_name import DatasetName
from anabatic.hub.hub_file import HubFile

_DEFAULT_REVISION = "master"
_CACHE_HINT = "choose another place with ANABATIC_CACHE"

get_endpoint = modelscope_api.get_endpoint
is_offline = modelscope_api.is_offline


def get_cache_folder() -> Path:
    """Return the folder of all downloaded data sets."""
    return get_cache_root() / "datasets" / "ms"


def list_dataset_files(name: DatasetName) -> tuple[str, list[HubFile]]:
    """Return `REVISION~DIGEST` of a revision, and all its files.

    Raises:
        DataError: no such data set or revision, no access, or no connection; or the revision was recorded, and its
            files are others now.
    """
    revision, _, recorded = name.revision.partition("~")
    revision = revision or _DEFAULT_REVISION
    files = sorted(
        modelscope_api.list_files(modelscope_api.Repo("dataset", name.repo), revision), key=lambda file: file.path
    )
    lines = "".join(f"{file.path}\0{file.size}\0{file.checksum}\n" for file in files)
    digest = hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    if recorded and digest != recorded:
        raise DataError(
            f"ms:{name.repo}@{revision} was recorded with the files {recorded}, and now has others ({digest})",
            f"leave out ~{recorded} to read the current files, or copy the cache of the machine that has the old ones",
        )
    return f"{revision}~{digest}", files


def _local_path(name: DatasetName, file: HubFile) -> Path:
    return get_cache_folder() / name.repo.replace("/", "--") / "files" / name.revision.rpartition("~")[2] / file.path


def find_cached_file(name: DatasetName, file: HubFile) -> Path | None:
    """Return the file from the cache, if it is there with its size."""
    path = _local_path(name, file)
    return path if file.has_size(path) else None


def fetch_dataset_file(name: DatasetName, file: HubFile) -> Path:
    """Download a file of a recorded revision, check it, and return its path in the cache.

    Of several processes one downloads, the others wait.

    Raises:
        DataError: no access, no connection, or a broken download.
        Failure: the cache cannot be written.
    """
    path = _local_path(name, file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_name(f".{path.name}.lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if find_cached_file(name, file) is None:
                _require_online(name, file)
                repo = modelscope_api.Repo("dataset", name.repo)
                modelscope_api.fetch_file(repo, name.revision.partition("~")[0], file, path)
    except OSError as error:
        raise make_write_error(path, error, _CACHE_HINT) from error
    return path


def _require_online(name: DatasetName, file: HubFile) -> None:
    if is_offline():
        raise DataError(
            f"{name.repo}: {file.path} is not in the cache, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, or give its files",
        )
