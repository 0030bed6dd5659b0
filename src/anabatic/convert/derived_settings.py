"""Settings that follow from several values at once (batches in tokens, shares of the steps), and names of models, data
and rewards.
"""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

from anabatic.config.loading import command_table, deepspeed_json, settings
from anabatic.config.rl import BUILTIN_REWARDS
from anabatic.convert import data_sources, peer_tables
from anabatic.convert.dataset_info import HUB_REPO
from anabatic.convert.recipe_draft import RecipeDraft, convert_to_type, read_json_value
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


def add_derived_settings(draft: RecipeDraft, folder: Path) -> None:
    """Add what follows from the gathered facts; `folder` is where relative names of files begin.

    Raises:
        ConfigError: a value is of the wrong type, or a file that is named is torn.
    """
    _set_devices_and_nodes(draft)
    set_name_lists(draft)
    _set_fsdp(draft)
    _set_deepspeed(draft, folder)
    _set_rl_batch(draft) if draft.command == "rl" else _set_batch_tokens(draft)
    _set_schedule(draft)
    _set_early_stopping(draft)
    data_sources.set_data_sources(draft, folder)
    set_model_name(draft)
    _set_tuner(draft)
    _set_trained_parts(draft)
    _set_loss_scale(draft)
    _resume(draft)


def world_size(draft: RecipeDraft) -> int:
    """Return the processes of the job, over all machines."""
    return (draft.gathered_int("nproc") or 1) * (draft.gathered_int("nnodes") or 1)


