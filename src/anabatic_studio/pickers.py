"""Models and data files that the page offers: what lies in known folders, found by names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anabatic.core import json_reader

MAX_ENTRIES = 2000
MAX_FOLDERS = 5000
MAX_DEPTH = 4
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
_COMPRESSED_SUFFIXES = (".gz", ".zst")
_RECIPE_SUFFIXES = (".yaml", ".yml")
_SKIPPED_FOLDERS = ("node_modules", "__pycache__", "site-packages")
_MODEL_FILES = {"config.json", "adapter_config.json", "tokenizer.json"}
_RUN_FILES = ("metrics.jsonl", "events.jsonl", "pipeline.jsonl")


def list_models(runs: Path, folders: list[Path]) -> list[dict[str, Any]]:
    """Return models: `path` (what a setting takes), `kind` (run, folder or cache), `type`, `adapter`, `changed`.

    Args:
        runs: folder of the runs; of each the best and the final model are listed.
        folders: further folders with model folders.
    """
    entries: dict[str, dict[str, Any]] = {}
    for root, kind in [(runs, "run"), *((folder, "folder") for folder in folders)]:
        for folder, files in _walk(root, MAX_DEPTH, into_runs=True):
            if not _MODEL_FILES - {"tokenizer.json"} & set(files):
                continue
            model = _describe_model(folder, kind)
            if model is not None:
                entries.setdefault(model["path"], model)
    entries.update({model["path"]: model for model in _list_cached_models()})
    return sorted(entries.values(), key=lambda entry: -entry["changed"])[:MAX_ENTRIES]


def list_data_files(folders: list[Path], skipped: Path) -> list[dict[str, Any]]:
    """Return files with rows or text: `path` (relative to the working directory if below it), `bytes`, `changed`.

    Args:
        skipped: folder of the runs; its run folders contain no data to train on.
    """
    entries: dict[str, dict[str, Any]] = {}
    for root in folders:
        for folder, files in _walk(root, MAX_DEPTH, into_runs=False):
            if _MODEL_FILES & set(files):
                continue  # the JSON files of a model are not rows
            for name in files:
                if not is_data_file(name) or folder == skipped:
                    continue
                path = folder / name
                try:
                    about = path.stat()
                except OSError:
                    continue
                shown = format_path(path)
                entries[shown] = {"path": shown, "bytes": about.st_size, "changed": about.st_mtime}
                if len(entries) >= MAX_ENTRIES:
                    return sorted(entries.values(), key=lambda entry: entry["path"])
    return sorted(entries.values(), key=lambda entry: entry["path"])


def list_recipe_files(folders: list[Path]) -> dict[str, Path]:
    """Return YAML files: path as the user would type it -> file. Run folders, and links, are left out."""
    entries: dict[str, Path] = {}
    for root in folders:
        for folder, files in _walk(root, MAX_DEPTH, into_runs=False):
            for name in files:
                path = folder / name
                if name.lower().endswith(_RECIPE_SUFFIXES) and not path.is_symlink():
                    entries[format_path(path)] = path
            if len(entries) >= MAX_ENTRIES:
                break
    return dict(sorted(entries.items())[:MAX_ENTRIES])


def is_data_file(name: str) -> bool:
    """Return whether the readers know the ending of a file."""
    stem, suffix = os.path.splitext(name.lower())
    return (os.path.splitext(stem)[1] if suffix in _COMPRESSED_SUFFIXES else suffix) in _DATA_SUFFIXES


def format_path(path: Path) -> str:
    """Return a path as the user would type it."""
    absolute = path.absolute()
    try:
        return str(absolute.relative_to(Path.cwd()))
    except ValueError:
        return str(absolute)


def _walk(root: Path, depth: int, into_runs: bool) -> Iterator[tuple[Path, list[str]]]:
    for count, (name, folders, files) in enumerate(os.walk(root)):
        folder = Path(name)
        at_bottom = len(folder.relative_to(root).parts) >= depth
        is_run = any(file in files for file in _RUN_FILES)
        if is_run and not into_runs:
            folders[:] = []
            continue
        folders[:] = [] if at_bottom else sorted(inner for inner in folders if _is_visited(inner))
        yield folder, sorted(files)
        if count >= MAX_FOLDERS:
            return


def _is_visited(name: str) -> bool:
    return not name.startswith((".", "checkpoint-")) and name not in _SKIPPED_FOLDERS


def _describe_model(folder: Path, kind: str) -> dict[str, Any] | None:
    is_adapter = (folder / "adapter_config.json").is_file()
    try:
        config = json_reader.read_json_file(folder / ("adapter_config.json" if is_adapter else "config.json"))
        changed = folder.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    name = config.get("base_model_name_or_path") if is_adapter else config.get("model_type")
    if not isinstance(name, str):
        return None
    return {"path": format_path(folder), "kind": kind, "type": name, "adapter": is_adapter, "changed": changed}


def _list_cached_models() -> Iterator[dict[str, Any]]:
    """Models in the cache of huggingface_hub (https://huggingface.co/docs/huggingface_hub/guides/manage-cache)."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    for folder in sorted(cache.glob("models--*")) if cache.is_dir() else ():
        configs = sorted(folder.glob("snapshots/*/config.json"))
        if not configs:
            continue
        model = _describe_model(configs[-1].parent, "cache")
        if model is not None:
            yield {**model, "path": folder.name.removeprefix("models--").replace("--", "/")}
