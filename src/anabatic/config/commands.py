"""The commands that run a job: name -> settings, recipe and help line. Modules are named, not imported."""

from __future__ import annotations

import gc
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabatic.core.errors import ConfigError
from anabatic.core.text import did_you_mean


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
    trains: bool = False
    """It writes `summary.json` with `"finished": true` only when it came to its end."""
    makes: tuple[str, ...] = ()
    """Files under its `out` that later jobs read."""
    short: dict[str, str] = field(default_factory=dict)
    """Dotted key -> shorter names of its option, with blanks between them."""
    words: str = ""
    """The setting that words without an option fill: `classify words FILE FILE`; one word if it is no list."""
    extra: str = ""
    """The extra of the package without which nothing of it works."""

    def job_class(self) -> type:
        """Import and return the dataclass of the command's settings."""
        loaded: type = _attribute(self.config)
        return loaded

    def recipe_function(self) -> Callable[..., Any]:
        """Import and return the function that runs the job; this is where heavy libraries come in.

        Imports make 650,000 objects that stay; to walk them again and again took a tenth of a start.

        Raises:
            ConfigError: a package of `extra` is not installed.
        """
        for name in _EXTRAS.get(self.extra, ()):
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"anabatic {self.name} needs {name}, which is not installed",
                    f"pip install 'anabatic[{self.extra}]'",
                )
        collects = gc.isenabled()
        gc.disable()
        try:
            loaded: Callable[..., Any] = _attribute(self.recipe)
        finally:
            if collects:
                gc.freeze()
                gc.enable()
        return loaded


_EXTRAS = {"serve": ("fastapi", "uvicorn", "prometheus_client")}
"""Extra -> what of it is imported."""


