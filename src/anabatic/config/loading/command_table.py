"""The commands that run a job: name -> settings, recipe and help line. Modules are named, not imported."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from anabatic.core import extras
from anabatic.core.errors import ConfigError, UserError
from anabatic.core.formatting import did_you_mean
from anabatic.core.imports import quick_imports


@dataclass(frozen=True)
class Command:
    """One row of the table."""

    name: str
    """Words as typed, for example `tokenizer train`."""
    config: str
    """`module:class` of its settings."""
    recipe: str
    """`module:function` that runs the job."""
    help: str
    """One line."""
    is_training: bool = False
    """It writes `summary.json` with `"finished": true` only when it came to its end."""
    output_files: tuple[str, ...] = ()
    """Files under its `out` that later jobs read."""
    option_aliases: dict[str, str] = field(default_factory=dict)
    """Dotted key -> shorter names of its option, with blanks between them."""
    positional_setting: str = ""
    """The setting that words without an option fill: `classify words FILE FILE`; one word if it is no list."""
    optional_packages: tuple[str, ...] = ()
    """Modules of `core/extras.py` without which nothing of it works."""
    precheck: str = ""
    """`module:function` that yields what is wrong with its files, where its rows are not text: called with the settings
    and a function that is true for outputs of earlier stages, before anything heavy is imported."""

    def import_job_class(self) -> type:
        """Import and return the dataclass of the command's settings."""
        loaded: type = _import_attribute(self.config)
        return loaded

    def import_recipe_function(self) -> Callable[..., Any]:
        """Import and return the function that runs the job; this is where heavy libraries come in.

        Imports make 650,000 objects that stay; to walk them again and again took a tenth of a start.

        Raises:
            ConfigError: one of `optional_packages` is not installed.
        """
        collects = gc.isenabled()
        gc.disable()
        quick_imports.install_quick_imports()
        try:
            for name in self.optional_packages:
                extras.import_optional(name, f"anabatic {self.name}")
            loaded: Callable[..., Any] = _import_attribute(self.recipe)
        finally:
            if collects:
                gc.freeze()
                gc.enable()
        return loaded


def find_training_command(tree: Mapping[str, Any]) -> Command | None:
    """Return the training command whose settings a `config.yaml` has, all of them and no other; None: none has."""
    for command in COMMANDS.values():
        if command.is_training and {one.name for one in fields(command.import_job_class())} == set(tree):
            return command
    return None


def import_precheck(command: str) -> Callable[[Any, Callable[[str], bool]], Iterator[UserError]] | None:
    """Import and return the check of a command's own files; None where it reads text as others do."""
    row = COMMANDS.get(command)
    found: Callable[[Any, Callable[[str], bool]], Iterator[UserError]] | None
    found = _import_attribute(row.precheck) if row is not None and row.precheck else None
    return found


def import_served_classifier() -> Callable[..., Any]:
    """Import and return the class of what `serve --classifier` loads: `(folder, device settings)` -> a classifier."""
    loaded: Callable[..., Any] = _import_attribute("anabatic.vessels.model.trajectory_classifier:TrajectoryClassifier")
    return loaded


def _import_attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_DATA_ALIASES = {"data.train": "--data"}
"""Of commands that read text."""
_DEVICE_ALIASES = {**_DATA_ALIASES, "device.nproc": "--nproc --npus"}
"""Of commands that run on several devices."""
_TRAIN_ALIASES = {**_DEVICE_ALIASES, "schedule.minutes": "--minutes"}
"""Of commands that train."""
_VESSEL_PRECHECK = "anabatic.vessels.commands.prechecks:check_vessel_files"
_MODEL_FILES = ("best_model/tokenizer.json", "final_model/tokenizer.json")

