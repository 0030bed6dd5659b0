"""An entry of LLaMA-Factory's `dataset_info.json` as a source of ours: where the rows lie, and what their columns are.

Keys and their defaults: LLaMA-Factory's data/README.md. A list of columns or tags that is given leaves those that it
does not name without a column, so defaults count only where there is no list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

HUB_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""OWNER/NAME, as sources of ours have it."""
_KEYS = frozenset(
    ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "formatting", "ranking")
    + ("subset", "split", "folder", "num_samples", "columns", "tags", "note")
)
_ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output"}
_COLUMNS = frozenset(
    ("prompt", "query", "response", "history", "messages", "system", "tools", "images", "videos", "audios")
    + ("chosen", "rejected", "kto_tag")
)
_NATURAL_PAIRS = (("query", "response"), ("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
"""Columns of a question and its answer that are known by these names."""
SPEAKERS = {
    "from": {
        "user_tag": ("human", "user"),
        "assistant_tag": ("gpt", "assistant"),
        "observation_tag": ("observation", "tool_response", "tool"),
        "function_tag": ("function_call", "tool_call"),
        "system_tag": ("system",),
    },
    "role": {
        "user_tag": ("user",),
        "assistant_tag": ("assistant",),
        "observation_tag": ("tool",),
        "function_tag": ("assistant",),
        "system_tag": ("system", "developer"),
    },
}
"""Key of the speaker in a turn -> tag -> the speakers that are read as it."""
_CONTENT_KEYS = {"from": "value", "role": "content"}
_OTHER_TAGS = {"observation_tag": ("observation",), "function_tag": ("function_call", "function")}
"""Tags that files set by habit, and that matter only where there are such turns."""


@dataclass
class NamedDataset:
    """A data set that a recipe names.

    Attributes:
        name: as it is called there.
        sources: ours, without a count of rows.
        rows: how many of its rows are used; None: all.
        columns: our name of a column -> its name in the files.
        text_column: column of the text, for pretraining; empty: not named.
        problems: what is not carried over, each with what follows from it.
        remarks: what means something else here, to be put behind the name.
    """

    name: str
    sources: list[str] = field(default_factory=list)
    rows: int | None = None
    columns: dict[str, str] = field(default_factory=dict)
    text_column: str = ""
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_entry(name: str, entry: dict[str, Any], folder: str, hub: str) -> NamedDataset:
    """Return what an entry describes.

    Args:
        name: of the data set.
        entry: its keys.
        folder: where names of files begin.
        hub: `hf` or `ms`, which is taken where both have it.
    """
    dataset = NamedDataset(name)
    _read_place(dataset, entry, folder, hub)
    rows = entry.get("num_samples")
    if isinstance(rows, int) and not isinstance(rows, bool) and rows > 0:
        dataset.rows = rows
    given = entry.get("columns")
    columns = _texts(given) if isinstance(given, dict) else {}
    if entry.get("formatting") in ("sharegpt", "openai"):
        _read_turn_columns(dataset, columns)
        _read_tags(dataset, entry)
    elif entry.get("formatting") in (None, "alpaca"):
        _read_alpaca_columns(dataset, columns or dict(_ALPACA_COLUMNS), bool(entry.get("ranking")))
    else:
        dataset.problems.append(f"formatting {entry['formatting']}: not known, so columns are found by their names")
    _read_common_columns(dataset, columns)
    unknown = [key for key in entry if key not in _KEYS] + [f"columns.{key}" for key in columns if key not in _COLUMNS]
    if unknown:
        dataset.problems.append(f"{', '.join(unknown)}: not known to this converter")
    if isinstance(entry.get("note"), str):
        dataset.remarks.append(f": {entry['note']}")
    return dataset


def hub_source(hub: str, repo: str, subset: str = "", split: str = "train") -> str:
    """Return a data set of a hub as a source of ours."""
    return f"{hub}:{repo}{'/' + subset if subset else ''}:{split}"


def _texts(mapping: dict[str, Any]) -> dict[str, str]:
    return {str(key): value for key, value in mapping.items() if isinstance(value, str) and value}


def _read_place(dataset: NamedDataset, entry: dict[str, Any], folder: str, hub: str) -> None:
    """A hub comes before a script, a script before a file, as there."""
    urls = {kind: entry.get(f"{kind}_hub_url") for kind in ("hf", "ms", "om")}
    kind = "ms" if urls["ms"] and (hub == "ms" or not urls["hf"]) else "hf" if urls["hf"] else "om"
    url = urls[kind]
    subset, split = entry.get("subset"), entry.get("split") or "train"
    if url:
        _read_hub_place(dataset, kind, str(url), str(subset or ""), str(split), str(entry.get("folder") or ""))
        return
    for key, what in (("script_url", "a script makes its rows, and no script is run"),
                      ("cloud_file_name", "a bucket has its rows, and none is read")):  # fmt: skip
        if entry.get(key):
            dataset.problems.append(f"{key} {entry[key]}: {what}; put a file of its rows in data.train")
            return
    file = entry.get("file_name")
    if not isinstance(file, str) or not file:
        dataset.problems.append("no file_name and no hub: put a file of its rows in data.train")
        return
    dataset.sources = [f"{folder.rstrip('/')}/{file}" if folder not in ("", ".") and not file.startswith("/") else file]
    if subset:
        dataset.problems.append(f"subset {subset}: files have none; name those of the subset in data.train")


def _read_hub_place(dataset: NamedDataset, kind: str, url: str, subset: str, split: str, folder: str) -> None:
    if kind == "om":
        what = f"om_hub_url {url}: openMind's hub is not read"
        dataset.problems.append(f"{what}; fetch it, and put its file in data.train")
        return
    if not HUB_REPO.fullmatch(url):
        dataset.problems.append(f"{kind}_hub_url {url}: a hub needs OWNER/NAME; put {kind}:OWNER/NAME in data.train")
        return
    part = re.fullmatch(r"([\w.-]+)\[:(\d+)\]", split)
    if part:
        split, dataset.rows = part[1], int(part[2])
    if not re.fullmatch(r"[\w.-]+", split):
        dataset.problems.append(f"split {split}: one split is read at a time, train here; #N takes N of its rows")
        split = "train"
    if not re.fullmatch(r"[\w. -]*", subset):
        dataset.problems.append(f"subset {subset}: no name of a subset; the default one is read")
        subset = ""
    if folder:
        what = f"folder {folder}: the whole data set is read"
        dataset.problems.append(f"{what}; fetch it, and put the files of the folder in data.train")
    dataset.sources = [hub_source(kind, url, subset, split)]


def _read_alpaca_columns(dataset: NamedDataset, columns: dict[str, str], is_ranking: bool) -> None:
    """`prompt` and `query` make up the question, `response` is its answer."""
    questions = [columns[key] for key in ("prompt", "query") if key in columns]
    dataset.text_column = questions[0] if questions else ""
    answer = columns.get("response", "")
    if not questions or columns == _ALPACA_COLUMNS:
        return
    if len(questions) == 2:
        _add_columns(dataset, dict(zip(("instruction", "input"), questions, strict=True)))
        _add_columns(dataset, {"output": answer} if answer else {})
    elif is_ranking and not answer:
        known = ("prompt", "query", "question", "instruction")
        _add_columns(dataset, {} if questions[0] in known else {"query": questions[0]})
    elif answer and (questions[0], answer) not in _NATURAL_PAIRS:
        # both, even of the same name: beside `instruction` and `output` a column `input` would be read
        dataset.columns |= {"query": questions[0], "response": answer}


def _read_turn_columns(dataset: NamedDataset, columns: dict[str, str]) -> None:
    turns = columns.get("messages", "conversations")
    if turns not in ("messages", "conversations"):
        dataset.columns["messages"] = turns


def _read_common_columns(dataset: NamedDataset, columns: dict[str, str]) -> None:
    common = ("system", "history", "tools", "chosen", "rejected")
    _add_columns(dataset, {key: columns[key] for key in common if key in columns})
    if columns.get("kto_tag") not in (None, "label", "kto_tag"):
        dataset.columns["label"] = columns["kto_tag"]
    for key, what in (("images", "pictures"), ("videos", "videos")):
        if columns.get(key, key) not in (key, key[:-1]):
            dataset.problems.append(f"{columns[key]}: {what} are read from a column `{key}`; rename it in the file")
    if "audios" in columns:
        dataset.problems.append(f"{columns['audios']}: rows with sound are refused")


def _add_columns(dataset: NamedDataset, names: dict[str, str]) -> None:
    dataset.columns |= {ours: theirs for ours, theirs in names.items() if ours != theirs}


def _read_tags(dataset: NamedDataset, entry: dict[str, Any]) -> None:
    """Turns are read as `from` and `value`, or as `role` and `content`, with the usual speakers."""
    given = entry.get("tags")
    tags = _texts(given) if isinstance(given, dict) else {}
    default = ("role", "content") if entry.get("formatting") == "openai" else ("from", "value")
    speaker, content = tags.get("role_tag", default[0]), tags.get("content_tag", default[1])
    if _CONTENT_KEYS.get(speaker) != content:
        what = f"tags {speaker} and {content}: turns are read as role and content, or from and value, others refused"
        dataset.problems.append(f"{what}; rename these keys in the file")
        return
    for tag, known in SPEAKERS[speaker].items():
        word = tags.get(tag)
        if word is None or word in known or word in _OTHER_TAGS.get(tag, ()):
            continue
        dataset.problems.append(f"{tag} {word}: turns of that speaker are refused; call it {known[0]} in the file")
    unknown = [tag for tag in tags if tag not in ("role_tag", "content_tag") and tag not in SPEAKERS[speaker]]
    if unknown:
        dataset.problems.append(f"{', '.join(f'tags.{tag}' for tag in unknown)}: not known to this converter")