def _attribute(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


_DATA = {"data.train": "--data"}
"""Of commands that read text."""
_SHORT = {**_DATA, "device.nproc": "--nproc --npus"}
"""Of commands that train, and of `eval`."""
_MODELS = ("best_model/tokenizer.json", "final_model/tokenizer.json")

_ROWS = (
    Command(
        "tokenizer train",
        "anabatic.config.tokenizer:TokenizerTrainJob",
        "anabatic.recipes.tokenizer:run_train",
        "Train a byte-level BPE tokenizer.",
        makes=("tokenizer.json", "tokenizer_config.json"),
        short=_DATA,
    ),
    Command(
        "tokenizer eval",
        "anabatic.config.tokenizer:TokenizerEvalJob",
        "anabatic.recipes.tokenizer:run_eval",
        "Compare how well tokenizers compress.",
        short=_DATA,
    ),
    Command(
        "pretrain",
        "anabatic.config.pretrain:PretrainJob",
        "anabatic.recipes.pretrain:run",
        "Train a language model on text, or continue one on a mixture.",
        trains=True,
        makes=_MODELS,
        short=_SHORT,
    ),
    Command(
        "sft",
        "anabatic.config.sft:SftJob",
        "anabatic.recipes.sft:run",
        "Fine-tune a language model on conversations.",
        trains=True,
        makes=_MODELS,
        short=_SHORT,
    ),
    Command(
        "dpo",
        "anabatic.config.dpo:DpoJob",
        "anabatic.recipes.dpo:run",
        "Train a language model on preferences: pairs of a better and a worse answer.",
        trains=True,
        makes=_MODELS,
        short=_SHORT,
    ),
    Command(
        "rl",
        "anabatic.config.rl:RlJob",
        "anabatic.recipes.rl:run",
        "Reinforcement learning: reward what a language model answers.",
        trains=True,
        makes=_MODELS,
        short={**_SHORT, "model": "-m", "examples_per_step": "--target-examples-per-step"},
    ),
    Command(
        "reward",
        "anabatic.config.reward:RewardJob",
        "anabatic.recipes.reward:run",
        "Train a reward model on preferences: how good is an answer?",
        trains=True,
        makes=_MODELS,
        short=_SHORT,
    ),
    Command(
        "classify words",
        "anabatic.config.classify_words:ClassifyWordsJob",
        "anabatic.recipes.classify_words:run",
        "Turn AIS files into rows of words.",
        short={"out": "-o"},
        words="inputs",
    ),
    Command(
        "classify pretrain",
        "anabatic.config.classify_train:ClassifyPretrainJob",
        "anabatic.recipes.classify_pretrain:run",
        "Train a model on words of vessel trajectories, before it learns classes.",
        trains=True,
        makes=_MODELS,
        short={**_SHORT, "model.depth": "--depth"},
    ),
    Command(
        "classify train",
        "anabatic.config.classify_train:ClassifyTrainJob",
        "anabatic.recipes.classify_train:run",
        "Train a classifier of vessel trajectories.",
        trains=True,
        makes=("best_model/classifier.json", "final_model/classifier.json"),
        short={**_SHORT, "model.depth": "--depth"},
    ),
    Command(
        "classify predict",
        "anabatic.config.classify_predict:ClassifyPredictJob",
        "anabatic.recipes.classify_predict:run",
        "Say which class segments and vessels belong to.",
        short={"model": "-m", "out": "-o", "inputs": "--data"},
        words="inputs",
    ),
    Command(
        "classify eval",
        "anabatic.config.classify_eval:ClassifyEvalJob",
        "anabatic.recipes.classify_eval:run",
        "Score a classifier per segment and per vessel, beside what it must beat.",
        makes=("eval.json",),
        short={"model": "-m"},
    ),
    Command(
        "classify map",
        "anabatic.config.classify_map:ClassifyMapJob",
        "anabatic.recipes.classify_map:run",
        "Draw vessels on a map, coloured by their class, errors marked.",
        short={"out": "-o"},
        words="inputs",
    ),
    Command(
        "merge",
        "anabatic.config.merge:MergeJob",
        "anabatic.recipes.merge:run",
        "Make one model of an adapter and the model it is for.",
        makes=("config.json", "tokenizer.json"),
        short={"model": "-m"},
        words="model",
    ),
    Command(
        "export",
        "anabatic.config.export:ExportJob",
        "anabatic.recipes.export:run",
        "Write a model, adapters merged, for other programs to load and serve.",
        makes=("config.json", "tokenizer.json"),
        short={"out": "-o"},
        words="model",
    ),
    Command(
        "checkpoint export",
        "anabatic.config.checkpoint_export:CheckpointExportJob",
        "anabatic.recipes.checkpoint_export:run",
        "Make a model or adapter folder of a checkpoint.",
        makes=("tokenizer.json",),
        short={"out": "-o"},
        words="checkpoint",
    ),
    Command(
        "eval",
        "anabatic.config.evaluate:EvalJob",
        "anabatic.recipes.evaluate:run",
        "Measure a model: bits per byte, tasks beside chance.",
        makes=("eval.json",),
        short=_SHORT,
        words="model",
    ),
    Command(
        "infer",
        "anabatic.config.infer:InferJob",
        "anabatic.recipes.infer:run",
        "Answer the rows of files.",
        short={"model": "-m", "out": "-o", "device.nproc": "--nproc", "inputs": "--data"},
        words="inputs",
    ),
    Command(
        "serve",
        "anabatic.config.serve:ServeJob",
        "anabatic.recipes.serve:run",
        "Answer over HTTP, as OpenAI's API does.",
        words="model",
        extra="serve",
    ),
    Command(
        "chat",
        "anabatic.config.chat:ChatJob",
        "anabatic.recipes.chat:run",
        "Talk to a model in the terminal.",
        short={"model": "-m", "prompt": "-p"},
        words="model",
    ),
    Command(
        "bench infer",
        "anabatic.config.bench:BenchInferJob",
        "anabatic.bench.infer:run",
        "Measure how fast a model answers.",
        makes=("bench.json",),
        short={"model": "-m", "out": "-o"},
    ),
    Command(
        "bench tokenize",
        "anabatic.config.bench:BenchTokenizeJob",
        "anabatic.bench.tokenizing:run",
        "Measure how fast text becomes tokens.",
        makes=("bench.json",),
        short={"out": "-o", "data.train": "--data"},
    ),
    Command(
        "bench collective",
        "anabatic.config.bench:BenchCollectiveJob",
        "anabatic.bench.collective:run",
        "Measure how fast processes exchange tensors.",
        makes=("bench.json",),
        short={"out": "-o", "device.nproc": "--nproc --npus"},
    ),
    Command(
        "bench io",
        "anabatic.config.bench:BenchIoJob",
        "anabatic.bench.disk:run",
        "Measure how fast models, checkpoints and batches are written and read.",
        makes=("bench.json",),
        short={"model": "-m", "out": "-o"},
    ),
    Command(
        "run",
        "anabatic.config.pipeline:PipelineJob",
        "anabatic.recipes.pipeline:run",
        "Run a pipeline: named stages, finished ones are skipped.",
    ),
)

COMMANDS: dict[str, Command] = {row.name: row for row in _ROWS}


def name_of(job: Any) -> str:
    """Return the command whose settings `job` is."""
    return next(row.name for row in _ROWS if row.config.endswith(f":{type(job).__name__}"))


def get(name: str) -> Command:
    """Return the command called `name`.

    Raises:
        ConfigError: there is none.
    """
    if name not in COMMANDS:
        hint = f"commands: {', '.join(COMMANDS)}"
        raise ConfigError(f'unknown command "{name}".{did_you_mean(name, COMMANDS)}', hint)
    return COMMANDS[name]
