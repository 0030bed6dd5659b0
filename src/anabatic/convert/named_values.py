"""Things that have names of their own in other programs: models, data sets, rewards, tasks, trackers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anabatic.convert import peer_tables
from anabatic.convert.recipe_draft import RecipeDraft, convert_to_type
from anabatic.core import json_reader
from anabatic.core.errors import ConfigError

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst")
_BUILTIN_REWARDS = ("answer", "format", "length", "tests")
_LIST_SETTINGS: dict[str, tuple[str, dict[str, str]]] = {
    "lora_target": ("lora.target_modules", {"all": "all-linear"}),
    "sinks": ("log.sinks", {"none": "", "all": "", "mlflow": "", "neptune": "", "trackio": ""}),
    "rewards": ("rewards", {"accuracy": "answer"}),
    "tasks": (
        "tasks",
        {"bpb": "", "sample": "", "ARC-Easy": "arc_easy_chat", "ARC-Challenge": "arc_challenge_chat",
         "MMLU": "mmlu_chat", "GSM8K": "gsm8k_chat", "HumanEval": "humaneval_chat", "SpellingBee": "task:spelling"},
    ),
}  # fmt: skip
"""Fact -> the list of ours, and how words of it are called here; an empty one is left out."""


_RL_ALGORITHMS = {"grpo": "grpo", "bnpo": "dapo", "dapo": "dapo", "dr_grpo": "dr_grpo"}
"""Losses of GRPO there; a kind of advantage or ratio that is given says more, and is an algorithm of its own here."""


def set_name_lists(draft: RecipeDraft) -> None:
    """Set what is a list of names: layers, trackers, rewards, tasks."""
    for name, (key, words) in _LIST_SETTINGS.items():
        one = draft.gathered.get(name)
        if one is None or draft.setting_type(key) is None:
            continue
        given = convert_to_type(
            str(one.value).replace("|", ",") if isinstance(one.value, str) else one.value, list[str], one.original_text
        )
        values = [words.get(word, word) for word in given]
        if key == "rewards":
            values = [word if word in _BUILTIN_REWARDS or ":" in word else "" for word in values]
        if any(values):
            draft.set_setting(key, [word for word in values if word], one.original_text)
        lost = [word for word, value in zip(given, values, strict=True) if not value and word not in ("none", "all")]
        if lost:
            draft.notes.lost.append(f"{', '.join(lost)} of {one.original_text}: no such name here")
    if "reward_model" in draft.gathered and draft.command == "rl":
        one = draft.gathered["reward_model"]
        before = draft.settings["rewards"].value if "rewards" in draft.settings else []
        draft.set_setting("rewards", [*before, f"model:{one.value}"], one.original_text)
    loss = draft.gathered.get("algorithm")
    if loss is not None and "algorithm" not in draft.settings:
        if loss.value in _RL_ALGORITHMS:
            draft.set_setting("algorithm", _RL_ALGORITHMS[str(loss.value)], loss.original_text)
        else:
            draft.notes.lost.append(f"{loss.original_text}: known are {', '.join(_RL_ALGORITHMS)}")
    run = draft.gathered.get("run")
    if run is not None and run.value != "dummy" and draft.setting_type("log.name") is not None:
        draft.set_setting("log.sinks", ["wandb"], run.original_text)
        draft.set_setting("log.name", run.value, run.original_text)
    width, depth = draft.gathered_int("aspect_ratio"), draft.settings.get("model.depth")
    if width is not None and draft.setting_type("model.width") is not None:
        draft.set_setting(
            "model.width",
            width * (depth.value if depth else 20),
            f"{draft.gathered['aspect_ratio'].original_text} x depth",
        )


def set_data_sources(draft: RecipeDraft, folder: Path) -> None:
    """Set the data; names of files begin in `folder`."""
    val_size = draft.gathered.get("val_size")
    if val_size is not None and draft.setting_type("data.valid_fraction") is not None:
        fraction: float = convert_to_type(val_size.value, float, val_size.original_text)
        if fraction >= 1:
            draft.notes.changed.append(f"{val_size.original_text}: rows there, a share here; give data.valid_fraction")
        else:
            draft.set_setting("data.valid_fraction", fraction, val_size.original_text)
    one = draft.gathered.get("dataset")
    key = "data.train" if draft.setting_type("data.train") is not None else "inputs"
    if draft.setting_type(key) is None:
        return
    if one is not None:
        names: list[str] = convert_to_type(one.value, list[str], one.original_text)
        listed = _read_dataset_info(draft, folder)
        max_samples = draft.gathered_int("max_samples") if "max_samples" in draft.gathered else None
        sources = [
            listed.get(name, name) + (f"#{max_samples}" if max_samples and "#" not in name else "") for name in names
        ]
        draft.set_setting(key, sources, one.original_text)
        far = [name for name in names if name not in listed and not _is_file(name, folder)]
        if far:
            note = (
                "a name of a list or hub: fetch it, and put its file"
                if len(far) == 1
                else ("names of a list or hub: fetch them, and put their files")
            )
            draft.notes.changed.append(f"{', '.join(far)}: {note} in {key}")


def _is_file(name: str, folder: Path) -> bool:
    path = name.partition("#")[0].partition("@")[0]
    if path.endswith(_DATA_SUFFIXES) or path.startswith((".", "/", "~")):
        return True
    return os.path.exists(folder / path)  # False for a text that is too long for a name


def _read_dataset_info(draft: RecipeDraft, folder: Path) -> dict[str, str]:
    """Return name -> file by LLaMA-Factory's `dataset_info.json`, where it can be read from here."""
    place = Path(str(draft.gathered_value("dataset_dir") or "data"))
    file = folder / place / "dataset_info.json"
    if draft.call.peer != "llamafactory" or not file.is_file():
        return {}
    try:
        content: Any = json_reader.read_json_file(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}", "fix it, or take it away") from error
    found = {}
    for name, entry in content.items() if isinstance(content, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str):
            rows = f"#{entry['num_samples']}" if isinstance(entry.get("num_samples"), int) else ""
            found[name] = f"{place / entry['file_name']}{rows}"
    return found


def set_model_name(draft: RecipeDraft) -> None:
    """Names of models become repositories; an adapter alone is a model."""
    names = peer_tables.load_tables(draft.call.peer).names
    one = draft.gathered.get("model_type")
    key = "model" if draft.setting_type("model") is not None else "model.path"
    if one is not None and draft.setting_type(key) and key not in draft.settings and "ckpt_dir" not in draft.settings:
        repository = names.get(str(one.value), str(one.value))
        draft.set_setting(key, repository, one.original_text)
        if str(one.value) not in names:
            draft.notes.changed.append(
                f"{one.original_text}: an architecture or a name of a list; put a folder, or OWNER/NAME"
            )
    if "system" in draft.settings and str(draft.settings["system"].value).endswith(".txt"):
        draft.notes.changed.append(f"{draft.settings.pop('system').origin}: a file there; put its text in system")
    if "ckpt_dir" in draft.settings and "model" in draft.settings:
        draft.notes.needless.append(f"{draft.settings.pop('model').origin}: the checkpoint names its base model")
    adapters = draft.settings.get("adapter")
    if adapters is not None and key not in draft.settings and adapters.value:
        first, *rest = adapters.value
        draft.set_setting(key, first, adapters.origin)
        if rest:
            draft.set_setting("adapter", rest, adapters.origin)
        else:
            del draft.settings["adapter"]