def _set_devices_and_nodes(draft: RecipeDraft) -> None:
    visible = draft.gathered.get("visible")
    if visible is not None:
        draft.variables.append(visible.original_text)
        count = len([one for one in str(visible.value).split(",") if one.strip()])
        if "nproc" not in draft.gathered and count > 1 and draft.call.peer == "llamafactory":
            draft.gathered["nproc"] = type(visible)("nproc", count, visible.original_text)
    if "processes" in draft.gathered:
        nodes = draft.gathered_int("nnodes") or 1
        one = draft.gathered["processes"]
        draft.gathered["nproc"] = type(one)(
            "nproc", max(1, (draft.gathered_int("processes") or 1) // nodes), one.original_text
        )
    nproc, nodes = draft.gathered_int("nproc"), draft.gathered_int("nnodes") or 1
    if not (command_table.COMMANDS.find_row(draft.command).is_training or draft.command == "infer"):
        if nproc and nproc > 1:
            reason = f"`anabatic {draft.command}` runs in one process"
            draft.notes.needless.append(f"{draft.gathered['nproc'].original_text}: {reason}")
        return
    if nodes == 1:
        if nproc and nproc > 1 and draft.setting_type("device.nproc") is not None:
            draft.set_setting("device.nproc", nproc, draft.gathered["nproc"].original_text)
        for name in ("node_rank", "master_addr", "master_port"):
            if name in draft.gathered:
                reason = "the processes of one machine find each other"
                draft.notes.needless.append(f"{draft.gathered[name].original_text}: {reason}")
        return
    rank = draft.gathered_int("node_rank", minimum=0)
    draft.launch_options = ["--nnodes", str(nodes), "--node-rank", "R" if rank is None else str(rank)]
    draft.launch_options += [
        "--nproc",
        str(nproc or 1),
        "--master-addr",
        str(draft.gathered_value("master_addr") or "ADDRESS"),
    ]
    if "master_port" in draft.gathered:
        draft.launch_options += ["--master-port", str(draft.gathered_int("master_port"))]


_SHARDING = {
    "full_shard": "zero3",
    "fsdp2": "zero3",
    "fsdp": "zero3",
    "true": "zero3",
    "1": "zero3",
    "shard_grad_op": "zero2",
    "false": "zero2",
    "2": "zero2",
    "no_shard": "ddp",
    "3": "ddp",
    "hybrid_shard": "zero3",
    "4": "zero3",
    "hybrid_shard_zero2": "zero2",
    "5": "zero2",
}
"""Words and numbers of FSDP; of `fsdp_reshard_after_forward` true and false."""
_HYBRID = ("hybrid_shard", "4", "hybrid_shard_zero2", "5")
_NO_SHARDING = ("no", "false", "deepspeed", "multi_gpu", "multi_npu", "multi_cpu")
"""Kinds of accelerate's distribution that shard nothing, or that other keys describe."""


def _set_fsdp(draft: RecipeDraft) -> None:
    """FSDP is a strategy here; a hybrid keeps a copy on every machine."""
    kind = draft.gathered.get("distributed_type")
    if kind is not None and str(kind.value).lower() not in (*_NO_SHARDING, "fsdp"):
        draft.notes.lost.append(f"{kind.original_text}: no such distribution here; see parallel.strategy")
    is_fsdp = kind is not None and str(kind.value).lower() == "fsdp"
    one = draft.gathered.get("fsdp_strategy") or draft.gathered.get("use_fsdp") or (kind if is_fsdp else None)
    if one is None or draft.setting_type("parallel.strategy") is None:
        return
    given = one.value if isinstance(one.value, list) else [one.value]
    words = [word.removeprefix("_") for value in given for word in str(value).lower().replace(",", " ").split()]
    chosen = next((word for word in words if word in _SHARDING), None)
    unknown = [word for word in words if word not in _SHARDING and word not in ("auto_wrap", "offload")]
    if unknown:
        draft.notes.lost.append(f"{', '.join(unknown)} of {one.original_text}: known are {', '.join(_SHARDING)}")
    if chosen is None:
        return
    draft.set_setting("parallel.strategy", _SHARDING[chosen], one.original_text)
    if "offload" in words:
        draft.set_setting("parallel.offload", "cpu", one.original_text)
    machines = draft.gathered_int("nnodes") or 1
    if chosen in _HYBRID and machines > 1:
        draft.set_setting("parallel.replicate", machines, f"{one.original_text}, a copy on each of {machines} machines")


def _set_deepspeed(draft: RecipeDraft, folder: Path) -> None:
    if "deepspeed" not in draft.gathered or draft.setting_type("parallel.deepspeed") is None:
        return
    one = draft.gathered["deepspeed"]
    if isinstance(one.value, dict):
        apply_translation(draft, deepspeed_json.translate_config(one.value, "deepspeed"), "deepspeed")
        return
    source = str(one.value)
    known = peer_tables.load_tables(draft.call.peer).names.get(Path(source).name)
    place = folder / source
    if not place.is_file() and known is None and source.endswith(".json"):
        draft.set_setting("parallel.deepspeed", source, one.original_text)
        draft.notes.changed.append(
            f"{one.original_text}: read when the job runs, and translated then; it is not here now"
        )
        return
    content = deepspeed_json.read_config(str(place) if place.is_file() else known or source)
    apply_translation(draft, deepspeed_json.translate_config(content, source), one.original_text)


def apply_translation(draft: RecipeDraft, translation: deepspeed_json.DeepSpeedTranslation, original: str) -> None:
    """Take what a DeepSpeed file says, where the command itself says nothing."""
    for key, value in translation.settings.items():
        if key not in draft.settings and draft.setting_type(key) is not None:
            draft.set_setting(key, value, original)
    Option = type(draft.gathered["deepspeed"])
    for name, value in (
        ("micro_rows", translation.sequences),
        ("accumulation", translation.accumulation),
        ("global_rows", translation.batch),
    ):
        if value is not None:
            draft.gathered.setdefault(name, Option(name, value, original))
    draft.notes.lost += [f"{key} in {original}" for key in translation.unknown]
    for keys, about in (
        (translation.needless, "how it is sent, scaled and saved is decided here"),
        (translation.auto, "auto, so other settings decide, or our defaults"),
    ):
        if keys:
            draft.notes.needless.append(f"{', '.join(keys)} in {original}: {about}")


def _set_tuner(draft: RecipeDraft) -> None:
    """Settings of LoRA mean LoRA; passes over the data stand in the place of a number of steps."""
    lora = next((given.origin for key, given in draft.settings.items() if key.startswith("lora.")), "")
    if lora and "tuner" not in draft.settings:
        draft.set_setting("tuner", "lora", lora)
    if draft.command == "reward" and "tuner" in draft.settings and draft.settings["tuner"].value == "lora":
        _remove_adapter_settings(draft)
    if draft.command == "rl" and "schedule.epochs" in draft.settings and "schedule.max_steps" not in draft.settings:
        draft.set_setting("schedule.max_steps", None, "schedule.epochs counts")


_FROZEN_PARTS = {"freeze_language": ("language", False), "freeze_projector": ("projector", True)} | {
    "freeze_tower": ("tower", True)
}
"""Fact -> part of a model that sees, and whether ms-swift and LLaMA-Factory freeze it where nothing is said."""


def _set_trained_parts(draft: RecipeDraft) -> None:
    """Parts of a model that sees, each frozen or not."""
    given = [one for name in _FROZEN_PARTS if (one := draft.gathered.get(name)) is not None]
    if not given or draft.setting_type("vision.train") is None:
        return
    parts = []
    for name, (part, frozen) in _FROZEN_PARTS.items():
        value = draft.gathered_value(name)
        if not (frozen if value is None else convert_to_type(value, bool, draft.gathered[name].original_text)):
            parts.append(part)
    if parts:
        draft.set_setting("vision.train", parts, given[0].original_text)
    else:
        draft.notes.lost.append(f"{given[0].original_text}: all parts of the model are frozen")


_LOSS_SCALES = {"last_round": "last_turn_only", "all": "train_on_inputs"}
"""Target tokens there -> the setting that says so here; `default` is so anyway."""


def _set_loss_scale(draft: RecipeDraft) -> None:
    """ms-swift's weights of tokens: a strategy, and parts of answers that count more or less."""
    one = draft.gathered.get("loss_scale")
    if one is None:
        return
    lost = []
    for word in str(one.value).split("+"):
        key = _LOSS_SCALES.get(word, "")
        if draft.setting_type(key) is not None and key:
            draft.set_setting(key, True, one.original_text)
        elif word != "default" and not (key and draft.command in ("dpo", "reward", "pretrain")):
            lost.append(word)
    if lost:
        about = "every target token counts the same here, those of thoughts and calls too"
        draft.notes.lost.append(f"{', '.join(lost)} of {one.original_text}: {about}")


def _resume(draft: RecipeDraft) -> None:
    """A checkpoint to continue from is found by the run folder that it lies in."""
    one = draft.gathered.get("resume_from")
    if one is None:
        return
    path = Path(str(one.value))
    out = path.parent if _CHECKPOINT.fullmatch(path.name) else path
    if draft.setting_type("out") is not None and "out" not in draft.settings:
        draft.set_setting("out", str(out), one.original_text)
    note = "the newest whole checkpoint of `out` is taken automatically; another program's is a `model` to begin with"
    draft.notes.changed.append(f"{one.original_text}: {note}")


def _remove_adapter_settings(draft: RecipeDraft) -> None:
    """The head of a reward model is no part of an adapter: all of it is trained, at our own rate."""
    origin = draft.settings["tuner"].origin
    draft.notes.lost.append(f"{origin}: a reward model is trained whole, or with tuner freeze; optim.lr is our default")
    for key in [key for key in draft.settings if key.startswith("lora.") or key in ("tuner", "optim.lr")]:
        del draft.settings[key]


def _set_batch_tokens(draft: RecipeDraft) -> None:
    """Rows become tokens: packed, a row is `batch.seq_len` of them (and both answers of a pair count)."""
    facts = [draft.gathered[name] for name in ("micro_rows", "accumulation", "global_rows") if name in draft.gathered]
    if draft.setting_type("batch.micro_batch_tokens") is None or not facts:
        return
    if "batch.seq_len" not in draft.settings:
        draft.set_setting(
            "batch.seq_len", peer_tables.load_tables(draft.call.peer).seq_len, "taken, since no length is given"
        )
    length = draft.settings["batch.seq_len"].value
    each = length * _SEQUENCES_PER_ROW.get(draft.command, 1)
    unit = "row" if each == length else "pair of 2"
    micro, processes = draft.gathered_int("micro_rows"), world_size(draft)
    steps, rows = draft.gathered_int("accumulation"), draft.gathered_int("global_rows")
    if rows is None and steps is not None:
        rows = (micro or 1) * steps * processes
    elif rows is not None and micro is not None and steps is not None:
        _require_consistent_batch(draft, rows, micro, steps)
    if micro is not None:
        draft.set_setting("batch.micro_batch_tokens", micro * each, f"{_format_count(micro, unit)} x {length} tokens")
    if rows is not None and "batch.global_batch_tokens" not in draft.settings:
        minimum = (micro or 1) * processes
        if rows < minimum:
            note = (
                f"{_format_count(rows, 'row')} a step are less than {processes} processes x "
                f"{_format_count(micro or 1, 'row')}"
            )
            draft.notes.changed.append(f"{note}; {minimum} are taken")
        rows = max(rows, minimum)
        origin = f"{_format_count(rows, unit)} x {length} tokens, {_format_count(processes, 'process')}"
        draft.set_setting("batch.global_batch_tokens", rows * each, origin)
        if "nproc" not in draft.gathered and draft.call.peer in ("llamafactory", "deepspeed"):
            note = "for one process; with more give device.nproc, and as many times the tokens where rows a step follow"
            draft.notes.changed.append(f"batch.global_batch_tokens: {note} from the processes")
    _note_batch_tokens(draft, length)


def _require_consistent_batch(draft: RecipeDraft, rows: int, micro: int, steps: int) -> None:
    """Rows of a step, of a micro-batch and micro-batches are given: the number of processes follows."""
    description = f"{rows} rows a step are {micro} rows x {steps} micro-batches x {rows / (micro * steps):g} processes"
    if rows % (micro * steps) or ("nproc" in draft.gathered and rows != micro * steps * world_size(draft)):
        given = f", not {world_size(draft)}" if "nproc" in draft.gathered else ""
        original = draft.gathered["global_rows"].original_text
        raise ConfigError(
            f"{original}: {description}{given}", "make train_batch_size and the others agree, or leave one out"
        )
    if "nproc" not in draft.gathered and rows > micro * steps:
        draft.notes.changed.append(f"{description}: give device.nproc")


def _format_count(count: int, what: str) -> str:
    """`1 row`, `2 pairs of 2`, `4 processes`."""
    head, _, rest = what.partition(" ")
    ending = "" if count == 1 else "es" if head.endswith("s") else "s"
    return " ".join([str(count), head + ending, *([rest] if rest else [])])


def _note_batch_tokens(draft: RecipeDraft, length: int) -> None:
    tokens = {
        key: draft.settings[f"batch.{key}_batch_tokens"].value
        for key in ("micro", "global")
        if f"batch.{key}_batch_tokens" in draft.settings
    }
    names = (name for name in ("micro_rows", "accumulation", "global_rows") if name in draft.gathered)
    original = ", ".join(dict.fromkeys(draft.gathered[name].original_text for name in names))
    sizes = ", ".join(f"batch.{key}_batch_tokens {value}" for key, value in tokens.items())
    packed = (
        "" if draft.call.peer == "nanochat" else "; packed, they hold more rows than there, and an epoch fewer steps"
    )
    draft.notes.changed.append(f"{original} -> {sizes}: tokens, not rows, at {length} a row{packed}")


def _set_rl_batch(draft: RecipeDraft) -> None:
    """Reinforcement learning counts answers: rows of a micro-batch there are answers here, too."""
    micro, each = draft.gathered_int("micro_rows"), draft.gathered_int("num_samples") or 8
    if "num_samples" in draft.gathered:
        draft.set_setting("num_samples", each, draft.gathered["num_samples"].original_text)
    if micro is None:
        return
    draft.set_setting("device_batch_size", micro, draft.gathered["micro_rows"].original_text)
    if "examples_per_step" in draft.settings:
        return
    answers = micro * (draft.gathered_int("accumulation") or 1) * world_size(draft)
    questions = max(1, ceil(answers / each))
    while questions * each % micro:
        questions += 1
    origin = f"{answers} answers a step, {each} to each question"
    draft.set_setting("examples_per_step", questions, origin)
    draft.set_setting(
        "num_samples",
        each,
        draft.settings.get("num_samples", type(draft.settings["device_batch_size"])(0, origin)).origin,
    )
    draft.notes.changed.append(f"{origin} -> examples_per_step {questions}: questions of a step, over all processes")


def _set_schedule(draft: RecipeDraft) -> None:
    if draft.setting_type("schedule.decay") is None:
        return
    warmup = _resolve_warmup_ratio(draft)
    one = draft.gathered.get("scheduler")
    if one is None:
        falls = settings.default_tree(command_table.COMMANDS.find_row(draft.command).import_job_class())["schedule"][
            "decay_ratio"
        ]
        if "schedule.decay_ratio" not in draft.settings and warmup + falls > 1.0:
            draft.set_setting("schedule.decay_ratio", round(1.0 - warmup, 6), "all steps after the warm-up")
        return
    kind = str(one.value).lower()
    decay = _DECAY_BY_SCHEDULER.get(kind)
    if decay is None:
        draft.notes.lost.append(f"{one.original_text}: known are {', '.join(_DECAY_BY_SCHEDULER)}; cosine is taken")
        decay = "cosine"
    draft.set_setting("schedule.decay", decay, one.original_text)
    if kind == "constant":
        draft.set_setting("schedule.warmup_ratio", 0.0, one.original_text)
        warmup = 0.0
    elif "schedule.warmup_ratio" not in draft.settings:
        draft.set_setting("schedule.warmup_ratio", warmup, "not given there")
    draft.set_setting(
        "schedule.decay_ratio", 0.0 if decay == "none" else round(1.0 - warmup, 6), "all steps after the warm-up"
    )
    floor = _read_final_lr_ratio(draft)
    if floor is not None:
        draft.set_setting("schedule.final_lr_ratio", floor, draft.gathered["lr_scheduler_kwargs"].original_text)
    elif kind == "cosine_with_min_lr":
        draft.notes.changed.append(
            f"{one.original_text}: give schedule.final_lr_ratio, the last rate as a share of the peak"
        )
    elif decay != "none":
        draft.set_setting("schedule.final_lr_ratio", 0.0, one.original_text)


def _read_final_lr_ratio(draft: RecipeDraft) -> float | None:
    """Return the last rate as a share of the peak, as `lr_scheduler_kwargs` gives it; other keys are reported.

    Raises:
        ConfigError: they are no object, or the rate no number.
    """
    one = draft.gathered.get("lr_scheduler_kwargs")
    if one is None:
        return None
    content = read_json_value(one)
    if not isinstance(content, dict):
        raise ConfigError(f"{one.original_text} is no object", 'write it as {"min_lr_rate": 0.1}')
    lost = [str(key) for key in content if key not in ("min_lr_rate", "min_lr")]
    if lost:
        draft.notes.lost.append(f"{', '.join(lost)} of {one.original_text}: set schedule.decay_ratio in its place")
    peak = draft.settings.get("optim.lr")
    rates = {key: convert_to_type(content[key], float, one.original_text) for key in content if key not in lost}
    if "min_lr_rate" in rates:
        return min(1.0, max(0.0, float(rates["min_lr_rate"])))
    if "min_lr" in rates and peak is not None and peak.value:
        return min(1.0, max(0.0, round(float(rates["min_lr"]) / float(peak.value), 6)))
    return None


def _resolve_warmup_ratio(draft: RecipeDraft) -> float:
    """Return the share of the steps in which the rate rises."""
    steps = draft.gathered.get("warmup_steps")
    if steps is not None and float(convert_to_type(steps.value, float, steps.original_text)) > 0:
        count = float(convert_to_type(steps.value, float, steps.original_text))
        max_steps = draft.settings.get("schedule.max_steps")
        if count < 1 or max_steps is not None:
            ratio = count if count < 1 else min(1.0, count / max_steps.value)  # type: ignore[union-attr]
            draft.set_setting("schedule.warmup_ratio", round(ratio, 6), f"{steps.original_text} of the steps")
        else:
            note = "a share of all steps here, and their number follows from the data"
            draft.notes.changed.append(f"{steps.original_text}: {note}; 0.03 is taken for schedule.warmup_ratio")
            draft.set_setting("schedule.warmup_ratio", 0.03, f"for {steps.original_text}; put steps / all steps")
    given = draft.settings.get("schedule.warmup_ratio")
    return float(given.value) if given else 0.0


def _set_early_stopping(draft: RecipeDraft) -> None:
    """Early stopping needs evaluations, and something held out."""
    if "eval.patience" not in draft.settings or not draft.settings["eval.patience"].value:
        return
    if "eval.every" not in draft.settings and draft.command.partition(" ")[0] != "classify":
        every = draft.settings["save.every"].value if "save.every" in draft.settings else 100
        draft.set_setting("eval.every", every or 100, "eval.patience counts evaluations")
    none = draft.settings.get("data.valid_fraction")
    if none is not None and none.value == 0 and "data.valid" not in draft.settings:
        del draft.settings["data.valid_fraction"]


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
"""Losses of GRPO there; a kind of advantage or ratio that is given says more, and is its own algorithm here."""


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
            values = [word if word in BUILTIN_REWARDS or ":" in word else "" for word in values]
        kept = [word for word in values if word]
        if kept:
            draft.set_setting(key, kept, one.original_text)
        lost = [word for word, value in zip(given, values, strict=True) if not value and word not in ("none", "all")]
        if lost:
            draft.notes.lost.append(f"{', '.join(lost)} of {one.original_text}: no such name here")
    _add_swanlab(draft)
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


def _add_swanlab(draft: RecipeDraft) -> None:
    """LLaMA-Factory has a switch for this tracker beside its list."""
    one = draft.gathered.get("use_swanlab")
    if one is None or draft.setting_type("log.sinks") is None:
        return
    listed = draft.settings["log.sinks"].value if "log.sinks" in draft.settings else []
    draft.set_setting("log.sinks", list(dict.fromkeys([*listed, "swanlab"])), one.original_text)


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
    _set_hub(draft)
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


def _set_hub(draft: RecipeDraft) -> None:
    """OWNER/NAME is a name of ModelScope to ms-swift, where nothing else is said."""
    model = draft.settings.get("model")
    if draft.call.peer != "swift" or not draft.call.command_line or model is None or "hub" in draft.settings:
        return
    is_remote = isinstance(model.value, str) and HUB_REPO.fullmatch(model.value) and not Path(model.value).exists()
    if is_remote and draft.setting_type("hub") is not None and data_sources.uses_modelscope(draft):
        draft.set_setting("hub", "modelscope", "ms-swift's hub")
