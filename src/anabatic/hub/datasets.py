"""Data sets of a hub: a name is resolved to a commit and its files, which are downloaded one by one when they are read.

What a hub says of a commit (its files and the front matter of its card) is kept below the cache of this program, so
that the same commit needs no connection again once its files are there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from anabatic.core import json_reader, log
from anabatic.core.errors import DataError
from anabatic.core.formatting import format_size
from anabatic.core.paths import get_cache_root, make_write_error, require_space, write_atomic
from anabatic.hub import dataset_layout, huggingface, modelscope_datasets
from anabatic.hub.dataset_name import DatasetName, Scheme
from anabatic.hub.hub_file import HubFile

RECORD_FILE = "datasets.json"
"""File of a run folder that records the commits of its data sets."""
_CARD_FILE = "README.md"
_MAX_CARD_BYTES = 8 * 2**20
_CARD_KEYS = ("license", "license_name", "language", "configs")
"""Keys of a card's front matter that are used."""
_CACHE_HINT = "choose another place with ANABATIC_CACHE"


class _HubClient(Protocol):
    """Interface of both hubs; each is a module."""

    def get_endpoint(self) -> str: ...
    def is_offline(self) -> bool: ...
    def get_cache_folder(self) -> Path: ...
    def list_dataset_files(self, name: DatasetName) -> tuple[str, list[HubFile]]: ...
    def find_cached_file(self, name: DatasetName, file: HubFile) -> Path | None: ...
    def fetch_dataset_file(self, name: DatasetName, file: HubFile) -> Path: ...


_CLIENTS: dict[Scheme, _HubClient] = {"hf": huggingface, "ms": modelscope_datasets}
_CACHE_HINTS: dict[Scheme, str] = {"hf": "choose another place with HF_HOME", "ms": _CACHE_HINT}


@dataclass(frozen=True)
class DatasetSnapshot:
    """A split of a data set at one commit.

    Attributes:
        name: with commit, subset and split.
        files: those of the split, in the order in which they are read.
        license: as the card names it; empty: it names none.
    """

    name: DatasetName
    files: tuple[HubFile, ...]
    license: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def describe(self) -> str:
        """Return the files, their size and the license, for the log."""
        count = f"{len(self.files)} file{'s' if len(self.files) != 1 else ''}"
        return f"{count}, {format_size(self.size)}, {f'license {self.license}' if self.license else 'no license named'}"

    def to_record(self) -> dict[str, Any]:
        """Return what a run keeps of it."""
        return {
            "commit": self.name.revision,
            "subset": self.name.subset,
            "split": self.name.split,
            "license": self.license,
            "files": len(self.files),
            "bytes": self.size,
        }


@dataclass(frozen=True)
class _Listing:
    """Facts about a commit."""

    commit: str
    files: tuple[HubFile, ...]
    card: dict[str, Any]


_resolved: dict[tuple[str, str, str], DatasetSnapshot] = {}
"""Within one process a name means one commit: (name, address of the hub, cache) -> its files."""
_logged: set[str] = set()
"""Snapshots that this process has logged."""


def resolve_dataset(name: DatasetName, is_check: bool = False) -> DatasetSnapshot:
    """Return the files of a data set at the commit that its revision now is; with `HF_HUB_OFFLINE` at the one known.

    Args:
        name: revision, subset and split may be left out.
        is_check: nothing is logged: the job that is checked may have recorded another commit, which it logs.

    Raises:
        DataError: no such data set, revision, subset or split, no access, no connection, or no data files.
        Failure: the cache cannot be written.
    """
    endpoint, cache = _CLIENTS[name.scheme].get_endpoint(), str(get_cache_root())
    key = (str(name), endpoint, cache)
    if key not in _resolved:
        snapshot = _resolve(name)
        _resolved[key] = _resolved[str(snapshot.name), endpoint, cache] = snapshot
    snapshot = _resolved[key]
    if not is_check and (pinned := str(snapshot.name)) not in _logged:
        _logged.add(pinned)
        log.info(f"data {pinned}: {snapshot.describe()}")
    return snapshot


def _resolve(name: DatasetName) -> DatasetSnapshot:
    listing = _load_listing(name) or _request_listing(name)
    pinned = name.pin(listing.commit)
    chosen, paths = dataset_layout.find_split_files(pinned, [file.path for file in listing.files], listing.card)
    by_path = {file.path: file for file in listing.files}
    return DatasetSnapshot(chosen, tuple(by_path[path] for path in paths), _read_license(listing.card))


