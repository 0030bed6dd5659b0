"""Hugging Face through huggingface_hub: its address, its errors in our words, and the files of data sets."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean
from anabatic.core.paths import make_write_error
from anabatic.hub.dataset_name import DatasetName
from anabatic.hub.hub_file import HubFile, require_safe_path

T = TypeVar("T")
_MAX_ATTEMPTS = 3
RETRIED_STATUS = (429, 500, 502, 503, 504)
"""Answers of a server that may answer otherwise a moment later."""
_DISK_HINT = "choose another place with HF_HOME"
RepoKind = Literal["model", "dataset"]
_ALTERNATIVES: dict[RepoKind, str] = {
    "model": "set HF_ENDPOINT to a mirror such as https://hf-mirror.com, take ModelScope with ANABATIC_HUB=modelscope,"
    " or copy the folder here and give its path",
    "dataset": "set HF_ENDPOINT to a mirror such as https://hf-mirror.com, take ModelScope with ms:OWNER/NAME,"
    " or copy the files here and give their path",
}
_LOCAL_WORDS: dict[RepoKind, str] = {"model": "no such folder, ", "dataset": ""}


def get_endpoint() -> str:
    """Return the URL of the hub: `HF_ENDPOINT`, else the default."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """Return whether `HF_HUB_OFFLINE` forbids requests."""
    from huggingface_hub import constants

    return bool(constants.is_offline_mode())


@contextmanager
def translate_errors(name: str, kind: RepoKind) -> Iterator[None]:
    """Turn what huggingface_hub raises into errors that say what to do.

    Raises:
        DataError: no such repository or revision, no access, no connection, or a broken download.
        Failure: the cache cannot be written.
    """
    import huggingface_hub
    from huggingface_hub import errors

    endpoint, alternatives = get_endpoint(), _ALTERNATIVES[kind]
    address = f"{endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    try:
        yield
    except errors.GatedRepoError as error:
        raise DataError(
            f"{name}: {endpoint} gives it only to those who have accepted its terms",
            f"accept them at {address}, and set HF_TOKEN to a token of that account",
        ) from error
    except errors.RepositoryNotFoundError as error:
        where = "neither a folder here nor a model" if kind == "model" else "not a data set"
        other = "ModelScope is ANABATIC_HUB=modelscope" if kind == "model" else "ModelScope is ms:OWNER/NAME"
        raise DataError(
            f"{name}: {where} of {endpoint} (or a private one)",
            f"check the spelling; for a private one set HF_TOKEN; {other}",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        message = f"{name}: {endpoint} answers {status}"
        hint = "set HF_TOKEN to a token that may read it; or " if status in (401, 403) else "try again later; or "
        raise DataError(message, hint + alternatives) from error
    except errors.LocalEntryNotFoundError as error:
        raise _make_unreachable_error(name, kind) from error
    except Exception as error:  # the HTTP library depends on the version of huggingface_hub
        if isinstance(error, errors.HFValidationError) or not is_transfer_error(error):
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise make_write_error(Path(str(error.filename)), error, _DISK_HINT) from error
        if _is_connection_error(error):
            raise _make_unreachable_error(name, kind) from error
        message = f"{name}: the download from {endpoint} broke off: {first_line(error)}"
        raise DataError(message, f"start again, what is here is kept; or {alternatives}") from error


def _make_unreachable_error(name: str, kind: RepoKind) -> DataError:
    offline = is_offline()
    reason = "HF_HUB_OFFLINE is set" if offline else f"{get_endpoint()} cannot be reached"
    local = "the model's folder" if kind == "model" else "its files"
    hint = f"unset HF_HUB_OFFLINE, or give {local}" if offline else _ALTERNATIVES[kind]
    return DataError(f"{name}: {_LOCAL_WORDS[kind]}not (wholly) in the cache, and {reason}", hint)


def is_transfer_error(error: Exception) -> bool:
    """Return whether an error comes from the network or the disk."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "requests")


def _is_connection_error(error: Exception) -> bool:
    return type(error).__name__ in ("ConnectError", "ConnectTimeout", "ConnectionError", "OfflineModeIsEnabled")


def first_line(error: Exception) -> str:
    """Return the first line of an error, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def list_dataset_files(name: DatasetName) -> tuple[str, list[HubFile]]:
    """Return the commit of a revision, and all its files.

    Raises:
        DataError: no such data set or revision, no access, or no connection.
    """
    from huggingface_hub import HfApi, RepoFile, errors

    api = HfApi(endpoint=get_endpoint())
    with translate_errors(name.repo, "dataset"):
        try:
            info = _retry_when_busy(lambda: api.dataset_info(name.repo, revision=name.revision or None))
        except errors.RevisionNotFoundError as error:
            raise _make_revision_error(api, name) from error
        entries = _retry_when_busy(
            lambda: list(api.list_repo_tree(name.repo, recursive=True, revision=info.sha, repo_type="dataset"))
        )
    if not info.sha:
        raise DataError(f"{name}: {get_endpoint()} names no commit", "set HF_ENDPOINT to another address")
    files = [HubFile(entry.path, entry.size, _get_checksum(entry)) for entry in entries if isinstance(entry, RepoFile)]
    for file in files:
        require_safe_path(file.path, f"{name.repo}: {get_endpoint()}")
    return info.sha, files


def _retry_when_busy(call: Callable[[], T]) -> T:
    """Call again where the hub is overloaded; huggingface_hub does so for downloads alone."""
    from huggingface_hub import errors

    for attempt in range(1, _MAX_ATTEMPTS):
        try:
            return call()
        except errors.HfHubHTTPError as error:
            if error.response.status_code not in RETRIED_STATUS:
                raise
            time.sleep(0.5 * 2 ** (attempt - 1))
    return call()


def _get_checksum(entry: Any) -> str:
    return str(entry.lfs.sha256 if entry.lfs else entry.blob_id or "")


def _make_revision_error(api: Any, name: DatasetName) -> DataError:
    refs = api.list_repo_refs(name.repo, repo_type="dataset")
    known = [ref.name for ref in (*refs.branches, *refs.tags)]
    near = did_you_mean(name.revision, known)
    message = f'{name.repo} has no revision "{name.revision}".{near}'.removesuffix(".")
    return DataError(message, f"branches and tags: {', '.join(known[:12])}; a commit has 40 digits")


def find_cached_file(name: DatasetName, file: HubFile) -> Path | None:
    """Return the file from the cache, if it is there with its size."""
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(name.repo, file.path, revision=name.revision, repo_type="dataset")
    if not isinstance(found, str):
        return None
    path = Path(found)
    return path if file.has_size(path) else None


def fetch_dataset_file(name: DatasetName, file: HubFile) -> Path:
    """Download a file of a commit, check it, and return its path in the cache.

    Raises:
        DataError: no access, no connection, or a broken download, which is removed from the cache.
        Failure: the cache cannot be written.
    """
    import huggingface_hub

    with translate_errors(name.repo, "dataset"):
        path = Path(
            huggingface_hub.hf_hub_download(
                name.repo,
                file.path,
                repo_type="dataset",
                revision=name.revision,
                endpoint=get_endpoint(),
                local_files_only=is_offline(),
            )
        )
    if damage := file.describe_damage(path):
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise DataError(
            f"{name.repo}: the download of {file.path} from {get_endpoint()} broke off: {damage}",
            f"start again, whole files are kept; or {_ALTERNATIVES['dataset']}",
        )
    return path


def get_cache_folder() -> Path:
    """Return the folder of the cache: `HF_HUB_CACHE`, else `HF_HOME`/hub."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
