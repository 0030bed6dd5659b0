"""Settings that the training commands share: what is trained (adapters, frozen blocks), curriculum, loop; and their
checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from dataclasses import field as setting
from typing import Any, Literal

from anabatic.config.sections.common import (
    BatchSettings,
    Data,
    DeviceSettings,
    Evaluate,
    LogSettings,
    Optim,
    Parallel,
    Recompute,
    Save,
    Schedule,
    require_setting,
)
from anabatic.config.sections.plan_facts import PlanFacts

MODEL_PARTS = ("language", "projector", "tower")
"""Parts of a model that sees."""


@dataclass(kw_only=True)
class CurriculumStage:
    """A part of the training with its own mixture."""

    until: float = 1.0
    """Share of the training at which the stage ends."""
    mix: dict[str, float] = setting(default_factory=dict)
    """Level -> share of the samples; they sum to 1."""


def _default_stages() -> list[CurriculumStage]:
    return [
        CurriculumStage(until=0.3, mix={"explain": 0.8, "reasoning": 0.2}),
        CurriculumStage(until=0.7, mix={"explain": 0.4, "reasoning": 0.4, "topology": 0.2}),
        CurriculumStage(until=1.0, mix={"explain": 0.25, "reasoning": 0.35, "topology": 0.4}),
    ]


@dataclass(kw_only=True)
class Curriculum:
    """Curriculum learning: samples are drawn by level, and the shares of the levels change in stages."""

    use: bool = False
    """Switch it on. Without the field in the data the training is an ordinary one, with a warning."""
    by: Literal["field", "length", "loss"] = "field"
    """field: a column of the rows names the level; length, loss: levels of equal size, shortest rows first, or those
    first that the model finds easiest before the training."""
    field: str = "difficulty"
    """Column with the level."""
    stages: list[CurriculumStage] = setting(default_factory=_default_stages)
    """The stages, first to last; the levels are those that their mixtures name, easiest first."""

    def __post_init__(self) -> None:
        if not self.use:
            return
        require_setting(bool(self.stages), "curriculum.stages is empty", "give at least one stage")
        before = 0.0
        for number, stage in enumerate(self.stages, start=1):
            where = f"curriculum.stages[{number - 1}]"
            fits = before < stage.until <= 1.0
            require_setting(fits, f"{where}.until is {stage.until:g}", f"use a share above {before:g}, at most 1")
            total = sum(stage.mix.values())
            smallest = min(stage.mix.values(), default=0.0)
            require_setting(smallest >= 0.0, f"{where}.mix has the share {smallest:g}", "use shares from 0")
            require_setting(abs(total - 1.0) < 1e-6, f"{where}.mix sums to {total:g}", "make its shares sum to 1")
            before = stage.until
        require_setting(
            abs(before - 1.0) < 1e-9, f"the last stage of curriculum.stages ends at {before:g}", "end it at 1"
        )

    def level_names(self) -> list[str]:
        """Names of the levels in the order in which the stages name them."""
        return list(dict.fromkeys(level for stage in self.stages for level in stage.mix))


@dataclass(kw_only=True)
class Lora:
    """Low-rank adapters, saved in PEFT's format."""

    r: int = 16
    """Rank."""
    alpha: float | None = None
    """The adapter's output is scaled by alpha / r; default: 2 r."""
    dropout: float = 0.0
    """Share of the adapter's inputs that is zeroed in training."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get an adapter, by the end of their name; all-linear: every one but the head. Stacked experts:
    all-experts, or experts.gate_up_proj and experts.down_proj."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved with the adapter, such as embed_tokens and lm_head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) (arXiv 2312.03732)."""
    use_dora: bool = False
    """Also train the length of the weights' rows (arXiv 2402.09353)."""
    init: Literal["default", "pissa"] = "default"
    """default: the adapter begins at zero; pissa: with the weights' largest singular vectors (arXiv 2404.02948)."""

    def __post_init__(self) -> None:
        require_setting(self.r >= 1, f"lora.r is {self.r}", "use a rank from 1; 8 to 64 is common")
        require_setting(self.alpha is None or self.alpha > 0, f"lora.alpha is {self.alpha}", "use a positive number")
        require_setting(
            0.0 <= self.dropout < 1.0, f"lora.dropout is {self.dropout}", "use a share from 0 up to, not including, 1"
        )
        require_setting(bool(self.target_modules), "lora.target_modules is empty", "name layers, or all-linear")
        both = self.use_dora and self.init == "pissa"
        require_setting(not both, "lora.use_dora and lora.init pissa are both set", "use one of them")


@dataclass(kw_only=True)
class Freeze:
    """Train a part of the model, leave the rest as it is."""

    last_layers: int = 2
    """Blocks at the end that are trained."""
    train: list[str] = field(default_factory=list)
    """Regular expressions; parameters whose name matches one of them are trained too."""

    def __post_init__(self) -> None:
        require_setting(self.last_layers >= 0, f"freeze.last_layers is {self.last_layers}", "use 0 or more")
        some = self.last_layers > 0 or bool(self.train)
        require_setting(
            some, "freeze leaves nothing to train", "raise freeze.last_layers, or name parameters in freeze.train"
        )


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

    def get_plan_facts(self) -> PlanFacts:
        """Return what these settings say of memory and time."""
        return PlanFacts()


