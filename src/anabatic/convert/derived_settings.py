"""Settings that follow from several values at once: batches in tokens, shares of the steps, machines."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

from anabatic.config.loading import command_table, deepspeed_json, settings
from anabatic.convert import named_values, peer_tables
from anabatic.convert.recipe_draft import RecipeDraft, convert_to_type
from anabatic.core.errors import ConfigError

_SEQUENCES_PER_ROW = {"dpo": 2, "reward": 2}
"""Sequences of a row: both answers of a pair."""
_CHECKPOINT = re.compile(r"(?:global_)?(?:checkpoint|step)[-_]?\d+")
_DECAY_BY_SCHEDULER = {
    "linear": "linear",
    "linear_with_warmup": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "none",
    "constant_with_warmup": "none",
}


def add_derived_settings(made: RecipeDraft, folder: Path) -> None:
    """Add what follows from the gathered facts; `folder` is where relative names of files begin.

    Raises:
        ConfigError: a value is of the wrong type, or a file that is named is torn.
    """
    _set_devices_and_nodes(made)
    named_values.set_name_lists(made)
    _set_deepspeed(made, folder)
    _set_rl_batch(made) if made.command == "rl" else _set_batch_tokens(made)
    _set_schedule(made)
    _set_early_stopping(made)
    named_values.set_data_sources(made, folder)
    named_values.set_model_name(made)
    _set_tuner(made)
    _resume(made)


def world_size(made: RecipeDraft) -> int:
    """Return the processes of the job, over all machines."""
    return (made.gathered_int("nproc") or 1) * (made.gathered_int("nnodes") or 1)


def _set_devices_and_nodes(made: RecipeDraft) -> None:
    visible = made.gathered.get("visible")
    if visible is not None:
        made.variables.append(visible.original_text)
        count = len([one for one in str(visible.value).split(",") if one.strip()])
        if "nproc" not in made.gathered and count > 1 and made.call.peer == "llamafactory":
            made.gathered["nproc"] = type(visible)("nproc", count, visible.original_text)
    if "processes" in made.gathered:
        nodes = made.gathered_int("nnodes") or 1
        one = made.gathered["processes"]
        made.gathered["nproc"] = type(one)(
            "nproc", max(1, (made.gathered_int("processes") or 1) // nodes), one.original_text
        )
    nproc, nodes = made.gathered_int("nproc"), made.gathered_int("nnodes") or 1
    if not (command_table.get_command(made.command).is_training or made.command == "infer"):
        if nproc and nproc > 1:
            told = f"`anabatic {made.command}` runs in one process"
            made.notes.needless.append(f"{made.gathered['nproc'].original_text}: {told}")
        return
    if nodes == 1:
        if nproc and nproc > 1 and made.setting_type("device.nproc") is not None:
            made.set_setting("device.nproc", nproc, made.gathered["nproc"].original_text)
        return
    rank = made.gathered_int("node_rank", least=0)
    made.launch_options = ["--nnodes", str(nodes), "--node-rank", "R" if rank is None else str(rank)]
    made.launch_options += [
        "--nproc",
        str(nproc or 1),
        "--master-addr",
        str(made.gathered_value("master_addr") or "ADDRESS"),
    ]
    if "master_port" in made.gathered:
        made.launch_options += ["--master-port", str(made.gathered_int("master_port"))]


def _set_deepspeed(made: RecipeDraft, folder: Path) -> None:
    if "deepspeed" not in made.gathered or made.setting_type("parallel.deepspeed") is None:
        return
    one = made.gathered["deepspeed"]
    if isinstance(one.value, dict):
        apply_translation(made, deepspeed_json.translate_config(one.value, "deepspeed"), "deepspeed")
        return
    source = str(one.value)
    known = peer_tables.load_tables(made.call.peer).names.get(Path(source).name)
    place = folder / source
    if not place.is_file() and known is None and source.endswith(".json"):
        made.set_setting("parallel.deepspeed", source, one.original_text)
        made.notes.changed.append(
            f"{one.original_text}: read when the job runs, and translated then; it is not here now"
        )
        return
    content = deepspeed_json.read_config(str(place) if place.is_file() else known or source)
    apply_translation(made, deepspeed_json.translate_config(content, source), one.original_text)


def apply_translation(made: RecipeDraft, said: deepspeed_json.DeepSpeedTranslation, shown: str) -> None:
    """Take what a DeepSpeed file says, where the command itself says nothing."""
    for key, value in said.settings.items():
        if key not in made.settings and made.setting_type(key) is not None:
            made.set_setting(key, value, shown)
    Option = type(made.gathered["deepspeed"])
    for name, value in (
        ("micro_rows", said.sequences),
        ("accumulation", said.accumulation),
        ("global_rows", said.batch),
    ):
        if value is not None:
            made.gathered.setdefault(name, Option(name, value, shown))
    made.notes.lost += [f"{key} in {shown}" for key in said.unknown]
    for keys, about in (
        (said.needless, "how it is sent, scaled and saved is decided here"),
        (said.auto, "auto, so other settings decide, or our defaults"),
    ):
        if keys:
            made.notes.needless.append(f"{', '.join(keys)} in {shown}: {about}")


def _set_tuner(made: RecipeDraft) -> None:
    """Settings of LoRA mean LoRA; passes over the data stand in the place of a number of steps."""
    lora = next((given.origin for key, given in made.settings.items() if key.startswith("lora.")), "")
    if lora and "tuner" not in made.settings:
        made.set_setting("tuner", "lora", lora)
    if made.command == "reward" and "tuner" in made.settings and made.settings["tuner"].value == "lora":
        _remove_adapter_settings(made)
    if made.command == "rl" and "schedule.epochs" in made.settings and "schedule.max_steps" not in made.settings:
        made.set_setting("schedule.max_steps", None, "schedule.epochs counts")


def _resume(made: RecipeDraft) -> None:
    """A checkpoint to go on from is found by the run folder that it lies in."""
    one = made.gathered.get("resume_from")
    if one is None:
        return
    path = Path(str(one.value))
    out = path.parent if _CHECKPOINT.fullmatch(path.name) else path
    if made.setting_type("out") is not None and "out" not in made.settings:
        made.set_setting("out", str(out), one.original_text)
    told = "the newest whole checkpoint of `out` is taken by itself; another program's is a `model` to begin with"
    made.notes.changed.append(f"{one.original_text}: {told}")


def _remove_adapter_settings(made: RecipeDraft) -> None:
    """The head of a reward model is no part of an adapter: all of it is trained, at a rate of our own."""
    origin = made.settings["tuner"].origin
    made.notes.lost.append(f"{origin}: a reward model is trained whole, or with tuner freeze; optim.lr is our default")
    for key in [key for key in made.settings if key.startswith("lora.") or key in ("tuner", "optim.lr")]:
        del made.settings[key]


def _set_batch_tokens(made: RecipeDraft) -> None:
    """Rows become tokens: packed, a row is `batch.seq_len` of them (and both answers of a pair count)."""
    facts = [made.gathered[name] for name in ("micro_rows", "accumulation", "global_rows") if name in made.gathered]
    if made.setting_type("batch.micro_batch_tokens") is None or not facts:
        return
    if "batch.seq_len" not in made.settings:
        made.set_setting(
            "batch.seq_len", peer_tables.load_tables(made.call.peer).seq_len, "taken, since no length is given"
        )
    length = made.settings["batch.seq_len"].value
    each = length * _SEQUENCES_PER_ROW.get(made.command, 1)
    unit = "row" if each == length else "pair of 2"
    micro, processes = made.gathered_int("micro_rows"), world_size(made)
    steps, rows = made.gathered_int("accumulation"), made.gathered_int("global_rows")
    if rows is None and steps is not None:
        rows = (micro or 1) * steps * processes
    elif rows is not None and micro is not None and steps is not None:
        _require_consistent_batch(made, rows, micro, steps)
    if micro is not None:
        made.set_setting("batch.micro_batch_tokens", micro * each, f"{_format_count(micro, unit)} x {length} tokens")
    if rows is not None and "batch.global_batch_tokens" not in made.settings:
        least = (micro or 1) * processes
        if rows < least:
            told = (
                f"{_format_count(rows, 'row')} a step are less than {processes} processes x "
                f"{_format_count(micro or 1, 'row')}"
            )
            made.notes.changed.append(f"{told}; {least} are taken")
        rows = max(rows, least)
        origin = f"{_format_count(rows, unit)} x {length} tokens, {_format_count(processes, 'process')}"
        made.set_setting("batch.global_batch_tokens", rows * each, origin)
        if "nproc" not in made.gathered and made.call.peer in ("llamafactory", "deepspeed"):
            told = "for one process; with more give device.nproc, and as many times the tokens where rows a step follow"
            made.notes.changed.append(f"batch.global_batch_tokens: {told} from the processes")
    _note_batch_tokens(made, length)


def _require_consistent_batch(made: RecipeDraft, rows: int, micro: int, steps: int) -> None:
    """Rows of a step, of a micro-batch and micro-batches are given: the number of processes follows."""
    told = f"{rows} rows a step are {micro} rows x {steps} micro-batches x {rows / (micro * steps):g} processes"
    if rows % (micro * steps) or ("nproc" in made.gathered and rows != micro * steps * world_size(made)):
        given = f", not {world_size(made)}" if "nproc" in made.gathered else ""
        shown = made.gathered["global_rows"].original_text
        raise ConfigError(f"{shown}: {told}{given}", "make train_batch_size and the others agree, or leave one out")
    if "nproc" not in made.gathered and rows > micro * steps:
        made.notes.changed.append(f"{told}: give device.nproc")


def _format_count(count: int, what: str) -> str:
    """`1 row`, `2 pairs of 2`, `4 processes`."""
    head, _, rest = what.partition(" ")
    ending = "" if count == 1 else "es" if head.endswith("s") else "s"
    return " ".join([str(count), head + ending, *([rest] if rest else [])])


def _note_batch_tokens(made: RecipeDraft, length: int) -> None:
    tokens = {
        key: made.settings[f"batch.{key}_batch_tokens"].value
        for key in ("micro", "global")
        if f"batch.{key}_batch_tokens" in made.settings
    }
    names = (name for name in ("micro_rows", "accumulation", "global_rows") if name in made.gathered)
    shown = ", ".join(dict.fromkeys(made.gathered[name].original_text for name in names))
    sizes = ", ".join(f"batch.{key}_batch_tokens {value}" for key, value in tokens.items())
    packed = (
        "" if made.call.peer == "nanochat" else "; packed, they hold more rows than there, and an epoch fewer steps"
    )
    made.notes.changed.append(f"{shown} -> {sizes}: tokens, not rows, at {length} a row{packed}")


def _set_rl_batch(made: RecipeDraft) -> None:
    """Reinforcement learning counts answers: rows of a micro-batch there are answers here, too."""
    micro, each = made.gathered_int("micro_rows"), made.gathered_int("num_samples") or 8
    if "num_samples" in made.gathered:
        made.set_setting("num_samples", each, made.gathered["num_samples"].original_text)
    if micro is None:
        return
    made.set_setting("device_batch_size", micro, made.gathered["micro_rows"].original_text)
    if "examples_per_step" in made.settings:
        return
    answers = micro * (made.gathered_int("accumulation") or 1) * world_size(made)
    questions = max(1, ceil(answers / each))
    while questions * each % micro:
        questions += 1
    origin = f"{answers} answers a step, {each} to each question"
    made.set_setting("examples_per_step", questions, origin)
    made.set_setting(
        "num_samples",
        each,
        made.settings.get("num_samples", type(made.settings["device_batch_size"])(0, origin)).origin,
    )
    made.notes.changed.append(f"{origin} -> examples_per_step {questions}: questions of a step, over all processes")


def _set_schedule(made: RecipeDraft) -> None:
    if made.setting_type("schedule.decay") is None:
        return
    warmup = _resolve_warmup_ratio(made)
    one = made.gathered.get("scheduler")
    if one is None:
        falls = settings.default_tree(command_table.get_command(made.command).import_job_class())["schedule"][
            "decay_ratio"
        ]
        if "schedule.decay_ratio" not in made.settings and warmup + falls > 1.0:
            made.set_setting("schedule.decay_ratio", round(1.0 - warmup, 6), "all steps after the warm-up")
        return
    kind = str(one.value).lower()
    decay = _DECAY_BY_SCHEDULER.get(kind)
    if decay is None:
        made.notes.lost.append(f"{one.original_text}: known are {', '.join(_DECAY_BY_SCHEDULER)}; cosine is taken")
        decay = "cosine"
    made.set_setting("schedule.decay", decay, one.original_text)
    if kind == "constant":
        made.set_setting("schedule.warmup_ratio", 0.0, one.original_text)
        warmup = 0.0
    elif "schedule.warmup_ratio" not in made.settings:
        made.set_setting("schedule.warmup_ratio", warmup, "not given there")
    made.set_setting(
        "schedule.decay_ratio", 0.0 if decay == "none" else round(1.0 - warmup, 6), "all steps after the warm-up"
    )
    if kind == "cosine_with_min_lr":
        made.notes.changed.append(
            f"{one.original_text}: give schedule.final_lr_ratio, the last rate as a share of the peak"
        )
    elif decay != "none":
        made.set_setting("schedule.final_lr_ratio", 0.0, one.original_text)


def _resolve_warmup_ratio(made: RecipeDraft) -> float:
    """Return the share of the steps in which the rate rises."""
    steps = made.gathered.get("warmup_steps")
    if steps is not None and float(convert_to_type(steps.value, float, steps.original_text)) > 0:
        count = float(convert_to_type(steps.value, float, steps.original_text))
        most = made.settings.get("schedule.max_steps")
        if count < 1 or most is not None:
            share = count if count < 1 else min(1.0, count / most.value)  # type: ignore[union-attr]
            made.set_setting("schedule.warmup_ratio", round(share, 6), f"{steps.original_text} of the steps")
        else:
            told = "a share of all steps here, and their number follows from the data"
            made.notes.changed.append(f"{steps.original_text}: {told}; 0.03 is taken for schedule.warmup_ratio")
            made.set_setting("schedule.warmup_ratio", 0.03, f"for {steps.original_text}; put steps / all steps")
    given = made.settings.get("schedule.warmup_ratio")
    return float(given.value) if given else 0.0


def _set_early_stopping(made: RecipeDraft) -> None:
    """Early stopping needs evaluations, and something held out."""
    if "eval.patience" not in made.settings or not made.settings["eval.patience"].value:
        return
    if "eval.every" not in made.settings and made.command.partition(" ")[0] != "classify":
        every = made.settings["save.every"].value if "save.every" in made.settings else 100
        made.set_setting("eval.every", every or 100, "eval.patience counts evaluations")
    none = made.settings.get("data.valid_fraction")
    if none is not None and none.value == 0 and "data.valid" not in made.settings:
        del made.settings["data.valid_fraction"]
