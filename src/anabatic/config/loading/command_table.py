"""The commands that run a job: name -> settings, recipe and help line. Modules are named, not imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from anabatic.config.loading.command_package import (
    DATA_ALIASES,
    DEVICE_ALIASES,
    MODEL_FILES,
    TRAIN_ALIASES,
    Command,
    CommandTable,
    import_attribute,
    load_packages,
)
from anabatic.core.errors import ConfigError


def find_training_command(tree: Mapping[str, Any]) -> Command | None:
    """Return the training command whose settings a `config.yaml` has, all of them and no other; None: none has."""
    for command in COMMANDS.values():
        if command.is_training and {one.name for one in fields(command.import_job_class())} == set(tree):
            return command
    return None


def import_served_classifier() -> Callable[..., Any]:
    """Import and return the class of what `serve --classifier` loads: `(folder, device settings)` -> a classifier.

    Raises:
        ConfigError: no installed package of commands has one.
    """
    path = next((package.served_classifier for package in load_packages() if package.served_classifier), "")
    if not path:
        raise ConfigError("no installed package serves classifiers", "pip install --force-reinstall anabatic")
    loaded: Callable[..., Any] = import_attribute(path)
    return loaded


_COMMAND_ROWS = (
    Command(
        "tokenizer train",
        "anabatic.config.tokenizer:TokenizerTrainJob",
        "anabatic.recipes.tokenizer_commands:run_tokenizer_train",
        "Train a byte-level BPE tokenizer.",
        output_files=("tokenizer.json", "tokenizer_config.json"),
        option_aliases=DATA_ALIASES,
    ),
    Command(
        "tokenizer eval",
        "anabatic.config.tokenizer:TokenizerEvalJob",
        "anabatic.recipes.tokenizer_commands:run_tokenizer_eval",
        "Compare how well tokenizers compress.",
        option_aliases=DATA_ALIASES,
    ),
    Command(
        "pretrain",
        "anabatic.config.pretrain:PretrainJob",
        "anabatic.recipes.training.pretrain:run",
        "Train a language model on text, or continue one on a mixture.",
        is_training=True,
        output_files=MODEL_FILES,
        option_aliases=TRAIN_ALIASES,
    ),
    Command(
        "sft",
        "anabatic.config.sft:SftJob",
        "anabatic.recipes.training.sft:run",
        "Fine-tune a language model on conversations.",
        is_training=True,
        output_files=MODEL_FILES,
        option_aliases=TRAIN_ALIASES,
    ),
    Command(
        "dpo",
        "anabatic.config.dpo:DpoJob",
        "anabatic.recipes.training.dpo:run",
        "Train a language model on preferences: pairs of a better and a worse answer.",
        is_training=True,
        output_files=MODEL_FILES,
        option_aliases=TRAIN_ALIASES,
    ),
    Command(
        "rl",
        "anabatic.config.rl:RlJob",
        "anabatic.recipes.training.rl:run",
        "Reinforcement learning: reward what a language model answers.",
        is_training=True,
        output_files=MODEL_FILES,
        option_aliases={**TRAIN_ALIASES, "model": "-m", "examples_per_step": "--target-examples-per-step"},
    ),
    Command(
        "reward",
        "anabatic.config.reward:RewardJob",
        "anabatic.recipes.training.reward_model:run",
        "Train a reward model on preferences: how good is an answer?",
        is_training=True,
        output_files=MODEL_FILES,
        option_aliases=TRAIN_ALIASES,
    ),
    Command(
        "data preview",
        "anabatic.config.data_commands:DataPreviewJob",
        "anabatic.recipes.data_preview:run",
        "Show the first rows of data, as the model sees them.",
        option_aliases={"model": "-m"},
        positional_setting="inputs",
    ),
    Command(
        "data stats",
        "anabatic.config.data_commands:DataStatsJob",
        "anabatic.recipes.data_stats:run",
        "Measure data: rows, lengths, languages, duplicates.",
        option_aliases={"model": "-m"},
        positional_setting="inputs",
    ),
    Command(
        "data check",
        "anabatic.config.data_commands:DataCheckJob",
        "anabatic.recipes.data_check:run",
        "Check data for bad rows, duplicates and leaks into the held-out rows.",
        option_aliases={"data.valid": "--held-out"},
        positional_setting="inputs",
    ),
    Command(
        "data tokenize",
        "anabatic.config.data_commands:DataTokenizeJob",
        "anabatic.recipes.data_tokenize:run",
        "Tokenise text before a training, here or on a Ray cluster.",
        positional_setting="inputs",
    ),
    Command(
        "vision draw",
        "anabatic.config.vision_commands:VisionDrawJob",
        "anabatic.recipes.vision.draw:run",
        "Draw pictures with questions about them.",
        output_files=("train.jsonl", "held_out.jsonl"),
        option_aliases={"out": "-o"},
        optional_packages=("PIL",),
    ),
    Command(
        "vision build",
        "anabatic.config.vision_commands:VisionBuildJob",
        "anabatic.recipes.vision.build:run",
        "Build a small untrained model that sees.",
        output_files=("config.json", "tokenizer.json"),
        option_aliases={"out": "-o"},
    ),
    Command(
        "vision score",
        "anabatic.config.vision_commands:VisionScoreJob",
        "anabatic.recipes.vision.score:run",
        "Score answers about pictures, beside those without the pictures.",
        output_files=("eval.json",),
        option_aliases={"out": "-o"},
    ),
    Command(
        "merge",
        "anabatic.config.export:MergeJob",
        "anabatic.recipes.export.merge:run",
        "Merge an adapter into its base model.",
        output_files=("config.json", "tokenizer.json"),
        option_aliases={"model": "-m"},
        positional_setting="model",
    ),
    Command(
        "push",
        "anabatic.config.export:PushJob",
        "anabatic.recipes.export.push:run",
        "Upload a model to Hugging Face or ModelScope, with a model card.",
        option_aliases={"model": "-m"},
        positional_setting="model",
    ),
    Command(
        "export",
        "anabatic.config.export:ExportJob",
        "anabatic.recipes.export.model_folder:run",
        "Write a model, adapters merged, for other programs to load and serve.",
        output_files=("config.json", "tokenizer.json"),
        option_aliases={"out": "-o"},
        positional_setting="model",
    ),
    Command(
        "checkpoint export",
        "anabatic.config.export:CheckpointExportJob",
        "anabatic.recipes.export.run_checkpoint:run",
        "Make a model or adapter folder of a checkpoint.",
        output_files=("tokenizer.json",),
        option_aliases={"out": "-o"},
        positional_setting="checkpoint",
    ),
    Command(
        "eval",
        "anabatic.config.evaluate:EvalJob",
        "anabatic.recipes.evaluate:run",
        "Measure a model: bits per byte, tasks compared with a baseline.",
        output_files=("eval.json",),
        option_aliases=DEVICE_ALIASES,
        positional_setting="model",
    ),
    Command(
        "infer",
        "anabatic.config.infer:InferJob",
        "anabatic.recipes.batch_inference:run",
        "Generate answers for the rows of files.",
        option_aliases={"model": "-m", "out": "-o", "device.nproc": "--nproc", "inputs": "--data"},
        positional_setting="inputs",
    ),
    Command(
        "serve",
        "anabatic.config.serve:ServeJob",
        "anabatic.recipes.serve:run",
        "Answer over HTTP, as OpenAI's API does.",
        positional_setting="model",
        optional_packages=("fastapi", "uvicorn", "httptools", "prometheus_client"),
    ),
    Command(
        "chat",
        "anabatic.config.chat:ChatJob",
        "anabatic.recipes.chat.session:run",
        "Talk to a model in the terminal.",
        option_aliases={"model": "-m", "prompt": "-p"},
        positional_setting="model",
    ),
    Command(
        "bench infer",
        "anabatic.config.bench:BenchInferJob",
        "anabatic.bench.inference_throughput:run",
        "Measure how fast a model answers.",
        output_files=("bench.json",),
        option_aliases={"model": "-m", "out": "-o"},
    ),
    Command(
        "bench tokenize",
        "anabatic.config.bench:BenchTokenizeJob",
        "anabatic.bench.tokenizer_throughput:run",
        "Measure how fast text becomes tokens.",
        output_files=("bench.json",),
        option_aliases={"out": "-o", "data.train": "--data"},
    ),
    Command(
        "bench collective",
        "anabatic.config.bench:BenchCollectiveJob",
        "anabatic.bench.collective_bandwidth:run",
        "Measure how fast processes exchange tensors.",
        output_files=("bench.json",),
        option_aliases={"out": "-o", "device.nproc": "--nproc --npus"},
    ),
    Command(
        "bench io",
        "anabatic.config.bench:BenchIoJob",
        "anabatic.bench.disk_io:run",
        "Measure how fast models, checkpoints and batches are written and read.",
        output_files=("bench.json",),
        option_aliases={"model": "-m", "out": "-o"},
    ),
    Command(
        "run",
        "anabatic.config.pipeline:PipelineJob",
        "anabatic.recipes.pipeline.runner:run",
        "Run a pipeline: named stages, finished ones are skipped.",
    ),
)

COMMANDS = CommandTable(_COMMAND_ROWS, lambda package: package.commands)
