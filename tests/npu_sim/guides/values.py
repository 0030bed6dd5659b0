"""Settings that rows name, with the values that the guides give them, each put on a command of its chapter."""

from __future__ import annotations

from typing import Any

from anabatic.cli import command_tree, job_command
from anabatic.config.loading import command_table, settings, validation
from anabatic.core.errors import ConfigError
from npu_sim.guides.page import Chapter, words_of
from npu_sim.guides.small import with_option

VALUES = {
    "trajectory": {
        "batch.micro_batch_tokens": "3072", "batch.global_batch_tokens": "24576", "optim.lr": "1e-5",
        "batch.seq_len": "512", "device.dtype": "bf16", "model.recompute": "full", "optim.name": "adamw",
        "out": "qwen_trajectory_model_npu",
    },
    "nanochat": {
        "model.depth": "12", "batch.micro_batch_tokens": "32768", "batch.global_batch_tokens": "262144",
        "batch.seq_len": "2048", "examples_per_step": "16", "device.compile": "off",
    },
    "32b": {
        "parallel.deepspeed": "ds_config_zero3.json", "data.train": "rows.json", "curriculum.field": "difficulty",
        "parallel.strategy": "zero3", "parallel.offload": "cpu", "batch.micro_batch_tokens": "4096",
        "batch.global_batch_tokens": "262144", "curriculum.use": "true", "seed": "42", "lora.r": "64",
        "lora.alpha": "128", "lora.dropout": "0.05", "lora.target_modules": "q_proj", "optim.lr": "2e-5",
        "schedule.epochs": "3", "batch.seq_len": "2048", "schedule.warmup_ratio": "0.03", "optim.weight_decay": "0.01",
    },
    "vessel": {
        "data.train": "train_dataset_demo.jsonl", "model.path": "runs/vessel-words", "model.depth": "2",
        "batch.rows": "64", "device.dtype": "bf16", "batch.global_batch_tokens": "8192", "device.nproc": "8",
        "model": "runs/vessel", "inputs": "test_data.jsonl", "out": "predictions.jsonl", "batch_tokens": "32768",
    },
    "swift": {
        "model": "Qwen/Qwen1.5-7B-Chat", "data.train": "rows.jsonl", "schedule.epochs": "5", "tuner": "lora",
        "out": "output", "device.nproc": "4", "parallel.deepspeed": "default-zero3",
        "ckpt_dir": "output/checkpoint-100", "inputs": "rows.jsonl",
    },
}  # fmt: skip
"""Chapter -> setting -> value as typed."""


def accepted(chapter: Chapter, key: str) -> list[str]:
    """Return the commands of the chapter that take the setting with the guide's value, put on their own lines.

    Raises:
        ConfigError: all that have it refuse the value.
    """
    value = VALUES[chapter.name][key]
    found, refused = [], ConfigError(f"no command of {chapter.name} has {key}", "")
    for line in chapter.lines:
        words = words_of(line)
        name = max(
            (one for one in command_table.COMMANDS if words[: len(one.split())] == one.split()), key=len, default=""
        )
        hints = (
            dict(validation.iter_settings(command_table.COMMANDS.find_row(name).import_job_class()))
            if name not in ("", "run")
            else {}
        )
        if key not in hints or (key == command_table.COMMANDS.find_row(name).positional_setting and value not in words):
            continue
        try:
            job = parse(name, _given(name, words, key, value, hints[key]))
        except ConfigError as error:
            refused = error
            continue
        assert leaf(job, key) == validation.convert_value(
            validation.UntypedText(value), hints[key], validation.OptionNamer(), (key,)
        ), (line, key)
        found.append(name)
    if not found:
        raise refused
    return found


def _given(name: str, words: list[str], key: str, value: str, hint: Any) -> list[str]:
    """Return the words with the setting: as a bare word, a switch, by the short name that the line has, or its own."""
    row, option = command_table.COMMANDS.find_row(name), "--" + key.replace("_", "-")
    if key == row.positional_setting:
        return words
    if hint is bool:
        return [*words, f"{option}={value}"]
    short = [one for one in row.option_aliases.get(key, "").split() if one in words]
    return with_option(words, (short or [option])[0], value)


def parse(name: str, words: list[str]) -> Any:
    """Return the job that a command line asks for."""
    _, line = command_tree.parse_command(name, words[len(name.split()) :])
    options = job_command.read_job_options(name, line)
    return settings.load_job(name, options.files, options.tree)


def leaf(job: Any, key: str) -> Any:
    """Return the value of a dotted setting."""
    for name in key.split("."):
        job = getattr(job, name)
    return job
