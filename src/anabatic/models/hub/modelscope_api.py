"""ModelScope's HTTP API, as much of it as fetching a model takes."""

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
"""Seconds without a byte."""
_LIST_FILE = "files.json"
_OTHER_SOURCE_HINT = (
    "set MODELSCOPE_ENDPOINT to a mirror, take Hugging Face with ANABATIC_HUB=huggingface (HF_ENDPOINT: its mirror),"
    " or copy the folder here and give its path"
)


@dataclass(frozen=True)
class _HubFile:
    """One file of a model; without a checksum only the size is compared."""

    path: str
    size: int
    sha256: str


def get_endpoint() -> str:
    """Return the address of the hub: `MODELSCOPE_ENDPOINT`, else `MODELSCOPE_DOMAIN`, else ModelScope's own."""
    given = os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    return (given if "://" in given else f"https://{given}").rstrip("/")


def download_snapshot(name: str, wanted: Callable[[str], bool], offline: bool) -> Path:
    """Return the folder of a model with the files that are `wanted`; whole ones that are there are kept.

    Args:
        name: `OWNER/NAME`.
        wanted: says of a path whether it is fetched.
        offline: take what the cache has, ask nobody.

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
    listed = [file for file in _list_files(name) if wanted(file.path)]
    before = _list_fetched(folder)
    missing = [file for file in listed if file not in before and not _is_complete(folder, file)]
    if missing:
        log.info(f"{name}: fetching {len(missing)} files, {format_size(sum(file.size for file in missing))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in missing:
            _fetch_file(name, folder, file)
        write_atomic(folder / _LIST_FILE, json.dumps([vars(file) for file in listed], indent=1) + "\n")
    except OSError as error:
        raise make_write_error(folder, error, "choose another place with ANABATIC_CACHE") from error
    return folder


def _list_fetched(folder: Path) -> list[_HubFile]:
    """Return the files that were there when everything had been fetched, and still have their size."""
    try:
        rows = json_reader.read_json_file(folder / _LIST_FILE)
        files = [_HubFile(**row) for row in rows]
    except (FileNotFoundError, ValueError, TypeError):  # not there, or torn: everything is looked at again
        return []
    return [file for file in files if _has_size(folder, file)]


def _has_size(folder: Path, file: _HubFile) -> bool:
    path = folder / file.path
    return path.is_file() and path.stat().st_size == file.size


def _is_complete(folder: Path, file: _HubFile) -> bool:
    """True for a file that was fetched before the rest broke off."""
    if not _has_size(folder, file) or not file.sha256:
        return False
    digest = hashlib.sha256()
    with open(folder / file.path, "rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == file.sha256


def _list_files(name: str) -> list[_HubFile]:
    with _open_url(name, "repo/files", Revision="master", Recursive="true") as answer:
        try:
            rows = json_reader.loads(answer.read())["Data"]["Files"]
            files = [_HubFile(row["Path"], int(row["Size"]), row.get("Sha256") or "") for row in rows if _is_file(row)]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{name}: {get_endpoint()} does not answer as ModelScope does ({error!r})", _OTHER_SOURCE_HINT
            ) from error
    for file in files:
        # A path from outside becomes a path here.
        if file.path.startswith("/") or ".." in file.path.split("/") or "\\" in file.path:
            raise DataError(f"{name}: {get_endpoint()} lists the path {file.path!r}", "do not use this hub")
    return files


def _is_file(row: dict[str, Any]) -> bool:
    return row.get("Type", "blob") == "blob"


def _fetch_file(name: str, folder: Path, file: _HubFile) -> None:
    """Fetch a file under a name of its own, compare size and checksum, then give it its name."""
    part = folder / f".{file.path}.{uuid.uuid4().hex}.part"
    digest, got = hashlib.sha256(), 0
    try:
        with _open_url(name, "repo", Revision="master", FilePath=file.path) as answer, open(part, "wb") as out:
            while block := _read_block(name, file, answer, got):
                out.write(block)
                digest.update(block)
                got += len(block)
            out.flush()
            os.fsync(out.fileno())
        if got != file.size or file.sha256 not in ("", digest.hexdigest()):
            what = f"{got:,} of {file.size:,} bytes came" if got != file.size else "its checksum is another"
            raise _download_error(name, file, what)
        os.replace(part, folder / file.path)
    finally:
        part.unlink(missing_ok=True)


def _read_block(name: str, file: _HubFile, answer: Any, got: int) -> bytes:
    try:
        block: bytes = answer.read(_BLOCK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _download_error(name, file, f"{got:,} of {file.size:,} bytes came ({error})") from error
    return block


def _download_error(name: str, file: _HubFile, what: str) -> DataError:
    return DataError(
        f"{name}: the download of {file.path} from {get_endpoint()} broke off: {what}",
        f"start again, whole files are kept; or {_OTHER_SOURCE_HINT}",
    )


def _open_url(name: str, what: str, **query: str) -> Any:
    """Ask the hub.

    Raises:
        DataError: it says no, or nothing.
    """
    url = f"{get_endpoint()}/api/v1/models/{name}/{what}?{urllib.parse.urlencode(query)}"
    try:
        return urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        status = error.code
        error.close()
        if status == 404:
            what = f"{name}: neither a folder here nor a model of {get_endpoint()} (or a private one)"
            raise DataError(what, "look at the spelling; Hugging Face is ANABATIC_HUB=huggingface") from error
        if status in (401, 403):
            what = f"{name}: {get_endpoint()} gives it only to those who have access ({status})"
            raise DataError(what, "fetch it with ModelScope's own client, and give its folder") from error
        raise DataError(
            f"{name}: {get_endpoint()} answers {status}", f"try again later; or {_OTHER_SOURCE_HINT}"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DataError(
            f"{name}: no such folder, and {get_endpoint()} cannot be reached: {error}", _OTHER_SOURCE_HINT
        ) from error