@dataclass(kw_only=True)
class _OnText:
    """The data come first in help and templates: a dataclass lists the fields of its last base first."""

    data: Data = field(default_factory=Data)


@dataclass(kw_only=True)
class WithAuto:
    """A training whose way and sizes the plan can choose."""

    auto: bool = False
    """Take strategy, recomputation, offload, mesh and micro-batch from the plan where they are left open, and try two
    steps; out of memory: start again with half the micro-batch and the same global batch."""


def is_auto(job: object) -> bool:
    """Return whether the plan chooses what a job leaves open."""
    return isinstance(job, WithAuto) and job.auto


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
class PictureData(Data):
    """Sources as in the section `data` of other commands, and the place of their pictures."""

    media: str | None = None
    """Folder that paths of pictures start from; default: the folder of the rows' file."""


@dataclass(kw_only=True)
class PictureSizes:
    """Sizes of pictures of models that see."""

    max_pixels: int | None = None
    """Larger pictures are made smaller; default: what the model's preprocessor_config.json says."""
    min_pixels: int | None = None
    """Smaller pictures are made larger; default: what the model's preprocessor_config.json says."""
    video_max_pixels: int | None = None
    """Frames of larger videos are made smaller: pixels of one frame for Qwen2.5-VL, else of all shown frames together;
    default: what the model's video_preprocessor_config.json says."""
    fps: float | None = None
    """Frames shown of a second of a video, and that listed frames are of; default: the model's own, 2."""
    max_frames: int | None = None
    """Frames shown of a video at most; default: the model's own."""
    boxes: Literal["tokens", "plain"] = "tokens"
    """Form of Qwen-VL's boxes of the column `objects`: tokens, <|box_start|>(1,2),(3,4)<|box_end|>, or plain,
    [1, 2, 3, 4]."""

    def get_bounds(self) -> dict[str, Any]:
        """Return the settings that replace the model's own sizes, by name."""
        return {each.name: getattr(self, each.name) for each in fields(PictureSizes)}

    def __post_init__(self) -> None:
        low, high = self.min_pixels, self.max_pixels
        numbers = {name: value for name, value in self.get_bounds().items() if name != "boxes"}
        for name, value in numbers.items():
            least = 0 if name == "fps" else 1
            fits = value is None or value >= least and 0 < value < math.inf
            require_setting(fits, f"vision.{name} is {value}", f"use {'more than 0' if name == 'fps' else '1 or more'}")
        fits = low is None or high is None or low <= high
        require_setting(fits, f"vision.min_pixels is {low}, vision.max_pixels is {high}", "swap them")


@dataclass(kw_only=True)
class Vision(PictureSizes):
    """Models that see."""

    train: list[str] = field(default_factory=list)
    """Parts that are trained: language, projector, tower; default: language, and with tuner full the projector too."""
    cache_gib: float = 0.0
    """GiB on the disk, in data.cache, for resized pictures, so that later epochs decode none; 0: nothing is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(0 <= self.cache_gib < 2**30, f"vision.cache_gib is {self.cache_gib}", "use 0 or more")
        self.train = [part.strip() for entry in self.train for part in entry.split(",")]
        unknown = next((part for part in self.train if part not in MODEL_PARTS), None)
        require_setting(unknown is None, f'vision.train names "{unknown}"', f"parts are {', '.join(MODEL_PARTS)}")


@dataclass(kw_only=True)
class TuneJob(TrainJob):
    """The training of a model that is there."""

    model: str = ""
    """Hugging Face folder of the model, with its tokenizer and chat template; or OWNER/NAME on a hub."""
    hub: Literal["huggingface", "modelscope"] | None = None
    """Hub for OWNER/NAME; default: ANABATIC_HUB, modelscope with USE_MODELSCOPE_HUB=1, else huggingface."""
    adapter: list[str] = field(default_factory=list)
    """Adapters to merge into the weights first, one after the other: FOLDER, or FOLDER@0.5 for half of its effect."""
    chat_template: str | None = None
    """Chat template in place of the tokenizer's own: a file of Jinja, or a name: chatml, llama3, qwen2.5, qwen3,
    mistral, deepseek, gemma, glm4, phi3, phi4, llama2."""
    tuner: Literal["auto", "full", "lora", "freeze"] = "auto"
    """full: train all weights; lora: adapters; freeze: the last blocks; auto: full, or lora
    where `model` is an adapter, whose training continues."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Frozen weights of linear layers in 8 bits, or in 4 (QLoRA, arXiv 2305.14314), while adapters are trained."""
    lora: Lora = field(default_factory=Lora)
    freeze: Freeze = field(default_factory=Freeze)
    recompute: Recompute = "none"
    """Activation checkpointing: selective keeps matrix products and attention, full only the blocks' inputs."""
    optim: Optim = field(default_factory=_default_optim)
    data: PictureData = field(default_factory=PictureData)
    vision: Vision = field(default_factory=Vision)

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
