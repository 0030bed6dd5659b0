"""ModelScope's HTTP API: list the files of a model or a data set, download one.

The addresses are those of its own client (modelscope_hub/_legacy_api.py): `/api/v1/models/ID/repo/files` and
`/api/v1/datasets/ID/repo/tree` list `Path`, `Size` and `Sha256`, `/api/v1/KINDs/ID/repo?FilePath=` is a file.
"""

from __future__ import annotations

import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.hub.hub_file import HubFile, require_safe_path

_BLOCK_BYTES = 2**20
_TIMEOUT_SECONDS = 60.0
"""Timeout of a connection without data."""
_PAGE_SIZE = 200
_MAX_PAGES = 5000
_MAX_ATTEMPTS = 3
_RETRIED_STATUS = (429, 500, 502, 503, 504)
_OTHER_HUB = {
    "model": "take Hugging Face with ANABATIC_HUB=huggingface (HF_ENDPOINT: its mirror), or copy the folder here and"
    " give its path",
    "dataset": "take Hugging Face with hf:OWNER/NAME (HF_ENDPOINT: its mirror), or copy the files here and give their"
    " path",
}


@dataclass(frozen=True)
class Repo:
    """A repository: what it holds, and `OWNER/NAME`."""

    kind: Literal["model", "dataset"]
    name: str

    @property
    def other_source_hint(self) -> str:
        """Other hosts of its files."""
        return f"set MODELSCOPE_ENDPOINT to a mirror, {_OTHER_HUB[self.kind]}"

    def make_url(self, resource: str = "", **query: str) -> str:
        """Return the address of a resource of it."""
        suffix = f"/{resource}" if resource else ""
        return f"{get_endpoint()}/api/v1/{self.kind}s/{self.name}{suffix}?{urllib.parse.urlencode(query)}".rstrip("?")


