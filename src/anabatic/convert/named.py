"""Things that have names of their own in other programs: models, data sets, rewards, tasks, trackers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from anabatic.convert import tables
from anabatic.convert.draft import Draft, fit
from anabatic.core import json_text
from anabatic.core.errors import ConfigError

_DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst")
_REWARDS = ("answer", "format", "length", "tests")
_WORDS: dict[str, tuple[str, dict[str, str]]] = {
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


_ALGORITHMS = {"grpo": "grpo", "bnpo": "dapo", "dapo": "dapo", "dr_grpo": "dr_grpo"}
"""Losses of GRPO there; a kind of advantage or ratio that is given says more, and is an algorithm of its own here."""


def lists(made: Draft) -> None:
    """Set what is a list of names: layers, trackers, rewards, tasks."""
    for name, (key, words) in _WORDS.items():
        one = made.facts.get(name)
        if one is None or made.hint(key) is None:
            continue
        given = fit(str(one.value).replace("|", ",") if isinstance(one.value, str) else one.value, list[str], one.shown)
        values = [words.get(word, word) for word in given]
        if key == "rewards":
            values = [word if word in _REWARDS or ":" in word else "" for word in values]
        if any(values):
            made.set(key, [word for word in values if word], one.shown)
        lost = [word for word, value in zip(given, values, strict=True) if not value and word not in ("none", "all")]
        if lost:
            made.notes.lost.append(f"{', '.join(lost)} of {one.shown}: no such name here")
    if "reward_model" in made.facts and made.command == "rl":
        one = made.facts["reward_model"]
        before = made.settings["rewards"].value if "rewards" in made.settings else []
        made.set("rewards", [*before, f"model:{one.value}"], one.shown)
    loss = made.facts.get("algorithm")
    if loss is not None and "algorithm" not in made.settings:
        if loss.value in _ALGORITHMS:
            made.set("algorithm", _ALGORITHMS[str(loss.value)], loss.shown)
        else:
            made.notes.lost.append(f"{loss.shown}: known are {', '.join(_ALGORITHMS)}")
    run = made.facts.get("run")
    if run is not None and run.value != "dummy" and made.hint("log.name") is not None:
        made.set("log.sinks", ["wandb"], run.shown)
        made.set("log.name", run.value, run.shown)
    width, depth = made.number("aspect_ratio"), made.settings.get("model.depth")
    if width is not None and made.hint("model.width") is not None:
        made.set("model.width", width * (depth.value if depth else 20), f"{made.facts['aspect_ratio'].shown} x depth")


def sources(made: Draft, folder: Path) -> None:
    """Set the data; names of files begin in `folder`."""
    held = made.facts.get("val_size")
    if held is not None and made.hint("data.valid_fraction") is not None:
        share: float = fit(held.value, float, held.shown)
        if share >= 1:
            made.notes.changed.append(f"{held.shown}: rows there, a share here; give data.valid_fraction")
        else:
            made.set("data.valid_fraction", share, held.shown)
    one = made.facts.get("dataset")
    key = "data.train" if made.hint("data.train") is not None else "inputs"
    if made.hint(key) is None:
        return
    if one is not None:
        names: list[str] = fit(one.value, list[str], one.shown)
        listed = _listed(made, folder)
        most = made.number("max_samples") if "max_samples" in made.facts else None
        sources = [listed.get(name, name) + (f"#{most}" if most and "#" not in name else "") for name in names]
        made.set(key, sources, one.shown)
        far = [name for name in names if name not in listed and not _is_file(name, folder)]
        if far:
            told = "a name of a list or hub: fetch it, and put its file" if len(far) == 1 else (
                "names of a list or hub: fetch them, and put their files"
            )  # fmt: skip
            made.notes.changed.append(f"{', '.join(far)}: {told} in {key}")


def _is_file(name: str, folder: Path) -> bool:
    path = name.partition("#")[0].partition("@")[0]
    if path.endswith(_DATA) or path.startswith((".", "/", "~")):
        return True
    return os.path.exists(folder / path)  # False for a text that is too long for a name


def _listed(made: Draft, folder: Path) -> dict[str, str]:
    """Return name -> file by LLaMA-Factory's `dataset_info.json`, where it can be read from here."""
    place = Path(str(made.fact("dataset_dir") or "data"))
    file = folder / place / "dataset_info.json"
    if made.call.peer != "llamafactory" or not file.is_file():
        return {}
    try:
        content: Any = json_text.read(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}", "mend it, or take it away") from error
    found = {}
    for name, entry in content.items() if isinstance(content, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str):
            rows = f"#{entry['num_samples']}" if isinstance(entry.get("num_samples"), int) else ""
            found[name] = f"{place / entry['file_name']}{rows}"
    return found


def model(made: Draft) -> None:
    """Names of models become repositories; an adapter alone is a model."""
    names = tables.load(made.call.peer).names
    one = made.facts.get("model_type")
    key = "model" if made.hint("model") is not None else "model.path"
    if one is not None and made.hint(key) and key not in made.settings and "ckpt_dir" not in made.settings:
        repository = names.get(str(one.value), str(one.value))
        made.set(key, repository, one.shown)
        if str(one.value) not in names:
            made.notes.changed.append(f"{one.shown}: an architecture or a name of a list; put a folder, or OWNER/NAME")
    if "system" in made.settings and str(made.settings["system"].value).endswith(".txt"):
        made.notes.changed.append(f"{made.settings.pop('system').origin}: a file there; put its text in system")
    if "ckpt_dir" in made.settings and "model" in made.settings:
        made.notes.needless.append(f"{made.settings.pop('model').origin}: the checkpoint names its base model")
    adapters = made.settings.get("adapter")
    if adapters is not None and key not in made.settings and adapters.value:
        first, *rest = adapters.value
        made.set(key, first, adapters.origin)
        if rest:
            made.set("adapter", rest, adapters.origin)
        else:
            del made.settings["adapter"]
