"""What the commands that train have in common: settings, and the checks of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.sections.common import (
    BatchSettings,
    Data,
    DeviceSettings,
    Evaluate,
    LogSettings,
    Optim,
    Save,
    Schedule,
    require_setting,
)
from anabatic.config.sections.parallel import Parallel, Recompute
from anabatic.config.sections.tuner import Freeze, Lora


@dataclass(kw_only=True)
class LoopJob:
    """What the training loop needs, whatever is trained on."""

    out: str = "runs/train"
    """Run folder."""
    seed: int = 0
    """Seed of the data order."""
    fused: Literal["auto", "off"] = "auto"
    """Fused operators where a module is proved to compute the same; off: transformers' own, packed anyway."""
    parallel: Parallel = field(default_factory=Parallel)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optim: Optim = field(default_factory=Optim)
    schedule: Schedule = field(default_factory=Schedule)
    eval: Evaluate = field(default_factory=Evaluate)
    save: Save = field(default_factory=Save)
    log: LogSettings = field(default_factory=LogSettings)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        require_setting(bool(self.out.strip()), "out is empty", "give --out FOLDER")
        require_setting(0 <= self.seed < 2**63, f"seed is {self.seed}", "use a whole number from 0")
        goes_back = self.optim.on_bad_step == "rewind"
        what = "optim.on_bad_step is rewind, but save.every is 0: there is no checkpoint to go back to"
        require_setting(not goes_back or self.save.every > 0, what, "give --save.every STEPS")


@dataclass(kw_only=True)
class _OnText:
    """The data come first in help and templates: a dataclass lists the fields of its last base first."""

    data: Data = field(default_factory=Data)


@dataclass(kw_only=True)
class WithAuto:
    """A training whose way and sizes the plan can choose."""

    auto: bool = False
    """Take strategy, recomputation, offload and micro-batch from the plan where they are left open, and try two steps;
    out of memory: start again with half the micro-batch and the same global batch."""


@dataclass(kw_only=True)
class TrainJob(LoopJob, _OnText):
    """A training on text or conversations."""

    tokenizer: str | None = None
    """Folder with tokenizer.json; default: the one of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        held_out = bool(self.data.valid) or self.data.valid_fraction > 0
        patience = self.eval.patience
        hint = "name sources in data.valid, or raise data.valid_fraction"
        require_setting(not patience or held_out, f"eval.patience is {patience}, but nothing is held out", hint)


def _default_optim() -> Optim:
    return Optim(name="adamw", weight_decay=0.0, beta2=0.999, eps=1e-8)


@dataclass(kw_only=True)
class TuneJob(TrainJob):
    """The training of a model that is there."""

    model: str = ""
    """Hugging Face folder of the model, with its tokenizer and chat template; or OWNER/NAME on a hub."""
    hub: Literal["huggingface", "modelscope"] | None = None
    """Where OWNER/NAME lies; default: ANABATIC_HUB, modelscope with USE_MODELSCOPE_HUB=1, else huggingface."""
    adapter: list[str] = field(default_factory=list)
    """Adapters that become part of the weights first, one after the other: FOLDER, or FOLDER@0.5 to count by half."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name: chatml, llama3, qwen2.5, qwen3,
    mistral, deepseek, gemma, glm4, phi3, phi4, llama2."""
    tuner: Literal["auto", "full", "lora", "freeze"] = "auto"
    """full: train all weights; lora: adapters; freeze: the last blocks; auto: full, but an adapter as model goes on
    as one."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Frozen weights of linear layers in 8 bits, or in 4 (QLoRA, arXiv 2305.14314), while adapters are trained."""
    lora: Lora = field(default_factory=Lora)
    freeze: Freeze = field(default_factory=Freeze)
    recompute: Recompute = "none"
    """Activation checkpointing: selective keeps matrix products and attention, full only the blocks' inputs."""
    optim: Optim = field(default_factory=_default_optim)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(
            bool(self.model), "model is not given", "give --model FOLDER, a Hugging Face folder, or OWNER/NAME"
        )
        if self.quantize != "none":
            self._require_adapters()

    def _require_adapters(self) -> None:
        """What is packed is neither trained nor changed."""
        what = f"quantize is {self.quantize}"
        fits = self.tuner in ("auto", "lora")
        require_setting(fits, f"{what}, tuner is {self.tuner}", "packed weights are not trained: use --tuner lora")
        require_setting(not self.lora.use_dora, f"{what}, lora.use_dora is on", "leave one of them out")
        require_setting(
            self.lora.init != "pissa", f"{what}, lora.init is pissa, which changes the weights", "use default"
        )
        require_setting(not self.adapter, f"{what}, adapter is given", "merge it first with `anabatic merge`")
