"""Models of ModelScope: download the wanted files of one into the cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_size
from anabatic.core.paths import get_cache_root, make_write_error, write_atomic
from anabatic.hub import modelscope_api
from anabatic.hub.hub_file import HubFile

_LIST_FILE = "files.json"
_REVISION = "master"


def download_snapshot(name: str, is_wanted: Callable[[str], bool], offline: bool) -> Path:
    """Return the folder of a model with its wanted files; complete files in the cache are kept.

    Args:
        name: `OWNER/NAME`.
        is_wanted: returns whether to download a path.
        offline: use only the cache.

    Raises:
        DataError: no such model, no access, no connection, or a broken download.
        Failure: the cache cannot be written.
    """
    repo = modelscope_api.Repo("model", name)
    folder = get_cache_root() / "modelscope" / name.replace("/", "--")
    if offline:
        if not (folder / _LIST_FILE).is_file():
            raise DataError(
                f"{name}: no such folder, not in the cache, and HF_HUB_OFFLINE is set",
                f"unset HF_HUB_OFFLINE, or {repo.other_source_hint}",
            )
        return folder
    log.info(f"{name}: from {modelscope_api.get_endpoint()}")
    files = [file for file in modelscope_api.list_files(repo, _REVISION) if is_wanted(file.path)]
    fetched = _list_fetched(folder)
    missing = [file for file in files if file not in fetched and not _is_complete(folder, file)]
    if missing:
        log.info(f"{name}: fetching {len(missing)} files, {format_size(sum(file.size for file in missing))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            modelscope_api.fetch_file(repo, _REVISION, file, folder / file.path)
        write_atomic(folder / _LIST_FILE, json.dumps([asdict(file) for file in files], indent=1) + "\n")
    except OSError as error:
        raise make_write_error(folder, error, "choose another place with ANABATIC_CACHE") from error
    return folder


def _list_fetched(folder: Path) -> list[HubFile]:
    """Return the files of the last complete download that still have their size."""
    try:
        files = [HubFile(**row) for row in json_reader.read_json_file(folder / _LIST_FILE)]
        return [file for file in files if file.has_size(folder / file.path)]
    except (OSError, ValueError, TypeError):  # missing or damaged: check every file again
        return []


def _is_complete(folder: Path, file: HubFile) -> bool:
    """True for a complete file of an interrupted download."""
    path = folder / file.path
    return file.has_size(path) and bool(file.checksum) and not file.describe_damage(path)