def _read_license(card: dict[str, Any]) -> str:
    value = card.get("license_name") or card.get("license") or ""
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _get_folder(name: DatasetName) -> Path:
    return get_cache_root() / "datasets" / name.scheme / name.repo.replace("/", "--")


def _load_listing(name: DatasetName) -> _Listing | None:
    """Return the listing of a commit from the cache; offline also that of the commit a branch was last seen at."""
    commit = name.revision
    if not name.is_pinned:
        if not _CLIENTS[name.scheme].is_offline():
            return None
        commit = _read_json(_get_folder(name) / "revisions.json").get(name.revision, "")
    stored = _read_json(_get_folder(name) / f"{commit}.json") if commit else {}
    try:
        return _Listing(commit, tuple(HubFile(**file) for file in stored["files"]), stored["card"]) if stored else None
    except (KeyError, TypeError):  # written by another version: ask again
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json_reader.read_json_file(path)
    except (FileNotFoundError, ValueError):  # missing or damaged: ask again
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _request_listing(name: DatasetName) -> _Listing:
    client = _CLIENTS[name.scheme]
    if client.is_offline():
        raise DataError(
            f"{name}: not in the cache, and HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, or give its files",
        )
    commit, files = client.list_dataset_files(name)
    if name.revision == dataset_layout.CONVERTED_REVISION:  # that branch has no card
        listing = _Listing(commit, _keep_data_files(files), _read_license_keys(name))
        _store_listing(name, listing)
        return listing
    card_file = next((file for file in files if file.path == _CARD_FILE and file.size <= _MAX_CARD_BYTES), None)
    card = {}
    if card_file is not None:
        path = client.find_cached_file(name.pin(commit), card_file) or client.fetch_dataset_file(
            name.pin(commit), card_file
        )
        front_matter = dataset_layout.read_front_matter(path.read_text(encoding="utf-8", errors="replace"))
        card = {key: front_matter[key] for key in _CARD_KEYS if key in front_matter}
    listing = _Listing(commit, _keep_data_files(files), card)
    _store_listing(name, listing)
    return listing


def _keep_data_files(files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    return tuple(file for file in files if dataset_layout.get_data_format(file.path) or file.path.endswith(".py"))


def _read_license_keys(name: DatasetName) -> dict[str, Any]:
    """Return the license as the card of the default branch names it."""
    card = _request_listing(replace(name, revision="")).card
    return {key: card[key] for key in ("license", "license_name") if key in card}


def _store_listing(name: DatasetName, listing: _Listing) -> None:
    folder = _get_folder(name)
    content = {"files": [asdict(file) for file in listing.files], "card": listing.card}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / f"{listing.commit}.json", json.dumps(content, indent=1, default=str) + "\n")
        revisions = {**_read_json(folder / "revisions.json"), name.revision: listing.commit}
        write_atomic(folder / "revisions.json", json.dumps(revisions, indent=1) + "\n")
    except OSError as error:
        raise make_write_error(folder, error, _CACHE_HINT) from error


def iter_local_files(snapshot: DatasetSnapshot, reads_all: bool = True) -> Iterator[tuple[Path, str]]:
    """Yield the local path and the name of each file, downloaded when its turn comes.

    Args:
        snapshot: what to read.
        reads_all: the disk is checked for all missing files at once; otherwise for each alone.

    Raises:
        DataError: no access, no connection, or a broken download.
        Failure: the disk is too small or refuses writes.
    """
    client, scheme = _CLIENTS[snapshot.name.scheme], snapshot.name.scheme
    if reads_all:
        missing = sum(file.size for file in snapshot.files if client.find_cached_file(snapshot.name, file) is None)
        require_space(client.get_cache_folder(), missing, _CACHE_HINTS[scheme])
    for number, file in enumerate(snapshot.files, start=1):
        path = client.find_cached_file(snapshot.name, file)
        if path is None:
            require_space(client.get_cache_folder(), file.size, _CACHE_HINTS[scheme])
            log.info(
                f"{scheme}:{snapshot.name.repo}: fetching {file.path} ({number} of {len(snapshot.files)}),"
                f" {format_size(file.size)} from {client.get_endpoint()}"
            )
            path = client.fetch_dataset_file(snapshot.name, file)
        yield path, file.path


def list_cached_files(snapshot: DatasetSnapshot) -> list[Path]:
    """Return the files that are in the cache already, up to the first that is not."""
    client = _CLIENTS[snapshot.name.scheme]
    paths = (client.find_cached_file(snapshot.name, file) for file in snapshot.files)
    return [path for path in itertools.takewhile(lambda path: path is not None, paths) if path is not None]
