"""Names of data there as sources of ours: files, data sets of hubs, entries of a `dataset_info.json`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabatic.convert import dataset_info, peer_tables
from anabatic.convert.dataset_info import NamedDataset
from anabatic.convert.recipe_draft import RecipeDraft, convert_to_type, read_json_value
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import parse_whole

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst")
_HUB_TITLES = {"hf": "Hugging Face", "ms": "ModelScope"}
_SWIFT_NAME = re.compile(r"(?:(HF|MS|hf|ms)::)?([^:#\s]+)(?::([^:#]+))?(?:#(\d+))?")
"""[HF::]OWNER/NAME[:SUBSET/SUBSET][#ROWS] of ms-swift."""
_TRUE = ("true", "1", "yes", "on")
_HUB_OPTIONS = ("dataset", "dataset_name", "val_dataset", "eval_dataset")
"""Options whose values are names of a hub where they are no files; the others are paths."""
_COUNT = re.compile(r"(.+?)#(\d+)")


def set_data_sources(draft: RecipeDraft, folder: Path) -> None:
    """Set the data, with their columns; names of files begin in `folder`.

    Raises:
        ConfigError: a value is of the wrong type, or a dataset_info.json is torn.
    """
    _set_valid_fraction(draft)
    key = "data.train" if draft.setting_type("data.train") is not None else "inputs"
    if draft.setting_type(key) is None:
        return
    resolver = _NameResolver(draft, folder)
    found: list[NamedDataset] = []
    one = draft.gathered.get("dataset")
    if one is not None:
        names: list[str] = convert_to_type(one.value, list[str], one.original_text)
        found += _set_sources(draft, key, names, resolver, one)
    held_out = "data.valid" if key == "data.train" else "inputs"
    if held_out in draft.settings and (held_out != key or one is None):
        given = draft.settings[held_out]
        option = next((item for item in draft.call.options if item.original_text == given.origin), None)
        if option is not None:
            found += _set_sources(draft, held_out, list(given.value), resolver, option)
    _set_columns(draft, found)
    _note_self_cognition(draft, found)


def uses_modelscope(draft: RecipeDraft) -> bool:
    """Return whether names without a hub are ModelScope's: ms-swift's are, unless USE_HF says otherwise."""
    given = {option.name: str(option.value).lower() in _TRUE for option in draft.call.options}
    if draft.call.peer == "swift":
        return not given.get("use_hf", given.get("USE_HF", False))
    return given.get("USE_MODELSCOPE_HUB", False)


def _set_valid_fraction(draft: RecipeDraft) -> None:
    val_size = draft.gathered.get("val_size")
    if val_size is None or draft.setting_type("data.valid_fraction") is None:
        return
    fraction: float = convert_to_type(val_size.value, float, val_size.original_text)
    if fraction >= 1:
        draft.notes.changed.append(f"{val_size.original_text}: rows there, a share here; give data.valid_fraction")
    else:
        draft.set_setting("data.valid_fraction", fraction, val_size.original_text)


def _set_sources(
    draft: RecipeDraft, key: str, names: list[str], resolver: _NameResolver, option: Any
) -> list[NamedDataset]:
    """Set a list of sources, and tell what is not carried over of each."""
    most = draft.gathered_int("max_samples") if "max_samples" in draft.gathered and key != "inputs" else None
    shares = _read_shares(draft, len(names)) if key == "data.train" else []
    found, specs = [], []
    for at, name in enumerate(names):
        dataset = resolver.resolve_name(name, option.name)
        if most is not None:
            dataset.rows = min(most, dataset.rows) if dataset.rows else most
        found.append(dataset)
        specs += _count_rows(draft, dataset, shares[at] if shares else "")
        draft.notes.changed += [f"{name}{remark}" for remark in dataset.remarks]
        draft.notes.lost += [f"{name}: {problem}" for problem in dataset.problems]
    draft.set_setting(key, specs, option.original_text)
    if resolver.far:
        note = (
            "a name of a list or hub: fetch it, and put its file"
            if len(resolver.far) == 1
            else "names of a list or hub: fetch them, and put their files"
        )
        draft.notes.changed.append(f"{', '.join(resolver.far)}: {note} in {key}")
        resolver.far.clear()
    return found


def _count_rows(draft: RecipeDraft, dataset: NamedDataset, share: str) -> list[str]:
    """Return the sources of a data set with their numbers of rows; several subsets divide them."""
    sources = dataset.sources or [dataset.name]
    if dataset.rows is None:
        return [source + share for source in sources]
    each = max(1, dataset.rows // len(sources))
    if len(sources) > 1:
        draft.notes.changed.append(f"{dataset.name}: {dataset.rows} rows of all subsets there, {each} of each here")
    return [f"{source}#{each}{share}" for source in sources]


def _read_shares(draft: RecipeDraft, count: int) -> list[str]:
    """Return the share of each source, as its ending; none where no probabilities are given, or not one for each."""
    one = draft.gathered.get("shares")
    if one is None:
        return []
    values: list[float] = convert_to_type(one.value, list[float], one.original_text)
    if len(values) != count or not all(0 < value <= 1 for value in values):
        draft.notes.lost.append(f"{one.original_text}: {len(values)} shares for {count} data sets; write PATH@SHARE")
        return []
    draft.notes.changed.append(f"{one.original_text} -> @SHARE in data.train: shares of the tokens, not of the rows")
    return [f"@{value:g}" for value in values]


class _NameResolver:
    """Finds out what a name of data stands for; `far` are names that nothing here knows."""

    def __init__(self, draft: RecipeDraft, folder: Path) -> None:
        self.draft, self.folder = draft, folder
        self.hub = "ms" if uses_modelscope(draft) else "hf"
        self.place, self.entries = _read_dataset_info(draft, folder)
        self.far: list[str] = []

    def resolve_name(self, name: str, option: str) -> NamedDataset:
        """Return the data set of a name that an option gives."""
        entry = self.entries.get(name)
        if isinstance(entry, dict):
            return dataset_info.read_entry(name, entry, self.place, self.hub)
        counted = _COUNT.fullmatch(name)
        if _is_file(name, self.folder):
            return NamedDataset(name, [counted[1]], int(counted[2])) if counted else NamedDataset(name, [name])
        found = self.resolve_listed(name) or (self.resolve_hub(name) if option in _HUB_OPTIONS else None)
        if found is None:
            self.far.append(name)
        return found or NamedDataset(name, [name])

    def resolve_listed(self, name: str) -> NamedDataset | None:
        """Return the data set of a name that the program itself has in its list."""
        bare, _, rows = name.partition("#")
        listed = peer_tables.load_tables(self.draft.call.peer).datasets
        entry = listed.get(bare) or next(
            (one for one in listed.values() if bare in (one.get("ms_hub_url"), one.get("hf_hub_url"))), None
        )
        if entry is None or (rows and parse_whole(rows) is None):
            return None
        if bare not in listed:
            entry = {key: value for key, value in entry.items() if not key.endswith("_hub_url")} | {
                f"{self.hub}_hub_url": bare
            }
        dataset = dataset_info.read_entry(name, entry, "", self.hub)
        dataset.rows = int(rows) if rows else dataset.rows
        return dataset

    def resolve_hub(self, name: str) -> NamedDataset | None:
        """Return OWNER/NAME as a data set of the hub that the program takes it from."""
        match = _SWIFT_NAME.fullmatch(name)
        is_online = self.draft.call.peer != "llamafactory" or self.place == "ONLINE"
        if match is None or not is_online or not dataset_info.HUB_REPO.fullmatch(match[2]):
            return None
        hub = (match[1] or self.hub).lower()
        subsets = [one.strip() for one in (match[3] or "").split("/") if one.strip() not in ("", "default")]
        dataset = NamedDataset(name, rows=int(match[4]) if match[4] else None)
        if "all" in subsets:
            dataset.problems.append("all: subsets are named here, so the default one is read; give a source for each")
            subsets = []
        dataset.sources = [dataset_info.hub_source(hub, match[2], subset) for subset in subsets or [""]]
        about = f"no file here, so a data set of {_HUB_TITLES[hub]}; put the path where it is a folder"
        dataset.remarks.append(f" -> {dataset.sources[0]}: {about}")
        return dataset


def _is_file(name: str, folder: Path) -> bool:
    path = name.partition("#")[0].partition("@")[0]
    if path.endswith(_DATA_SUFFIXES) or path.startswith((".", "/", "~")):
        return True
    return os.path.exists(folder / path)  # False for a text that is too long for a name


def _read_dataset_info(draft: RecipeDraft, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return where its files begin, and the entries of LLaMA-Factory's `dataset_info.json`, if it can be read here.

    It is in the folder of the settings file, or, as LLaMA-Factory has it, in the folder of the shell.
    """
    given = draft.gathered_value("dataset_dir")
    if draft.call.peer != "llamafactory":
        return "", {}
    if isinstance(given, dict):
        return "", given
    place = str(given or "data")
    if place == "ONLINE" or place.startswith("REMOTE:"):
        return place, {}
    files = (folder / place / "dataset_info.json", Path(place) / "dataset_info.json")
    file = next((one for one in files if one.is_file()), None)
    if file is None:
        return place, {}
    try:
        content: Any = json_reader.read_json_file(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}", "fix it, or remove it") from error
    return place, content if isinstance(content, dict) else {}


def _set_columns(draft: RecipeDraft, found: list[NamedDataset]) -> None:
    """`data.columns` is one for all sources: those of the first data set are taken, others reported."""
    given = draft.gathered.get("columns")
    if draft.setting_type("data.columns") is None:
        return
    if given is not None:
        renamed = _read_given_columns(draft, given)
        found = [replace(one, columns=renamed) for one in found] or [NamedDataset("", columns=renamed)]
    if not found:
        return
    first = found[0]
    if first.columns:
        origin = given.original_text if given is not None else f"columns of {first.name}"
        draft.set_setting("data.columns", first.columns, origin)
    is_text = draft.command == "pretrain"
    if is_text and first.text_column not in ("", "text", "instruction"):
        draft.set_setting("data.text_column", first.text_column, f"columns of {first.name}")
        draft.settings.pop("data.columns", None)
    for other in found[1:]:
        differs = other.text_column != first.text_column if is_text else other.columns != first.columns
        if differs:
            names = ", ".join(f"{ours}={theirs}" for ours, theirs in other.columns.items()) or "names of their own"
            key = "data.text_column" if is_text else "data.columns"
            names = other.text_column or "text" if is_text else names
            draft.notes.lost.append(
                f"columns of {other.name} ({names}): {key} is one for all sources, and follows {first.name}; rows of "
                f"{other.name} are refused until their columns have the same names"
            )


def _read_given_columns(draft: RecipeDraft, given: Any) -> dict[str, str]:
    """Return ms-swift's `--columns`, a column of the file -> its name there, as ours: the other way round."""
    content = read_json_value(given)
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content.values()):
        raise ConfigError(f"{given.original_text} holds no names", 'write it as {"FILE_COLUMN": "query"}')
    return {name: str(column) for column, name in content.items() if name != column}


def _note_self_cognition(draft: RecipeDraft, found: list[NamedDataset]) -> None:
    """Placeholders of one data set, which ms-swift fills in."""
    names = [draft.gathered[key] for key in ("model_name", "model_author") if key in draft.gathered]
    text = ", ".join(one.original_text for one in names)
    if any("self-cognition" in source for one in found for source in one.sources):
        what = f"{text}: " if text else ""
        draft.notes.lost.append(
            f"{what}rows of self-cognition keep {{{{NAME}}}} and {{{{AUTHOR}}}} as they are, and the model learns them "
            "so: write the names into a copy of the file, and put it in data.train"
        )
    elif text:
        draft.notes.needless.append(f"{text}: only rows of self-cognition have a place for it")