def get_endpoint() -> str:
    """Return the URL of the hub: `MODELSCOPE_ENDPOINT`, else `MODELSCOPE_DOMAIN`, else the default."""
    value = os.environ.get("MODELSCOPE_ENDPOINT") or os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
    return (value if "://" in value else f"https://{value}").rstrip("/")


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` forbids requests; the variable counts for both hubs."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "on", "yes")


def get_token() -> str:
    """Return `MODELSCOPE_API_TOKEN`, or an empty string."""
    return os.environ.get("MODELSCOPE_API_TOKEN", "").strip()


def make_auth_headers() -> dict[str, str]:
    """Return the headers of a token: older addresses read the cookie, newer ones `Authorization`."""
    token = get_token()
    return {"Authorization": f"Bearer {token}", "Cookie": f"m_session_id={token}"} if token else {}


def list_files(repo: Repo, revision: str) -> list[HubFile]:
    """Return the files of a repository at a revision.

    Raises:
        DataError: no such repository or revision, no access, no connection, an answer of another form, or a path that
            leads out of the repository.
    """
    files = [HubFile(path, size, checksum) for page in _iter_pages(repo, revision) for path, size, checksum in page]
    for file in files:
        require_safe_path(file.path, f"{repo.name}: {get_endpoint()}")
    return files


def _iter_pages(repo: Repo, revision: str) -> Iterator[list[tuple[str, int, str]]]:
    """Yield `(path, size, SHA-256)` of each page; a model has one."""
    if repo.kind == "model":
        yield _parse_files(repo, _read_json(repo, repo.make_url("repo/files", Revision=revision, Recursive="true")))[0]
        return
    for page in range(1, _MAX_PAGES + 1):
        query = {"Revision": revision, "Recursive": "True", "PageNumber": str(page), "PageSize": str(_PAGE_SIZE)}
        files, num_entries = _parse_files(repo, _read_json(repo, repo.make_url("repo/tree", **query)))
        yield files
        if num_entries < _PAGE_SIZE:
            return


def _read_json(repo: Repo, url: str) -> Any:
    with open_url(repo, url) as response:
        try:
            return json_reader.loads(response.read())
        except ValueError as error:
            raise _make_format_error(repo, error) from error


def _parse_files(repo: Repo, answer: Any) -> tuple[list[tuple[str, int, str]], int]:
    """Return the files of an answer, and the number of its entries with folders."""
    try:
        data = answer["Data"]
        rows = data if isinstance(data, list) else data["Files"]
        files = [
            (str(row["Path"]), int(row["Size"]), str(row.get("Sha256") or ""))
            for row in rows
            if row.get("Type", "blob") == "blob"
        ]
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise _make_format_error(repo, error) from error
    return files, len(rows)


def _make_format_error(repo: Repo, error: Exception) -> DataError:
    message = f"{repo.name}: {get_endpoint()} does not answer as ModelScope does ({error!r})"
    return DataError(message, repo.other_source_hint)


def fetch_file(repo: Repo, revision: str, file: HubFile, target: Path) -> None:
    """Download a file under a temporary name, check size and checksum, then rename it; a cut transfer is tried again.

    Raises:
        DataError: no access, no connection, or a broken download.
        OSError: the disk refuses writes.
    """
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            reason = _receive_file(repo, revision, file, part)
            if not reason:
                os.replace(part, target)
                return
            if attempt < _MAX_ATTEMPTS:
                log.debug(f"{repo.name}: {file.path}: {reason}; trying again")
        raise DataError(
            f"{repo.name}: the download of {file.path} from {get_endpoint()} broke off: {reason}",
            f"start again, whole files are kept; or {repo.other_source_hint}",
        )
    finally:
        part.unlink(missing_ok=True)


def _receive_file(repo: Repo, revision: str, file: HubFile, part: Path) -> str:
    """Write a file; return what is wrong with what came, empty if nothing is."""
    received = 0
    url = repo.make_url("repo", Revision=revision, FilePath=file.path)
    with open_url(repo, url) as response, open(part, "wb") as out:
        while received <= file.size:  # a server that does not end must not fill the disk
            try:
                block: bytes = response.read(_BLOCK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                return f"{received:,} of {file.size:,} bytes came ({error})"
            if not block:
                break
            out.write(block)
            received += len(block)
        out.flush()
        os.fsync(out.fileno())
    return file.describe_damage(part)


def open_url(repo: Repo, url: str) -> Any:
    """Request an address and return the response; a server that is overloaded is asked again.

    Raises:
        DataError: the hub refuses, or does not answer.
    """
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            request = urllib.request.Request(url)
            for key, value in make_auth_headers().items():  # not sent on to the host that a redirect names
                request.add_unredirected_header(key, value)
            return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _RETRIED_STATUS or attempt == _MAX_ATTEMPTS:
                raise _make_status_error(repo, error.code) from error
            time.sleep(_retry_delay(attempt))
        except (OSError, http.client.HTTPException, ValueError) as error:
            local = "no such folder, and " if repo.kind == "model" else ""
            raise DataError(
                f"{repo.name}: {local}{get_endpoint()} cannot be reached: {getattr(error, 'reason', error)}",
                repo.other_source_hint,
            ) from error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _retry_delay(attempt: int) -> float:
    """Seconds before the next attempt: 0.5, 1."""
    return 0.5 * 2 ** (attempt - 1)


def _make_status_error(repo: Repo, status: int) -> DataError:
    is_model = repo.kind == "model"
    if status == 404:
        what = "neither a folder here nor a model" if is_model else "not a data set, or not at this revision,"
        hint = "check the spelling; for a private one set MODELSCOPE_API_TOKEN; Hugging Face is "
        return DataError(
            f"{repo.name}: {what} of {get_endpoint()} (or a private one)",
            hint + ("ANABATIC_HUB=huggingface" if is_model else "hf:OWNER/NAME"),
        )
    if status in (401, 403):
        address = f"{get_endpoint()}/{repo.kind}s/{repo.name}"
        return DataError(
            f"{repo.name}: {get_endpoint()} gives it only to those who have access ({status})",
            f"ask for it at {address}, and set MODELSCOPE_API_TOKEN to a token of that account",
        )
    return DataError(f"{repo.name}: {get_endpoint()} answers {status}", f"try again later; or {repo.other_source_hint}")
