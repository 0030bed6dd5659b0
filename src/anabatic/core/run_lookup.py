"""Find run and model folders below the current one: suggestions for a mistyped name, before any hub is queried."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from anabatic.core.errors import DataError

HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""Id of a model on a hub, `OWNER/NAME`."""
LOCAL_FOLDERS = ("runs", "output", "outputs", "saves", "checkpoints", "exported")
"""First path components that always mean a local folder."""
_MARKER_FILES = ("config.json", "adapter_config.json", "best_model", "final_model", "metrics.jsonl", "pipeline.json")
_MAX_FOLDERS = 2000
"""Maximum folders to inspect."""
_MIN_SIMILARITY = 0.85
"""Minimum similarity to a local folder at which a name of the form of a hub id counts as a typo."""


def is_hub_id(name: str | Path, hub: str | None = None) -> bool:
    """Return whether `name` is `OWNER/NAME` and not a local path; never if it starts with `.`, `/` or `~`.

    A name whose first component is a local folder, or that is similar to the name of a run, is not a hub id unless
    `hub` is given: a typo must not be sent to a hub.
    """
    if HUB_ID_PATTERN.fullmatch(str(name)) is None or os.path.lexists(name):
        return False
    if str(name).partition("/")[0] in LOCAL_FOLDERS:
        return False
    return hub is not None or not is_local_name(str(name))


def is_local_name(name: str) -> bool:
    """Return whether `OWNER/NAME` means a missing local folder: `OWNER` exists, or a run has a similar name."""
    owner = name.partition("/")[0]
    return (
        owner in LOCAL_FOLDERS
        or os.path.isdir(owner)
        or bool(difflib.get_close_matches(name, list(iter_run_folders(name)), 1, _MIN_SIMILARITY))
    )


def find_nearest_folders(name: str) -> list[str]:
    """Return up to three run and model folders with the most similar names, the nearest first."""
    folders = list(iter_run_folders(name))
    basename = name.rstrip("/").rpartition("/")[2]
    exact_matches = [folder for folder in folders if folder.rpartition("/")[2] == basename]
    close_matches = difflib.get_close_matches(name, folders, 3, 0.6)
    folder_by_basename = {folder.rpartition("/")[2]: folder for folder in reversed(folders)}
    close_matches += [
        folder_by_basename[folder] for folder in difflib.get_close_matches(basename, folder_by_basename, 3, 0.75)
    ]
    return list(dict.fromkeys([*exact_matches, *close_matches]))[:3]


def suggest_folder(name: str) -> str:
    """Return ` Did you mean "runs/mine"?`, or an empty string."""
    suggestions = [f'"{folder}"' for folder in find_nearest_folders(name)]
    return f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""


def make_missing_model_error(name: str) -> DataError:
    """Return the error for a missing model folder, with suggestions."""
    others = [folder for folder in iter_run_folders(name) if folder not in find_nearest_folders(name)]
    hint = (
        f"runs and models here: {', '.join(others[:6])}"
        if others
        else "give a Hugging Face folder or a finished run folder"
    )
    if is_hub_id(name, "huggingface"):
        hint += f"; a hub is asked for {name} from another folder, or with --hub in a training"
    return DataError(
        f"model folder {os.path.expanduser(name)} does not exist.{suggest_folder(name)}".removesuffix("."), hint
    )


def iter_run_folders(name: str = "") -> Iterator[str]:
    """Yield the folders with a run or a model: here, in `LOCAL_FOLDERS`, and in the parent folder of `name`."""
    parent = os.path.dirname(os.path.expanduser(name.rstrip("/")))
    roots = [".", *LOCAL_FOLDERS, *([parent] if parent and parent not in LOCAL_FOLDERS else [])]
    for folder in islice(_iter_folders(roots), _MAX_FOLDERS):
        if any((folder / marker).exists() for marker in _MARKER_FILES):
            yield str(folder)


def _iter_folders(roots: list[str]) -> Iterator[Path]:
    """Yield the subfolders of `roots`; for roots of `LOCAL_FOLDERS` also one level below."""
    seen: set[Path] = set()
    for root in roots:
        for folder in _list_subfolders(Path(root)):
            for path in (folder, *(_list_subfolders(folder) if root in LOCAL_FOLDERS else ())):
                if path not in seen:
                    seen.add(path)
                    yield path


def _list_subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return []
    with os.scandir(folder) as entries:
        return sorted(
            Path(folder, entry.name) for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        )
