"""DeepSpeed's JSON file as settings of ours.

Keys: deepspeed.ai/docs/config-json. "auto", which Transformers fills in, leaves a setting to us. A key without a
counterpart is named in a warning; one that the recipe contradicts is an error.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabatic.core import json_reader
from anabatic.core.errors import ConfigError

_PRESETS = {f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)} | {
    f"zero{stage}-offload": {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}}}
    for stage in (2, 3)
}
_STAGE_STRATEGIES = {0: "ddp", 1: "zero2", 2: "zero2", 3: "zero3"}
"""Stage 1 keeps gradients whole, stage 2 does not: the numbers are the same, the memory is less."""

_NEEDLESS_KEYS = (
    "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.sub_group_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.stage3_max_reuse_distance",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.round_robin_gradients",
    "zero_optimization.ignore_unused_parameters",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "steps_per_print",
    "wall_clock_breakdown",
)
"""How DeepSpeed goes about what is done here in another way (FSDP2 sends block by block and overlaps by itself; models
are always saved whole); they decide no numbers."""
_LOSS_SCALE_KEYS = (
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
)
_OFFLOAD_KEYS = ("pin_memory", "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "nvme_path", "pipeline_read")


@dataclass
class DeepSpeedTranslation:
    """What a file says, in our settings.

    Attributes:
        settings: dotted name -> value.
        unknown: keys without a counterpart.
        needless: keys of what is done here in another way, or by itself; auto: keys that leave their value open.
        sequences: rows of a micro-batch, `accumulation`: micro-batches of a step, `batch`: rows of a step; None: open.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    auto: list[str] = field(default_factory=list)
    sequences: int | None = None
    accumulation: int | None = None
    batch: int | None = None


def read_config(source: str) -> dict[str, Any]:
    """Return the content of a file, or of one of the names: zero0 to zero3, zero2-offload, default-zero3 and the like.

    Raises:
        ConfigError: it is neither, or torn.
    """
    if is_preset(source):
        return copy.deepcopy(_PRESETS[_normalize_preset_name(source)])
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f'parallel.deepspeed is "{source}", which is no file', f"give a JSON file, or one of {', '.join(_PRESETS)}"
        )
    try:
        content = json_reader.read_json_file(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", "fix the file") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}, not an object", "give DeepSpeed's configuration")
    return content


def is_preset(source: str) -> bool:
    """True for `zero2`, `default-zero3`, `zero3_offload` and the like."""
    return _normalize_preset_name(source) in _PRESETS


def _normalize_preset_name(source: str) -> str:
    return source.removeprefix("default-").replace("_", "-")


def translate_config(content: dict[str, Any], source: str) -> DeepSpeedTranslation:
    """Return our settings for DeepSpeed's.

    Raises:
        ConfigError: a value of the wrong type, or a thing that is not done here (NVMe).
    """
    translation = DeepSpeedTranslation()
    for key, value in content.items():
        handler = _KEY_HANDLERS.get(key)
        if value == "auto" or handler is None:
            _note_unset_key(translation, key, value)
            continue
        try:
            handler(translation, value)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}", error.hint) from error
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            what = f"{source}: {key} is {json.dumps(value)[:80]}"
            raise ConfigError(what, f"{_EXPECTED_VALUES[key]} is expected, as in DeepSpeed's own files") from error
    return translation


def _note_unset_key(translation: DeepSpeedTranslation, key: str, value: Any) -> None:
    """Name a key that sets nothing."""
    is_needless, is_auto = key in _NEEDLESS_KEYS, value == "auto" and (key in _KEY_HANDLERS or "." in key)
    (translation.needless if is_needless else translation.auto if is_auto else translation.unknown).append(key)


def _translate_zero(translation: DeepSpeedTranslation, section: dict[str, Any]) -> None:
    stage = int(section.get("stage", 0))
    if stage not in _STAGE_STRATEGIES:
        raise ConfigError(f"zero_optimization.stage is {stage}", "use 0, 1, 2 or 3")
    translation.settings["parallel.strategy"] = _STAGE_STRATEGIES[stage]
    for part in ("offload_optimizer", "offload_param"):
        inner = section.get(part) or {}
        where = inner.get("device", "none")
        if where == "nvme":
            raise ConfigError(f"zero_optimization.{part}.device is nvme", "use cpu; disks are not used as memory here")
        if where == "cpu":
            if stage:
                translation.settings["parallel.offload"] = "cpu"
            else:
                translation.unknown.append(f"zero_optimization.{part} of stage 0")
        for key in inner:
            if key != "device":
                (translation.needless if key in _OFFLOAD_KEYS else translation.unknown).append(
                    f"zero_optimization.{part}.{key}"
                )
    for key, value in section.items():
        if key not in ("stage", "offload_optimizer", "offload_param"):
            _note_unset_key(translation, f"zero_optimization.{key}", value)


def _make_dtype_handler(name: str) -> Callable[[DeepSpeedTranslation, dict[str, Any]], None]:
    def handle_dtype(translation: DeepSpeedTranslation, section: dict[str, Any]) -> None:
        if section.get("enabled") is True:
            if translation.settings.get("device.dtype", name) != name:
                raise ConfigError("fp16 and bf16 are both enabled", "enable one of them")
            translation.settings["device.dtype"] = name
        if section.get("enabled") == "auto":
            translation.auto.append(f"{name}.enabled")
        if name == "fp16" and section.get("loss_scale"):
            translation.unknown.append("fp16.loss_scale")  # ours is dynamic, always
        translation.needless += [f"{name}.{key}" for key in section if key in _LOSS_SCALE_KEYS]
        rest = (key for key in section if key not in ("enabled", "loss_scale", *_LOSS_SCALE_KEYS))
        translation.unknown += [f"{name}.{key}" for key in rest]

    return handle_dtype


