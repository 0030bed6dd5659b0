"""Assign the files of a repository to subsets and splits.

The rules are those of the hubs: `configs` in the front matter of README.md, otherwise the names of files and folders
(https://huggingface.co/docs/hub/datasets-file-names-and-splits and .../datasets-manual-configuration).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import translate
from typing import Any

import yaml

from anabatic.core.errors import DataError
from anabatic.core.formatting import did_you_mean
from anabatic.hub.dataset_name import DatasetName

Splits = Mapping[str, Sequence[str]]
"""Split -> paths in the repository, in the order in which they are read."""

DATA_EXTENSIONS = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".jsonl.zst": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "text",
}
"""Extension -> format; the extensions are those of rows and texts that the readers know."""
CONVERTED_REVISION = "refs/convert/parquet"
"""Branch on which Hugging Face keeps its own Parquet conversion, as SUBSET/SPLIT/*.parquet."""
DEFAULT_SUBSET = "default"
DEFAULT_SPLIT = "train"
_SPLIT_KEYWORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_NO_DATA_FILES = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_SHARDED_FILE = re.compile(r"data/(?P<split>[^/]+)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
_CONVERTED_FILE = re.compile(r"(?P<subset>[^/]+)/(?:partial-)?(?P<split>[^/]+)/[0-9]{4,}\.parquet")
_FRONT_MATTER = re.compile(r"\A(?:\ufeff)?---\s*\r?\n(.*?)\r?\n---\s*(?:\r?\n|\Z)", re.DOTALL)


def read_front_matter(readme: str) -> dict[str, Any]:
    """Return the YAML front matter of a card; `{}` without one, or where it is no mapping."""
    match = _FRONT_MATTER.match(readme)
    try:
        loaded = yaml.safe_load(match[1]) if match else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {str(key): value for key, value in loaded.items()} if isinstance(loaded, dict) else {}


def get_data_format(path: str) -> str:
    """Return `parquet`, `json`, `csv` or `text` of a path, or an empty string."""
    name = path.lower()
    return next((kind for ending, kind in DATA_EXTENSIONS.items() if name.endswith(ending)), "")


def find_split_files(name: DatasetName, paths: Iterable[str], card: Mapping[str, Any]) -> tuple[DatasetName, list[str]]:
    """Return the name with its subset and split, and the files of the split.

    Args:
        name: empty subset and split mean the default ones.
        paths: all files of the repository.
        card: front matter of its README.md.

    Raises:
        DataError: no such subset or split, no data files, or a data set that a script generates.
    """
    listed = sorted(paths)
    subsets = list_subsets(name, listed, card)
    subset = _choose_subset(name, subsets, card)
    splits = subsets[subset] if subset is not None else {}
    if not splits:
        raise _make_empty_error(name, listed)
    split = _choose_split(name, splits)
    chosen_subset = name.subset or (subset if subset and len(subsets) > 1 else "")
    named = DatasetName(name.scheme, name.repo, name.revision, chosen_subset, split)
    return named, _keep_one_format(splits[split])


def list_subsets(name: DatasetName, paths: Sequence[str], card: Mapping[str, Any]) -> dict[str, Splits]:
    """Return the splits of every subset, in the order of the card."""
    found: dict[str, Splits] = {}
    for config in _list_configs(card):
        subset = str(config.get("config_name") or DEFAULT_SUBSET)
        folder = _clean_folder(config.get("data_dir"))
        inside = [path for path in paths if path.startswith(folder)]
        declared = config.get("data_files")
        if declared is None:
            found[subset] = _find_splits_by_name(inside, folder)
        else:
            patterns = _read_patterns(declared)
            found[subset] = {split: _match_files(paths, each, folder) for split, each in patterns.items()}
    if not found:
        found = _list_converted_subsets(paths) or {DEFAULT_SUBSET: _find_splits_by_name(paths, "")}
    return {subset: {split: files for split, files in splits.items() if files} for subset, splits in found.items()}


def _list_configs(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    configs = card.get("configs")
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _clean_folder(folder: Any) -> str:
    text = str(folder or "").removeprefix("./").strip("/")
    return f"{text}/" if text and text != "." else ""


def _read_patterns(declared: Any) -> dict[str, list[str]]:
    """Return split -> patterns of `data_files`: one pattern, a list, a mapping, or a list of `split` and `path`."""
    if isinstance(declared, str):
        return {DEFAULT_SPLIT: [declared]}
    if isinstance(declared, dict):
        return {str(split): _as_patterns(path) for split, path in declared.items()}
    found: dict[str, list[str]] = {}
    for entry in declared if isinstance(declared, list) else []:
        split, path = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (DEFAULT_SPLIT, entry)
        found.setdefault(str(split or DEFAULT_SPLIT), []).extend(_as_patterns(path))
    return found


def _as_patterns(path: Any) -> list[str]:
    return [str(item) for item in path] if isinstance(path, list) else [str(path)] if path else []


def _match_files(paths: Sequence[str], patterns: Sequence[str], folder: str) -> list[str]:
    matched: list[str] = []
    for pattern in patterns:
        full = folder + pattern.removeprefix("./")
        compiled = _compile_glob(full)
        matched += [path for path in paths if path not in matched and _is_match(path, full, compiled)]
    return [path for path in matched if get_data_format(path)]


def _compile_glob(pattern: str) -> re.Pattern[str]:
    """`*` and `?` stop at a slash, `**` between slashes matches any folders, as in Python's glob."""
    parts = pattern.split("/")
    text = ""
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if part == "**":
            text += r".*" if is_last else r"(?:[^/]+/)*"
        else:
            # fnmatch lets * and ? match a slash
            body = translate(part).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
            text += body.replace(".*", "[^/]*") + ("" if is_last else "/")
    return re.compile(text, re.DOTALL)


def _is_match(path: str, pattern: str, compiled: re.Pattern[str]) -> bool:
    """Hidden files, folders that begin with `__` and cards belong to no pattern that does not name them."""
    if compiled.fullmatch(path) is None:
        return False
    if path.rpartition("/")[2] in _NO_DATA_FILES and path.rpartition("/")[2] != pattern.rpartition("/")[2]:
        return False
    return _count_special(path) == _count_special(pattern)


def _count_special(path: str) -> tuple[int, int]:
    parts = path.split("/")
    return sum(part.startswith(".") for part in parts), sum(part.startswith("__") for part in parts[:-1])


def _find_splits_by_name(paths: Sequence[str], folder: str) -> dict[str, list[str]]:
    """Return the splits by the names below `folder`: numbered files in data/, folders, files; otherwise all is train.

    The first of these rules that finds anything decides, as on the hub.
    """
    relative = {path[len(folder) :]: path for path in paths}
    data = [path for path in relative if get_data_format(path) and _is_match(path, "**", re.compile(".*", re.DOTALL))]
    if sharded := [match for path in data if (match := _SHARDED_FILE.fullmatch(path))]:
        found: dict[str, list[str]] = {}
        for match in sharded:
            found.setdefault(match["split"], []).append(relative[match[0]])
        return found
    for take in (lambda path: path.split("/")[:-1], lambda path: path.split("/")[-1:]):
        named = {
            split: [relative[path] for path in data if any(_has_keyword(part, words) for part in take(path))]
            for split, words in _SPLIT_KEYWORDS.items()
        }
        if any(named.values()):
            return named
    return {DEFAULT_SPLIT: [relative[path] for path in data]} if data else {}


def _has_keyword(part: str, words: Sequence[str]) -> bool:
    """Return True if a name contains a word between its ends, dots, blanks, digits, `-` and `_`."""
    return any(re.search(rf"(?:^|[-._ 0-9]){word}(?:$|[-._ 0-9])", part) for word in words)


def _list_converted_subsets(paths: Sequence[str]) -> dict[str, Splits]:
    """Return the subsets of a conversion; `{}` where any data file lies elsewhere."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in paths:
        match = _CONVERTED_FILE.fullmatch(path)
        if match is not None:
            found.setdefault(match["subset"], {}).setdefault(match["split"], []).append(path)
        elif get_data_format(path):
            return {}
    return dict(found)


def _choose_subset(name: DatasetName, subsets: Mapping[str, Splits], card: Mapping[str, Any]) -> str | None:
    if name.subset:
        if name.subset in subsets:
            return name.subset
        known = ", ".join(list(subsets)[:12]) + (f" and {len(subsets) - 12} more" if len(subsets) > 12 else "")
        near = did_you_mean(name.subset, subsets)
        raise DataError(
            f'{name.repo_name} has no subset "{name.subset}".{near}'.removesuffix("."), f"its subsets: {known}"
        )
    marked = [str(config.get("config_name")) for config in _list_configs(card) if config.get("default") is True]
    for choice in (*marked, DEFAULT_SUBSET):
        if choice in subsets:
            return choice
    if len(subsets) > 1:
        some = ", ".join(list(subsets)[:12]) + (f" and {len(subsets) - 12} more" if len(subsets) > 12 else "")
        example = DatasetName(name.scheme, name.repo, name.revision, next(iter(subsets)), name.split)
        raise DataError(f"{name.repo_name} has {len(subsets)} subsets and no default one: {some}", f"write {example}")
    return next(iter(subsets), None)


def _choose_split(name: DatasetName, splits: Splits) -> str:
    if name.split in splits:
        return name.split
    if not name.split and (DEFAULT_SPLIT in splits or len(splits) == 1):
        return DEFAULT_SPLIT if DEFAULT_SPLIT in splits else next(iter(splits))
    known = ", ".join(splits)
    if not name.split:
        raise DataError(f"{name} has no split {DEFAULT_SPLIT}: choose one", f"its splits: {known}")
    hint = f"its splits: {known}"
    if "[" in name.split:
        hint += "; the first 1000 rows of a split are #1000"
    raise DataError(f'{name} has no split "{name.split}".{did_you_mean(name.split, splits)}'.removesuffix("."), hint)


def _keep_one_format(paths: Sequence[str]) -> list[str]:
    """Keep the most common format: the same rows often are there in two."""
    counts = Counter(get_data_format(path) for path in paths)
    best = max(counts, key=lambda kind: (counts[kind], kind == "parquet"))
    return [path for path in paths if get_data_format(path) == best]


def _make_empty_error(name: DatasetName, paths: Sequence[str]) -> DataError:
    script = name.repo.rpartition("/")[2] + ".py"
    if script in paths:
        converted = DatasetName(name.scheme, name.repo, CONVERTED_REVISION, "SUBSET", name.split or DEFAULT_SPLIT)
        hint = f"Hugging Face's conversion of it may be there: {converted}" if name.scheme == "hf" else "name another"
        return DataError(f"{name.repo_name} is generated by {script}, and programs of a hub are not run", hint)
    kinds = sorted({path.rpartition("/")[2].partition(".")[2] or path for path in paths})
    contents = f"{len(paths)} files ({', '.join(kinds[:8])})" if paths else "no files at all"
    return DataError(f"{name} has no data files, {contents}", f"rows are read from {', '.join(DATA_EXTENSIONS)}")
