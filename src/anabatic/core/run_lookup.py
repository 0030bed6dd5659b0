"""Folders of runs and models below this one: what a mistyped name may have meant, before any hub is asked for it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from anabatic.core.errors import DataError

HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""A model on a hub, `OWNER/NAME`."""
LOCAL_FOLDERS = ("runs", "output", "outputs", "saves", "checkpoints", "exported")
"""First parts of names that are always folders here."""
_MARKER_FILES = ("config.json", "adapter_config.json", "best_model", "final_model", "metrics.jsonl", "pipeline.json")
_MAX_FOLDERS = 2000
"""Folders that are looked at."""
_MIN_SIMILARITY = 0.85
"""From here on a name of a hub's form is taken for a slip of the pen."""


def is_hub_id(name: str | Path, asked: str | None = None) -> bool:
    """True for `OWNER/NAME` that is no path here. What begins with `.`, `/` or `~` or has more slashes never is one.

    Neither is a name whose first part is a folder here, or that a run is called nearly so, unless a hub is asked for by
    its own name: a slip of the pen is nothing to tell a hub.
    """
    if HUB_ID_PATTERN.fullmatch(str(name)) is None or os.path.lexists(name):
        return False
    if str(name).partition("/")[0] in LOCAL_FOLDERS:
        return False
    return asked is not None or not is_local_name(str(name))


def is_local_name(name: str) -> bool:
    """True for `OWNER/NAME` that means a folder here, though there is none: its first part is one, or a run is near."""
    first = name.partition("/")[0]
    return (
        first in LOCAL_FOLDERS
        or os.path.isdir(first)
        or bool(difflib.get_close_matches(name, list(iter_run_folders(name)), 1, _MIN_SIMILARITY))
    )


def find_nearest_folders(name: str) -> list[str]:
    """Return the folders of runs and models here whose names are nearest, at most three, the nearest first."""
    known = list(iter_run_folders(name))
    last = name.rstrip("/").rpartition("/")[2]
    same = [one for one in known if one.rpartition("/")[2] == last]
    near = difflib.get_close_matches(name, known, 3, 0.6)
    ends = {one.rpartition("/")[2]: one for one in reversed(known)}
    near += [ends[one] for one in difflib.get_close_matches(last, ends, 3, 0.75)]
    return list(dict.fromkeys([*same, *near]))[:3]


def suggest_folder(name: str) -> str:
    """Return ` Did you mean "runs/mine"?`, or an empty text."""
    some = [f'"{one}"' for one in find_nearest_folders(name)]
    return f" Did you mean {' or '.join(some)}?" if some else ""


def make_missing_model_error(name: str) -> DataError:
    """Return the error for a model that is not here, with the runs that may be meant."""
    here = [one for one in iter_run_folders(name) if one not in find_nearest_folders(name)]
    hint = (
        f"runs and models here: {', '.join(here[:6])}"
        if here
        else "give a Hugging Face folder or a finished run folder"
    )
    if is_hub_id(name, "huggingface"):
        hint += f"; a hub is asked for {name} from another folder, or with --hub in a training"
    return DataError(
        f"model folder {os.path.expanduser(name)} does not exist.{suggest_folder(name)}".removesuffix("."), hint
    )


def iter_run_folders(name: str = "") -> Iterator[str]:
    """Yield the folders here, in `runs`, and beside what `name` says, that hold a run or a model."""
    beside = os.path.dirname(os.path.expanduser(name.rstrip("/")))
    places = [".", *LOCAL_FOLDERS, *([beside] if beside and beside not in LOCAL_FOLDERS else [])]
    for folder in islice(_iter_folders(places), _MAX_FOLDERS):
        if any((folder / sign).exists() for sign in _MARKER_FILES):
            yield str(folder)


def _iter_folders(places: list[str]) -> Iterator[Path]:
    """Yield the folders in some places, and in the folders of those that have a name of `LOCAL_FOLDERS`."""
    seen: set[Path] = set()
    for place in places:
        for folder in _list_subfolders(Path(place)):
            for one in (folder, *(_list_subfolders(folder) if place in LOCAL_FOLDERS else ())):
                if one not in seen:
                    seen.add(one)
                    yield one


def _list_subfolders(place: Path) -> list[Path]:
    if not place.is_dir() or not os.access(place, os.R_OK | os.X_OK):
        return []
    with os.scandir(place) as entries:
        return sorted(Path(place, one.name) for one in entries if one.is_dir() and not one.name.startswith("."))
