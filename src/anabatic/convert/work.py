"""Settings that follow from several values at once: batches in tokens, shares of the steps, machines, sources."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any

from anabatic.config import deepspeed
from anabatic.convert import tables
from anabatic.convert.draft import Draft, fit
from anabatic.core.errors import ConfigError

_ROWS = {"dpo": 2, "reward": 2}
"""Sequences of a row: both answers of a pair."""
_SCHEDULES = {
    "linear": "linear",
    "linear_with_warmup": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "none",
    "constant_with_warmup": "none",
}
_DATA = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md", ".gz", ".zst")


def finish(made: Draft, folder: Path) -> None:
    """Add what follows from the gathered facts; `folder` is where relative names of files begin.

    Raises:
        ConfigError: a value is of the wrong type, or a file that is named is torn.
    """
    _machines(made)
    _lists(made)
    _deepspeed(made, folder)
    _answers(made) if made.command == "rl" else _batch(made)
    _schedule(made)
    _stopping(made)
    _sources(made, folder)
    _model(made)


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


def _lists(made: Draft) -> None:
    for name, (key, words) in _WORDS.items():
        one = made.facts.get(name)
        if one is None or made.hint(key) is None:
            continue
        given = fit(str(one.value).replace("|", ",") if isinstance(one.value, str) else one.value, list[str], one.shown)
        values = [words.get(word, word) for word in given]
        if any(values):
            made.set(key, [word for word in values if word], one.shown)
        lost = [word for word, value in zip(given, values, strict=True) if not value and word not in ("none", "all")]
        if lost:
            made.notes.lost.append(f"{one.shown}: {', '.join(lost)}")
    if "reward_model" in made.facts and made.command == "rl":
        one = made.facts["reward_model"]
        before = made.settings["rewards"].value if "rewards" in made.settings else []
        made.set("rewards", [*before, f"model:{one.value}"], one.shown)
    run = made.facts.get("run")
    if run is not None and run.value != "dummy" and made.hint("log.name") is not None:
        made.set("log.sinks", ["wandb"], run.shown)
        made.set("log.name", run.value, run.shown)
    width, depth = made.number("aspect_ratio"), made.settings.get("model.depth")
    if width is not None and made.hint("model.width") is not None:
        made.set("model.width", width * (depth.value if depth else 20), f"{made.facts['aspect_ratio'].shown} x depth")


def world(made: Draft) -> int:
    """Return the processes of the job, over all machines."""
    return (made.number("nproc") or 1) * (made.number("nnodes") or 1)


def _machines(made: Draft) -> None:
    visible = made.facts.get("visible")
    if visible is not None:
        made.variables.append(visible.shown)
        count = len([one for one in str(visible.value).split(",") if one.strip()])
        if "nproc" not in made.facts and count > 1 and made.call.peer != "swift":
            made.facts["nproc"] = type(visible)("nproc", count, visible.shown)
    if "processes" in made.facts:
        nodes = made.number("nnodes") or 1
        one = made.facts["processes"]
        made.facts["nproc"] = type(one)("nproc", max(1, (made.number("processes") or 1) // nodes), one.shown)
    nproc, nodes = made.number("nproc"), made.number("nnodes") or 1
    if nodes == 1:
        if nproc and nproc > 1 and made.hint("device.nproc") is not None:
            made.set("device.nproc", nproc, made.facts["nproc"].shown)
        return
    rank = made.number("node_rank", least=0)
    made.launch = ["--nnodes", str(nodes), "--node-rank", "R" if rank is None else str(rank)]
    made.launch += ["--nproc", str(nproc or 1), "--master-addr", str(made.fact("master_addr") or "ADDRESS")]
    if "master_port" in made.facts:
        made.launch += ["--master-port", str(made.number("master_port"))]


def _deepspeed(made: Draft, folder: Path) -> None:
    if "deepspeed" not in made.facts or made.hint("parallel.deepspeed") is None:
        return
    one = made.facts["deepspeed"]
    source = str(one.value)
    known = tables.load(made.call.peer).names.get(Path(source).name)
    place = folder / source
    if not place.is_file() and known is None and source.endswith(".json"):
        made.set("parallel.deepspeed", source, one.shown)
        made.notes.changed.append(f"{one.shown}: read when the job runs, and translated then; it is not here now")
        return
    content = deepspeed.read(str(place) if place.is_file() else known or source)
    take(made, deepspeed.translate(content, source), one.shown)


def take(made: Draft, said: deepspeed.Translation, shown: str) -> None:
    """Take what a DeepSpeed file says, where the command itself says nothing."""
    for key, value in said.settings.items():
        if key not in made.settings and made.hint(key) is not None:
            made.set(key, value, shown)
    Option = type(made.facts["deepspeed"])
    for name, value in (
        ("micro_rows", said.sequences),
        ("accumulation", said.accumulation),
        ("global_rows", said.batch),
    ):
        if value is not None:
            made.facts.setdefault(name, Option(name, value, shown))
    made.notes.lost += [f"{key} in {shown}" for key in said.unknown]


def _batch(made: Draft) -> None:
    """Rows become tokens: packed, a row is `batch.seq_len` of them (and both answers of a pair count)."""
    facts = [made.facts[name] for name in ("micro_rows", "accumulation", "global_rows") if name in made.facts]
    if made.hint("batch.micro_batch_tokens") is None or not facts:
        return
    if "batch.seq_len" not in made.settings:
        made.set("batch.seq_len", tables.load(made.call.peer).seq_len, "taken, since no length is given")
    length = made.settings["batch.seq_len"].value
    each = length * _ROWS.get(made.command, 1)
    unit = "rows" if each == length else "pairs of 2"
    micro, processes = made.number("micro_rows"), world(made)
    steps, rows = made.number("accumulation"), made.number("global_rows")
    if rows is None and steps is not None:
        rows = (micro or 1) * steps * processes
    if micro is not None:
        made.set("batch.micro_batch_tokens", micro * each, f"{micro} {unit} x {length} tokens")
    if rows is not None and "batch.global_batch_tokens" not in made.settings:
        rows = max(rows, (micro or 1) * processes)
        made.set("batch.global_batch_tokens", rows * each, f"{rows} {unit} x {length} tokens, {processes} processes")
    _say_tokens(made, length)


def _say_tokens(made: Draft, length: int) -> None:
    tokens = {key: made.settings[f"batch.{key}_batch_tokens"].value for key in ("micro", "global")
              if f"batch.{key}_batch_tokens" in made.settings}  # fmt: skip
    shown = ", ".join(
        made.facts[name].shown for name in ("micro_rows", "accumulation", "global_rows") if name in made.facts
    )
    sizes = ", ".join(f"batch.{key}_batch_tokens {value}" for key, value in tokens.items())
    packed = "" if made.call.peer == "nanochat" else "; packed, they hold more rows than there, and an epoch fewer steps"
    made.notes.changed.append(f"{shown} -> {sizes}: tokens, not rows, at {length} a row{packed}")


def _answers(made: Draft) -> None:
    """Reinforcement learning counts answers: rows of a micro-batch there are answers here, too."""
    micro, each = made.number("micro_rows"), made.number("num_samples") or 8
    if "num_samples" in made.facts:
        made.set("num_samples", each, made.facts["num_samples"].shown)
    if micro is None:
        return
    made.set("device_batch_size", micro, made.facts["micro_rows"].shown)
    if "examples_per_step" in made.settings:
        return
    answers = micro * (made.number("accumulation") or 1) * world(made)
    questions = max(1, ceil(answers / each))
    while questions * each % micro:
        questions += 1
    origin = f"{answers} answers a step, {each} to each question"
    made.set("examples_per_step", questions, origin)
    made.set("num_samples", each, made.settings.get("num_samples", type(made.settings["device_batch_size"])(0, origin)).origin)
    made.notes.changed.append(f"{origin} -> examples_per_step {questions}: questions of a step, over all processes")


def _schedule(made: Draft) -> None:
    if made.hint("schedule.decay") is None:
        return
    warmup = _warmup(made)
    one = made.facts.get("scheduler")
    if one is None:
        if "schedule.warmup_ratio" in made.settings and "schedule.decay_ratio" not in made.settings and warmup > 0.5:
            made.set("schedule.decay_ratio", round(1 - warmup, 6), "what is left")
        return
    kind = str(one.value).lower()
    decay = _SCHEDULES.get(kind)
    if decay is None:
        made.notes.lost.append(f"{one.shown}: known are {', '.join(_SCHEDULES)}; cosine is taken")
        decay = "cosine"
    made.set("schedule.decay", decay, one.shown)
    if kind == "constant":
        made.set("schedule.warmup_ratio", 0.0, one.shown)
        warmup = 0.0
    elif "schedule.warmup_ratio" not in made.settings:
        made.set("schedule.warmup_ratio", warmup, "not given there")
    made.set("schedule.decay_ratio", 0.0 if decay == "none" else round(1.0 - warmup, 6), "all steps after the warm-up")
    if kind == "cosine_with_min_lr":
        made.notes.changed.append(f"{one.shown}: give schedule.final_lr_ratio, the last rate as a share of the peak")
    elif decay != "none":
        made.set("schedule.final_lr_ratio", 0.0, one.shown)


def _warmup(made: Draft) -> float:
    """Return the share of the steps in which the rate rises."""
    steps = made.facts.get("warmup_steps")
    if steps is not None and float(fit(steps.value, float, steps.shown)) > 0:
        count = float(fit(steps.value, float, steps.shown))
        most = made.settings.get("schedule.max_steps")
        if count < 1 or most is not None:
            share = count if count < 1 else min(1.0, count / most.value)  # type: ignore[union-attr]
            made.set("schedule.warmup_ratio", round(share, 6), f"{steps.shown} of the steps")
        else:
            told = "a share of all steps here, and their number follows from the data"
            made.notes.changed.append(f"{steps.shown}: {told}; 0.03 is taken for schedule.warmup_ratio")
            made.set("schedule.warmup_ratio", 0.03, f"for {steps.shown}; put steps / all steps")
    given = made.settings.get("schedule.warmup_ratio")
    return float(given.value) if given else 0.0


def _stopping(made: Draft) -> None:
    """Early stopping needs evaluations, and something held out."""
    if "eval.patience" not in made.settings or not made.settings["eval.patience"].value:
        return
    if "eval.every" not in made.settings and made.command.partition(" ")[0] != "classify":
        every = made.settings["save.every"].value if "save.every" in made.settings else 100
        made.set("eval.every", every or 100, "eval.patience counts evaluations")
    none = made.settings.get("data.valid_fraction")
    if none is not None and none.value == 0 and "data.valid" not in made.settings:
        del made.settings["data.valid_fraction"]


def _sources(made: Draft, folder: Path) -> None:
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
        for name in names:
            if name not in listed and not _is_file(name, folder):
                told = f"{name} is a name of a list or hub: fetch it, and put the file"
                made.notes.changed.append(f"{one.shown}: {told} in {key}")


def _is_file(name: str, folder: Path) -> bool:
    path = name.partition("#")[0].partition("@")[0]
    return path.endswith(_DATA) or path.startswith((".", "/", "~")) or (folder / path).exists()


def _listed(made: Draft, folder: Path) -> dict[str, str]:
    """Return name -> file by LLaMA-Factory's `dataset_info.json`, where it can be read from here."""
    place = Path(str(made.fact("dataset_dir") or "data"))
    file = folder / place / "dataset_info.json"
    if made.call.peer != "llamafactory" or not file.is_file():
        return {}
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}", "mend it, or take it away") from error
    found = {}
    for name, entry in content.items() if isinstance(content, dict) else ():
        if isinstance(entry, dict) and isinstance(entry.get("file_name"), str):
            rows = f"#{entry['num_samples']}" if isinstance(entry.get("num_samples"), int) else ""
            found[name] = f"{place / entry['file_name']}{rows}"
    return found


def _model(made: Draft) -> None:
    """Names of models become repositories; an adapter alone is a model."""
    names = tables.load(made.call.peer).names
    one = made.facts.get("model_type")
    key = "model" if made.hint("model") is not None else "model.path"
    if one is not None and key not in made.settings and "ckpt_dir" not in made.settings:
        repository = names.get(str(one.value), str(one.value))
        made.set(key, repository, one.shown)
        if str(one.value) not in names:
            made.notes.changed.append(f"{one.shown}: an architecture or a name of a list; put a folder, or OWNER/NAME")
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