def _translate_optimizer(translation: DeepSpeedTranslation, section: dict[str, Any]) -> None:
    kind = str(section.get("type", "AdamW"))
    if kind.lower() not in ("adam", "adamw"):
        translation.unknown.append(f"optimizer.type {kind}")
        return
    translation.settings["optim.name"] = "adamw"
    names = {"lr": "optim.lr", "eps": "optim.eps", "weight_decay": "optim.weight_decay"}
    for key, value in section.get("params", {}).items():
        if value == "auto":
            translation.auto.append(f"optimizer.params.{key}")
        elif key == "betas":
            translation.settings["optim.beta1"], translation.settings["optim.beta2"] = map(_parse_number, value)
        elif key in names:
            translation.settings[names[key]] = _parse_number(value)
        elif key not in ("torch_adam", "adam_w_mode"):
            translation.unknown.append(f"optimizer.params.{key}")


def _make_rows_handler(name: str) -> Callable[[DeepSpeedTranslation, Any], None]:
    def handle_rows(translation: DeepSpeedTranslation, value: Any) -> None:
        if isinstance(value, bool) or int(value) != value or value < 1:
            raise ValueError("not a whole number from 1")
        setattr(translation, name, int(value))

    return handle_rows


def _translate_clipping(translation: DeepSpeedTranslation, value: Any) -> None:
    translation.settings["optim.max_grad_norm"] = _parse_number(value)


def _parse_number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("no number")
    return number


_KEY_HANDLERS: dict[str, Callable[[DeepSpeedTranslation, Any], None]] = {
    "zero_optimization": _translate_zero,
    "bf16": _make_dtype_handler("bf16"),
    "bfloat16": _make_dtype_handler("bf16"),
    "fp16": _make_dtype_handler("fp16"),
    "optimizer": _translate_optimizer,
    "gradient_clipping": _translate_clipping,
    "train_micro_batch_size_per_gpu": _make_rows_handler("sequences"),
    "gradient_accumulation_steps": _make_rows_handler("accumulation"),
    "train_batch_size": _make_rows_handler("batch"),
}
_WHOLE_NUMBER = "a whole number from 1"
_EXPECTED_VALUES = {
    **dict.fromkeys(("bf16", "bfloat16", "fp16"), 'an object such as {"enabled": true}'),
    **dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), _WHOLE_NUMBER
    ),
    "zero_optimization": 'an object such as {"stage": 2}',
    "optimizer": 'an object such as {"type": "AdamW", "params": {"lr": 1e-4}}',
    "gradient_clipping": "a number",
}


DEEPSPEED_KEYS = (*_KEY_HANDLERS, "zero_allow_untested_optimizer", "steps_per_print", "wall_clock_breakdown")
"""By which a file is known as DeepSpeed's."""


def apply_deepspeed(job: Any, world_size: int) -> tuple[Any, str, str]:
    """Return the job with the settings of its `parallel.deepspeed` file, what came of it, and what was not used.

    Settings that the recipe leaves at their defaults follow the file. Both texts are empty where there is nothing
    to say.

    Raises:
        ConfigError: the recipe and the file say different things.
    """
    source = job.parallel.deepspeed
    if source is None:
        return job, "", ""
    translation = translate_config(read_config(source), source)
    settings = translation.settings | _rows_to_tokens(translation, job.batch.resolved_seq_len, world_size, source)
    fresh, changed = copy.deepcopy(job), []
    defaults = type(job)(**{name: getattr(job, name) for name in _required_settings(job)})
    for dotted, value in settings.items():
        section, _, name = dotted.partition(".")
        now, default = getattr(getattr(job, section), name), getattr(getattr(defaults, section), name)
        if now not in (default, value):
            raise ConfigError(
                f"{dotted} is {now} in the recipe, {source} says {value}", "take one of them out, or make them equal"
            )
        setattr(getattr(fresh, section), name, value)
        changed.append(f"{dotted} = {value}")
    summary = f"{source}: {', '.join(changed) or 'nothing to set'}"
    lost = (
        f"{source}: without a counterpart here, not used: {', '.join(translation.unknown)}"
        if translation.unknown
        else ""
    )
    for section in ("parallel", "batch", "optim", "device"):
        getattr(fresh, section).__post_init__()
    return fresh, summary, lost


def _required_settings(job: Any) -> list[str]:
    """Settings without which a job cannot be made."""
    return [name for name in ("model", "tokenizer", "data") if hasattr(job, name)]


def _rows_to_tokens(translation: DeepSpeedTranslation, seq_len: int, world_size: int, source: str) -> dict[str, Any]:
    """Rows become tokens: packed, a row is `seq_len` of them."""
    micro, steps, batch = translation.sequences, translation.accumulation, translation.batch
    if batch is not None and micro is not None and steps is not None and batch != micro * steps * world_size:
        raise ConfigError(
            f"{source}: train_batch_size is {batch}, but {micro} per process x {steps} x {world_size} processes"
            f" = {micro * steps * world_size}",
            "make them agree, or leave one out",
        )
    if batch is None and micro is not None and steps is not None:
        batch = micro * steps * world_size
    found = {}
    if micro is not None:
        found["batch.micro_batch_tokens"] = micro * seq_len
    if batch is not None:
        found["batch.global_batch_tokens"] = batch * seq_len
    return found
