"""The settings that people set, by task: what `COMMAND --help` and `config show COMMAND` list without `--all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabatic.config.loading import command_table, validation

Tasks = Mapping[str, Sequence[str]]
"""Task, as a heading -> dotted keys of settings. A section of settings stands below one task alone."""

_MODEL_AND_DATA = "Model and data"
_BATCH = "Batch and length"
_OPTIMIZER = "Optimizer and schedule"
_ADAPTER = "Adapter"
_EVALUATION = "Evaluation and saving"
_DEVICES = "Devices and parallelism"
_ANSWERS = "Answers"

_BATCH_SETTINGS = ("batch.seq_len", "batch.micro_batch_tokens", "batch.global_batch_tokens")
_TUNER_SETTINGS = ("tuner", "quantize", "lora.r", "lora.alpha")
_OPTIMIZER_SETTINGS = (
    "optim.lr",
    "schedule.epochs",
    "schedule.max_steps",
    "schedule.minutes",
    "schedule.warmup_ratio",
)
_EVALUATION_SETTINGS = ("eval.every", "save.every", "save.resume", "log.sinks")
_DEVICE_SETTINGS = ("device.nproc", "device.dtype", "parallel.strategy")
_CHIP_SETTINGS = ("device.type", "device.dtype")

_COMMON_SETTINGS: dict[str, Tasks] = {
    "pretrain": {
        _MODEL_AND_DATA: (
            "out",
            "tokenizer",
            "model.depth",
            "model.path",
            "model.recompute",
            "data.train",
            "data.valid",
            "data.text_column",
        ),
        _BATCH: _BATCH_SETTINGS,
        _OPTIMIZER: (
            "optim.name",
            "optim.lr",
            "optim.matrix_lr",
            "schedule.tokens_per_param",
            *_OPTIMIZER_SETTINGS[1:],
        ),
        _EVALUATION: _EVALUATION_SETTINGS,
        _DEVICES: ("auto", *_DEVICE_SETTINGS),
    },
    "sft": {
        _MODEL_AND_DATA: (
            "model",
            "out",
            "chat_template",
            "train_on_inputs",
            "data.train",
            "data.valid",
            "data.columns",
        ),
        _BATCH: (*_BATCH_SETTINGS, "truncation_strategy", "recompute"),
        _OPTIMIZER: _OPTIMIZER_SETTINGS,
        _ADAPTER: _TUNER_SETTINGS,
        _EVALUATION: _EVALUATION_SETTINGS,
        _DEVICES: ("auto", *_DEVICE_SETTINGS),
    },
    "dpo": {
        _MODEL_AND_DATA: ("model", "out", "data.train", "data.valid", "data.columns"),
        "Objective": ("loss_type", "beta", "rpo_alpha"),
        _BATCH: (*_BATCH_SETTINGS, "truncation_strategy", "recompute"),
        _OPTIMIZER: _OPTIMIZER_SETTINGS,
        _ADAPTER: _TUNER_SETTINGS,
        _EVALUATION: _EVALUATION_SETTINGS[:3],
        _DEVICES: ("auto", *_DEVICE_SETTINGS),
    },
    "reward": {
        _MODEL_AND_DATA: ("model", "out", "data.train", "data.valid", "data.columns"),
        "Objective": ("center_rewards_coefficient",),
        _BATCH: (*_BATCH_SETTINGS, "truncation_strategy", "recompute"),
        _OPTIMIZER: _OPTIMIZER_SETTINGS,
        _ADAPTER: _TUNER_SETTINGS,
        _EVALUATION: _EVALUATION_SETTINGS[:3],
        _DEVICES: ("auto", *_DEVICE_SETTINGS),
    },
    "rl": {
        _MODEL_AND_DATA: ("model", "out", "system", "data.train", "data.valid"),
        "Rewards and objective": ("rewards", "algorithm", "kl_coef"),
        "Batch and answers": (
            "examples_per_step",
            "num_samples",
            "device_batch_size",
            "rollout_batch",
            "batch.seq_len",
            "sampling.max_new_tokens",
            "sampling.temperature",
            "recompute",
        ),
        _OPTIMIZER: ("optim.lr", "schedule.max_steps", "schedule.minutes", "schedule.warmup_ratio"),
        _ADAPTER: ("tuner", "lora.r"),
        _EVALUATION: ("eval.every", "eval.rows", "save.every", "save.resume", "log.sinks"),
        _DEVICES: _DEVICE_SETTINGS,
    },
    "classify pretrain": {
        _MODEL_AND_DATA: ("out", "data.train", "data.valid", "model.path", "model.depth", "objective", "mask.ratio"),
        _BATCH: ("batch.rows", *_BATCH_SETTINGS[:2]),
        _OPTIMIZER: _OPTIMIZER_SETTINGS,
        _EVALUATION: _EVALUATION_SETTINGS,
        _DEVICES: _DEVICE_SETTINGS,
    },
    "classify train": {
        _MODEL_AND_DATA: (
            "out",
            "data.train",
            "data.valid",
            "data.valid_fraction",
            "tracks.classes",
            "tracks.columns",
            "model.path",
            "model.depth",
        ),
        "Classifier": ("head.features", "head.trees", "head.class_weights", "head.dropout"),
        _BATCH: ("batch.rows", *_BATCH_SETTINGS[:2]),
        _OPTIMIZER: _OPTIMIZER_SETTINGS,
        _EVALUATION: ("eval.every", "eval.metric", "eval.patience", "save.every", "save.resume"),
        _DEVICES: _DEVICE_SETTINGS,
    },
    "serve": {
        "Models": ("model", "adapter", "chat_template", "classifier", "quantize"),
        "Address and access": ("host", "port", "api_key_file", "cors", "allowed_hosts"),
        "Requests at once": ("batching.batch", "batching.max_len", "batching.cache_gib"),
        "Limits": ("limits.queue", "limits.seconds", "limits.new_tokens"),
        _ANSWERS: ("too_long", "sampling.temperature", "sampling.top_p", "sampling.max_new_tokens"),
        _DEVICES: _CHIP_SETTINGS,
    },
    "infer": {
        _MODEL_AND_DATA: ("model", "adapter", "chat_template", "inputs", "out", "system", "raw", "columns", "resume"),
        "Requests at once": ("batching.batch", "batching.max_len", "quantize"),
        _ANSWERS: ("sampling.temperature", "sampling.top_p", "sampling.max_new_tokens", "sampling.json_schema"),
        _DEVICES: ("device.nproc", *_CHIP_SETTINGS),
    },
    "eval": {
        _MODEL_AND_DATA: ("model", "adapter", "chat_template", "endpoint", "out", "data.valid"),
        "Tasks": ("tasks", "tasks_from", "shots", "limit", "max_new_tokens", "resume"),
        _BATCH: ("seq_len", "tokens", "batch_tokens", "batch_size"),
        _DEVICES: ("device.nproc", *_CHIP_SETTINGS),
    },
}


def get_common_settings(command: str) -> Tasks:
    """Return the common settings of a command by task; empty where it has so few that all are listed."""
    return _COMMON_SETTINGS.get(command, {})


def count_further_settings(command: str) -> int:
    """Return how many settings of a command are not among the common ones; 0 where all are listed."""
    tasks = get_common_settings(command)
    if not tasks:
        return 0
    num_shown = sum(len(keys) for keys in tasks.values())
    return len(list(validation.iter_settings(command_table.COMMANDS.find_row(command).import_job_class()))) - num_shown


def list_common_commands() -> list[str]:
    """Return the commands that have a list of common settings."""
    return list(_COMMON_SETTINGS)


def format_help_command(command: str) -> str:
    """Return the line whose output names every option of a command."""
    return f"anabatic {command} --help" + (" --all" if count_further_settings(command) else "")
