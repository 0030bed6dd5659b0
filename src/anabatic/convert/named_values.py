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


def set_name_lists(made: RecipeDraft) -> None:
    """Set what is a list of names: layers, trackers, rewards, tasks."""
    for name, (key, words) in _LIST_SETTINGS.items():
        one = made.gathered.get(name)
        if one is None or made.setting_type(key) is None:
            continue
        given = convert_to_type(
            str(one.value).replace("|", ",") if isinstance(one.value, str) else one.value, list[str], one.original_text
        )
        values = [words.get(word, word) for word in given]
        if key == "rewards":
            values = [word if word in _BUILTIN_REWARDS or ":" in word else "" for word in values]
        if any(values):
            made.set_setting(key, [word for word in values if word], one.original_text)
        lost = [word for word, value in zip(given, values, strict=True) if not value and word not in ("none", "all")]
        if lost:
            made.notes.lost.append(f"{', '.join(lost)} of {one.original_text}: no such name here")
    if "reward_model" in made.gathered and made.command == "rl":
        one = made.gathered["reward_model"]
        before = made.settings["rewards"].value if "rewards" in made.settings else []
        made.set_setting("rewards", [*before, f"model:{one.value}"], one.original_text)
    loss = made.gathered.get("algorithm")
    if loss is not None and "algorithm" not in made.settings:
        if loss.value in _RL_ALGORITHMS:
            made.set_setting("algorithm", _RL_ALGORITHMS[str(loss.value)], loss.original_text)
        else:
            made.notes.lost.append(f"{loss.original_text}: known are {', '.join(_RL_ALGORITHMS)}")
    run = made.gathered.get("run")
    if run is not None and run.value != "dummy" and made.setting_type("log.name") is not None:
        made.set_setting("log.sinks", ["wandb"], run.original_text)
        made.set_setting("log.name", run.value, run.original_text)
    width, depth = made.gathered_int("aspect_ratio"), made.settings.get("model.depth")
    if width is not None and made.setting_type("model.width") is not None:
        made.set_setting(
            "model.width",
            width * (depth.value if depth else 20),
            f"{made.gathered['aspect_ratio'].original_text} x depth",
        )


def set_data_sources(made: RecipeDraft, folder: Path) -> None:
    """Set the data; names of files begin in `folder`."""
    held = made.gathered.get("val_size")
    if held is not None and made.setting_type("data.valid_fraction") is not None:
        share: float = convert_to_type(held.value, float, held.original_text)
        if share >= 1:
            made.notes.changed.append(f"{held.original_text}: rows there, a share here; give data.valid_fraction")
        else:
            made.set_setting("data.valid_fraction", share, held.original_text)
    one = made.gathered.get("dataset")
    key = "data.train" if made.setting_type("data.train") is not None else "inputs"
    if made.setting_type(key) is None:
        return
    if one is not None:
        names: list[str] = convert_to_type(one.value, list[str], one.original_text)
        listed = _read_dataset_info(made, folder)
        most = made.gathered_int("max_samples") if "max_samples" in made.gathered else None
        sources = [listed.get(name, name) + (f"#{most}" if most and "#" not in name else "") for name in names]
        made.set_setting(key, sources, one.original_text)
        far = [name for name in names if name not in listed and not _is_file(name, folder)]
        if far:
            told = (
                "a name of a list or hub: fetch it, and put its file"
                if len(far) == 1
                else ("names of a list or hub: fetch them, and put their files")
            )
            made.notes.changed.append(f"{', '.join(far)}: {told} in {key}")


def _is_file(name: str, folder: Path) -> bool:
    path = name.partition("#")[0].partition("@")[0]
    if path.endswith(_DATA_SUFFIXES) or path.startswith((".", "/", "~")):
        return True
    return os.path.exists(folder / path)  # False for a text that is too long for a name


def _read_dataset_info(made: RecipeDraft, folder: Path) -> dict[str, str]:
    """Return name -> file by LLaMA-Factory's `dataset_info.json`, where it can be read from here."""
    place = Path(str(made.gathered_value("dataset_dir") or "data"))
    file = folder / place / "dataset_info.json"
    if made.call.peer != "llamafactory" or not file.is_file():
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


def set_model_name(made: RecipeDraft) -> None:
    """Names of models become repositories; an adapter alone is a model."""
    names = peer_tables.load_tables(made.call.peer).names
    one = made.gathered.get("model_type")
    key = "model" if made.setting_type("model") is not None else "model.path"
    if one is not None and made.setting_type(key) and key not in made.settings and "ckpt_dir" not in made.settings:
        repository = names.get(str(one.value), str(one.value))
        made.set_setting(key, repository, one.original_text)
        if str(one.value) not in names:
            made.notes.changed.append(
                f"{one.original_text}: an architecture or a name of a list; put a folder, or OWNER/NAME"
            )
    if "system" in made.settings and str(made.settings["system"].value).endswith(".txt"):
        made.notes.changed.append(f"{made.settings.pop('system').origin}: a file there; put its text in system")
    if "ckpt_dir" in made.settings and "model" in made.settings:
        made.notes.needless.append(f"{made.settings.pop('model').origin}: the checkpoint names its base model")
    adapters = made.settings.get("adapter")
    if adapters is not None and key not in made.settings and adapters.value:
        first, *rest = adapters.value
        made.set_setting(key, first, adapters.origin)
        if rest:
            made.set_setting("adapter", rest, adapters.origin)
        else:
            del made.settings["adapter"]
