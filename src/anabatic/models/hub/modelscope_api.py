"""The part of ModelScope's HTTP API that downloads a model."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_size
from anabatic.core.paths import get_cache_root, make_write_error, write_atomic

_BLOCK_BYTES = 2**20
_TIMEOUT_SECONDS = 60.0
"""Timeout of a connection without data."""
_LIST_FILE = "files.json"
_OTHER_SOURCE_HINT = (
    "set MODELSCOPE_ENDPOINT to a mirror, take Hugging Face with ANABATIC_HUB=huggingface (HF_ENDPOINT: its mirror),"
    " or copy the folder here and give its path"
)


@dataclass(frozen=True)
class _HubFile:
    """One file of a model; without a checksum only the size is checked."""

    path: str
    size: int
    sha256: str


def get_endpoint() -> str:
    """Return the URL of the hub: `MODELSCOPE_ENDPOINT`, else `MODELSCOPE_DOMAIN`, else the default."""
    value = os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    return (value if "://" in value else f"https://{value}").rstrip("/")


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
    folder = get_cache_root() / "modelscope" / name.replace("/", "--")
    if offline:
        if not (folder / _LIST_FILE).is_file():
            raise DataError(
                f"{name}: no such folder, not in the cache, and HF_HUB_OFFLINE is set",
                f"unset HF_HUB_OFFLINE, or {_OTHER_SOURCE_HINT}",
            )
        return folder
    log.info(f"{name}: from {get_endpoint()}")
    files = [file for file in _list_files(name) if is_wanted(file.path)]
    fetched = _list_fetched(folder)
    missing = [file for file in files if file not in fetched and not _is_complete(folder, file)]
    if missing:
        log.info(f"{name}: fetching {len(missing)} files, {format_size(sum(file.size for file in missing))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            _fetch_file(name, folder, file)
        write_atomic(folder / _LIST_FILE, json.dumps([vars(file) for file in files], indent=1) + "\n")
    except OSError as error:
        raise make_write_error(folder, error, "choose another place with ANABATIC_CACHE") from error
    return folder


def _list_fetched(folder: Path) -> list[_HubFile]:
    """Return the files of the last complete download that still have their size."""
    try:
        rows = json_reader.read_json_file(folder / _LIST_FILE)
        files = [_HubFile(**row) for row in rows]
    except (FileNotFoundError, ValueError, TypeError):  # missing or damaged: check every file again
        return []
    return [file for file in files if _has_size(folder, file)]


def _has_size(folder: Path, file: _HubFile) -> bool:
    path = folder / file.path
    return path.is_file() and path.stat().st_size == file.size


def _is_complete(folder: Path, file: _HubFile) -> bool:
    """True for a complete file of an interrupted download."""
    if not _has_size(folder, file) or not file.sha256:
        return False
    digest = hashlib.sha256()
    with open(folder / file.path, "rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == file.sha256


def _list_files(name: str) -> list[_HubFile]:
    with _open_url(name, "repo/files", Revision="master", Recursive="true") as response:
        try:
            rows = json_reader.loads(response.read())["Data"]["Files"]
            files = [_HubFile(row["Path"], int(row["Size"]), row.get("Sha256") or "") for row in rows if _is_file(row)]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{name}: {get_endpoint()} does not answer as ModelScope does ({error!r})", _OTHER_SOURCE_HINT
            ) from error
    for file in files:
        # Paths from the server are used as local paths.
        if file.path.startswith("/") or ".." in file.path.split("/") or "\\" in file.path:
            raise DataError(f"{name}: {get_endpoint()} lists the path {file.path!r}", "do not use this hub")
    return files


def _is_file(row: dict[str, Any]) -> bool:
    return row.get("Type", "blob") == "blob"


def _fetch_file(name: str, folder: Path, file: _HubFile) -> None:
    """Download a file under a temporary name, check size and checksum, then rename it."""
    part = folder / f".{file.path}.{uuid.uuid4().hex}.part"
    digest, received = hashlib.sha256(), 0
    try:
        with _open_url(name, "repo", Revision="master", FilePath=file.path) as response, open(part, "wb") as out:
            while block := _read_block(name, file, response, received):
                out.write(block)
                digest.update(block)
                received += len(block)
            out.flush()
            os.fsync(out.fileno())
        if received != file.size or file.sha256 not in ("", digest.hexdigest()):
            reason = f"{received:,} of {file.size:,} bytes came" if received != file.size else "its checksum is another"
            raise _download_error(name, file, reason)
        os.replace(part, folder / file.path)
    finally:
        part.unlink(missing_ok=True)


def _read_block(name: str, file: _HubFile, response: Any, received: int) -> bytes:
    try:
        block: bytes = response.read(_BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _download_error(name, file, f"{received:,} of {file.size:,} bytes came ({error})") from error
    return block


def _download_error(name: str, file: _HubFile, reason: str) -> DataError:
    return DataError(
        f"{name}: the download of {file.path} from {get_endpoint()} broke off: {reason}",
        f"start again, whole files are kept; or {_OTHER_SOURCE_HINT}",
    )


def _open_url(name: str, resource: str, **query: str) -> Any:
    """Send a request to the hub and return the response.

    Raises:
        DataError: the hub refuses, or does not answer.
    """
    url = f"{get_endpoint()}/api/v1/models/{name}/{resource}?{urllib.parse.urlencode(query)}"
    try:
        return urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
        if status == 404:
            resource = f"{name}: neither a folder here nor a model of {get_endpoint()} (or a private one)"
            raise DataError(resource, "check the spelling; Hugging Face is ANABATIC_HUB=huggingface") from error
        if status in (401, 403):
            resource = f"{name}: {get_endpoint()} gives it only to those who have access ({status})"
            raise DataError(resource, "fetch it with ModelScope's own client, and give its folder") from error
        raise DataError(
            f"{name}: {get_endpoint()} answers {status}", f"try again later; or {_OTHER_SOURCE_HINT}"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"{name}: no such folder, and {get_endpoint()} cannot be reached: {error}", _OTHER_SOURCE_HINT
        ) from error