_COMMAND_ROWS = (
    Command(
        "tokenizer train",
        "anabatic.config.tokenizer:TokenizerTrainJob",
        "anabatic.recipes.tokenizer_commands:run_tokenizer_train",
        "Train a byte-level BPE tokenizer.",
        output_files=("tokenizer.json", "tokenizer_config.json"),
        option_aliases=_DATA_ALIASES,
    ),
    Command(
        "tokenizer eval",
        "anabatic.config.tokenizer:TokenizerEvalJob",
        "anabatic.recipes.tokenizer_commands:run_tokenizer_eval",
        "Compare how well tokenizers compress.",
        option_aliases=_DATA_ALIASES,
    ),
    Command(
        "pretrain",
        "anabatic.config.pretrain:PretrainJob",
        "anabatic.recipes.training.pretrain:run",
        "Train a language model on text, or continue one on a mixture.",
        is_training=True,
        output_files=_MODEL_FILES,
        option_aliases=_TRAIN_ALIASES,
    ),
    Command(
        "sft",
        "anabatic.config.sft:SftJob",
        "anabatic.recipes.training.sft:run",
        "Fine-tune a language model on conversations.",
        is_training=True,
        output_files=_MODEL_FILES,
        option_aliases=_TRAIN_ALIASES,
    ),
    Command(
        "dpo",
        "anabatic.config.dpo:DpoJob",
        "anabatic.recipes.training.dpo:run",
        "Train a language model on preferences: pairs of a better and a worse answer.",
        is_training=True,
        output_files=_MODEL_FILES,
        option_aliases=_TRAIN_ALIASES,
    ),
    Command(
        "rl",
        "anabatic.config.rl:RlJob",
        "anabatic.recipes.training.rl:run",
        "Reinforcement learning: reward what a language model answers.",
        is_training=True,
        output_files=_MODEL_FILES,
        option_aliases={**_TRAIN_ALIASES, "model": "-m", "examples_per_step": "--target-examples-per-step"},
    ),
    Command(
        "reward",
        "anabatic.config.reward:RewardJob",
        "anabatic.recipes.training.reward_model:run",
        "Train a reward model on preferences: how good is an answer?",
        is_training=True,
        output_files=_MODEL_FILES,
        option_aliases=_TRAIN_ALIASES,
    ),
    Command(
        "classify words",
        "anabatic.config.vessels.tracks:ClassifyWordsJob",
        "anabatic.vessels.commands.write_words:run",
        "Turn AIS files into rows of words.",
        option_aliases={"out": "-o"},
        positional_setting="inputs",
        precheck=_VESSEL_PRECHECK,
    ),
    Command(
        "classify pretrain",
        "anabatic.config.vessels.train:ClassifyPretrainJob",
        "anabatic.vessels.commands.pretrain_words:run",
        "Train a model on words of vessel trajectories, before it learns classes.",
        is_training=True,
        output_files=_MODEL_FILES,
        option_aliases={**_TRAIN_ALIASES, "model.depth": "--depth"},
        precheck=_VESSEL_PRECHECK,
    ),
    Command(
        "classify train",
        "anabatic.config.vessels.train:ClassifyTrainJob",
        "anabatic.vessels.commands.train_classifier:run",
        "Train a classifier of vessel trajectories.",
        is_training=True,
        output_files=("best_model/classifier.json", "final_model/classifier.json"),
        option_aliases={**_TRAIN_ALIASES, "model.depth": "--depth"},
        precheck=_VESSEL_PRECHECK,
    ),
    Command(
        "classify predict",
        "anabatic.config.vessels.predict:ClassifyPredictJob",
        "anabatic.vessels.commands.predict_classes:run",
        "Say which class segments and vessels belong to.",
        option_aliases={"model": "-m", "out": "-o", "inputs": "--data"},
        positional_setting="inputs",
        precheck=_VESSEL_PRECHECK,
    ),
    Command(
        "classify eval",
        "anabatic.config.vessels.evaluate:ClassifyEvalJob",
        "anabatic.vessels.commands.evaluate_classifier:run",
        "Score a classifier per segment and per vessel, compared with baselines.",
        output_files=("eval.json",),
        option_aliases={"model": "-m"},
        precheck=_VESSEL_PRECHECK,
    ),
    Command(
        "classify map",
        "anabatic.config.vessels.draw_map:ClassifyMapJob",
        "anabatic.vessels.commands.draw_map:run",
        "Draw vessels on a map, coloured by their class, errors marked.",
        option_aliases={"out": "-o"},
        positional_setting="inputs",
        precheck=_VESSEL_PRECHECK,
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
        "Measure a model: bits per byte, tasks compared with chance.",
        output_files=("eval.json",),
        option_aliases=_DEVICE_ALIASES,
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
        "studio",
        "anabatic.config.studio:StudioJob",
        "anabatic.studio.server:run",
        "Train, compare and try models in the browser.",
        positional_setting="runs",
        optional_packages=("fastapi", "uvicorn", "httptools"),
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

COMMANDS: dict[str, Command] = {row.name: row for row in _COMMAND_ROWS}


def command_name(job: Any) -> str:
    """Return the command whose settings `job` is."""
    return next(row.name for row in _COMMAND_ROWS if row.config.endswith(f":{type(job).__name__}"))


def get_command(name: str) -> Command:
    """Return the command called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in COMMANDS:
        hint = f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f'unknown command "{name}".{did_you_mean(name, COMMANDS)}', hint)
    return COMMANDS[name]
