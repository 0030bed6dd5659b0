"""`anabatic classify pretrain|train`: a model of vessel trajectories from words."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from anabatic.config.pretrain import PretrainModel
from anabatic.config.sections.common import BatchSettings, Evaluate, Optim, Schedule, require_setting
from anabatic.config.sections.plan_facts import PlanFacts
from anabatic.config.sections.train_jobs import LoopJob
from anabatic_vessels.config.tracks import TrackSettings

ASSUMED_WORDS = 4096
"""Distinct words that a plan assumes; coarse cells of a coast give some thousands."""

NO_HELDOUT = "none"
"""`data.valid`: train on every vessel."""
Features = Literal["motion", "transponder", "heading", "location"]


@dataclass(kw_only=True)
class VesselData:
    """Sources of vessels, and the held-out share.

    Sources are JSON-lines files of words, as `anabatic classify words` writes them, or AIS tables (CSV, Parquet), which
    are cut into segments and turned into words here; not both at once.
    """

    train: list[str] = field(default_factory=list)
    """Files or globs to learn from."""
    valid: list[str] = field(default_factory=list)
    """Held-out files, of other vessels; empty: a share of the vessels of `train`; none: nobody is held out."""
    split: str | None = None
    """JSON file that says which vessel is on which side; default: the split of model.path, else one is made."""
    valid_fraction: float = 0.15
    """Share of each class's vessels that is held out when neither `valid` nor a split is given."""
    test_fraction: float = 0.0
    """Share of each class's vessels that is left out altogether then, for `classify eval`."""

    def __post_init__(self) -> None:
        require_setting(
            0.0 < self.valid_fraction < 1.0,
            f"data.valid_fraction is {self.valid_fraction}",
            "use a share such as 0.15; --data.valid none holds nobody out",
        )
        require_setting(
            0.0 <= self.test_fraction < 1.0 - self.valid_fraction,
            f"data.test_fraction is {self.test_fraction}, data.valid_fraction {self.valid_fraction}",
            "use shares that leave vessels to train on",
        )
        require_setting(not (self.valid and self.split), "data.valid and data.split are both given", "use one of them")
        mixed = NO_HELDOUT in self.valid and len(self.valid) > 1
        require_setting(not mixed, f"data.valid is {self.valid}", "name files of other vessels, or `none` alone")

    @property
    def holds_out(self) -> bool:
        """True if vessels are to be held out."""
        return self.valid != [NO_HELDOUT]


@dataclass(kw_only=True)
class VesselBatch(BatchSettings):
    """Segments per step. They are packed side by side without padding."""

    seq_len: int | None = None
    """Longest segment, in words; a longer one loses its end, with a warning. Default: 1024, or the model's positions
    where they are fewer."""
    rows: int = 64
    """Segments per optimizer step over all ranks, where global_batch_tokens is not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self.rows >= 1, f"batch.rows is {self.rows}", "use 1 or more")
        require_setting(
            self.packing, "batch.packing is false, and segments are always packed", "leave batch.packing out"
        )


@dataclass(kw_only=True)
class VesselEvaluate(Evaluate):
    """Held-out vessels during training, early stopping."""

    every: int = 0
    """Steps between evaluations; 0: one pass over the training data."""
    tokens: int = 1_000_000_000
    """Held-out words per evaluation; the whole held-out set when it is smaller."""
    metric: Literal["loss", "accuracy", "macro_f1", "vessel_accuracy", "vessel_macro_f1"] = "loss"  # type: ignore[assignment]
    """Criterion of the best model; per segment, or per vessel by its segments together (geometric mean)."""

    def __post_init__(self) -> None:
        require_setting(self.every >= 0, f"eval.every is {self.every}", "use 0 or more steps")
        require_setting(self.tokens >= 1, f"eval.tokens is {self.tokens}", "use 1 or more")
        require_setting(self.patience >= 0, f"eval.patience is {self.patience}", "use 0 or more evaluations")
        require_setting(self.min_delta >= 0, f"eval.min_delta is {self.min_delta}", "use 0 or more")
        require_setting(
            not self.sample_prompts, "eval.sample_prompts is given", "a model of trajectories answers no prompts"
        )


@dataclass(kw_only=True)
class WordEvaluate(VesselEvaluate):
    """Held-out vessels during training, early stopping."""

    metric: Literal["loss", "accuracy"] = "loss"
    """Criterion of the best model: the lowest held-out loss, or the most words predicted."""


@dataclass(kw_only=True)
class MaskSettings:
    """Masking of words. Words of the clock and the end of a point never are."""

    ratio: float = 0.15
    """Share of the words that may be hidden, which are."""
    h3: float = 0.4
    """Share of the hidden words that are of the position."""
    class_word: float = 0.3
    """Share that are class words; without any in the rows it goes to the others."""
    motion: float = 0.2
    """Share that are of speed, course and turn."""
    other: float = 0.1
    """Share that are none of these."""

    def __post_init__(self) -> None:
        require_setting(0 < self.ratio < 1, f"mask.ratio is {self.ratio}", "use a share such as 0.15")
        fractions = (self.h3, self.class_word, self.motion, self.other)
        require_setting(
            min(fractions) >= 0 and sum(fractions) > 0, f"shares of mask are {fractions}", "use numbers from 0"
        )


@dataclass(kw_only=True)
class ClassifierHead:
    """The classifier on top of the model."""

    pooling: Literal["mean", "last"] = "mean"
    """mean: of the states of all words; last: the state of the last word."""
    attention: Literal["both", "causal"] = "both"
    """both: every word sees the whole segment; causal: what comes before it, as the model was trained."""
    dropout: float = 0.3
    """Of what the head reads, in training."""
    block_dropout: float = 0.0
    """Of what attention and MLP of every block of the model add, in training."""
    features: list[Features] = field(default_factory=list)
    """Groups of numbers of a segment that the head reads beside the words; empty: words alone."""
    width: int = 64
    """Width of the layers that read these numbers; the first one is four times as wide."""
    features_dropout: float = 0.4
    """Inside of these layers, in training."""
    features_hidden: float = 0.1
    """Share of the segments whose numbers are hidden in training, so that words alone can be asked, too."""
    trees: int = 0
    """Boosting rounds on these numbers; tree and network probabilities are averaged. 0: none; 250 is good."""
    trees_share: float = 0.6
    """Weight of the trees in the mean; the network has the rest. 1: the network is for words without numbers only."""
    vessel_trees: int = 0
    """Rounds of boosted trees on mean, least and most of these numbers over a vessel's day, beside what is said of each
    of its segments. 0: none; 120 is good."""
    vessel_share: float = 0.3
    """Weight of these in the geometric mean of both."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: rare classes count more, by the inverse of their share of the training segments."""
    crop: float = 1.0
    """In every pass a segment is read from a random run of its points, at least this share of them; 1: whole."""
    vessel_weights: Literal["none", "sqrt", "equal"] = "sqrt"
    """Weight of a segment: equal; 1 / sqrt of the segments of its vessel; or all vessels the same."""
    label_smoothing: float = 0.05
    """Share of the target that is spread over all classes."""
    backbone_lr: float = 1.0
    """Learning rate of the model as a share of the head's."""
    freeze_epochs: float = 0.0
    """Passes over the training data in which the head alone is trained."""

    def __post_init__(self) -> None:
        require_setting(
            0 <= self.dropout < 1, f"head.dropout is {self.dropout}", "use a share from 0 up to, not including, 1"
        )
        require_setting(
            0 < self.crop <= 1, f"head.crop is {self.crop}", "use a share above 0; 0.5 helps with few vessels"
        )
        require_setting(
            0 <= self.features_hidden < 1, f"head.features_hidden is {self.features_hidden}", "0.1 is common"
        )
        require_setting(
            0 <= self.block_dropout < 1, f"head.block_dropout is {self.block_dropout}", "use a share below 1"
        )
        require_setting(
            0 <= self.features_dropout < 1, f"head.features_dropout is {self.features_dropout}", "use 0 up to 1"
        )
        require_setting(
            0 <= self.label_smoothing < 1, f"head.label_smoothing is {self.label_smoothing}", "0.1 is common"
        )
        require_setting(
            self.backbone_lr >= 0, f"head.backbone_lr is {self.backbone_lr}", "use 0 or more; 0.1 is common"
        )
        require_setting(self.freeze_epochs >= 0, f"head.freeze_epochs is {self.freeze_epochs}", "use 0 or more")
        require_setting(self.width >= 1, f"head.width is {self.width}", "use 1 or more")
        require_setting(self.trees >= 0, f"head.trees is {self.trees}", "use 0 or more rounds; 250 is good")
        require_setting(0 < self.trees_share <= 1, f"head.trees_share is {self.trees_share}", "use a share such as 0.6")
        require_setting(
            self.vessel_trees >= 0, f"head.vessel_trees is {self.vessel_trees}", "use 0 or more rounds; 120 is good"
        )
        require_setting(
            0 < self.vessel_share < 1, f"head.vessel_share is {self.vessel_share}", "use a share such as 0.3"
        )
        lone = f"head.vessel_trees is {self.vessel_trees}, head.trees is 0"
        require_setting(not self.vessel_trees or bool(self.trees), lone, "give both, such as head.trees 250")
        need = "trees read numbers: give head.features, such as [motion, transponder, heading]"
        require_setting(
            not self.trees or bool(self.features), f"head.trees is {self.trees}, head.features is empty", need
        )


def _default_model() -> PretrainModel:
    return PretrainModel(depth=2)


def _default_optim() -> Optim:
    return Optim(name="adamw", weight_decay=0.05, beta2=0.98, eps=1e-8)


def _default_schedule() -> Schedule:
    return Schedule(epochs=12.0, warmup_ratio=0.1, decay_ratio=0.9, decay="cosine", final_lr_ratio=0.0)


@dataclass(kw_only=True)
class _OnWords:
    """First in help and templates, as in `config.sections.train_jobs`."""

    data: VesselData = field(default_factory=VesselData)
    tracks: TrackSettings = field(default_factory=TrackSettings)
    model: PretrainModel = field(default_factory=_default_model)


@dataclass(kw_only=True)
class _WithMasks(_OnWords):
    mask: MaskSettings = field(default_factory=MaskSettings)


@dataclass(kw_only=True)
class _WithHead(_OnWords):
    head: ClassifierHead = field(default_factory=ClassifierHead)


@dataclass(kw_only=True)
class WordsJob(LoopJob, _OnWords):
    """A training on words of trajectories."""

    seed: int = 0
    """Seed of new weights, of the data order, of masks and of a split that is made."""
    batch: VesselBatch = field(default_factory=VesselBatch)
    optim: Optim = field(default_factory=_default_optim)
    schedule: Schedule = field(default_factory=_default_schedule)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(
            bool(self.data.train), "data.train is empty", "give --data FILE.jsonl of words, or an AIS table"
        )
        for name in ("context", "tensor"):
            require_setting(
                getattr(self.parallel, name) == 1,
                f"parallel.{name} is {getattr(self.parallel, name)}, and a model of words is not divided by heads",
                "leave it out: ddp, zero2 and zero3 divide the rows",
            )

    def get_plan_facts(self) -> PlanFacts:
        """The rows decide the vocabulary and, with `batch.rows`, the tokens of a step."""
        return PlanFacts(vocabulary=ASSUMED_WORDS, step_rows=self.batch.rows)


@dataclass(kw_only=True)
class ClassifyPretrainJob(WordsJob, _WithMasks):
    """Train a model on words alone, before it learns classes."""

    out: str = "runs/classify-pretrain"
    """Run folder."""
    objective: Literal["masked", "next", "source"] = "masked"
    """masked: guess hidden words from both sides; next: the next word; source: hidden words from what comes before
    them, hidden as rarely as in the scripts of "token_for_nj"."""
    eval: WordEvaluate = field(default_factory=WordEvaluate)

    def get_plan_facts(self) -> PlanFacts:
        """Targets are the hidden words, or every next one."""
        return replace(super().get_plan_facts(), targets=1.0 if self.objective == "next" else self.mask.ratio)


@dataclass(kw_only=True)
class ClassifyTrainJob(WordsJob, _WithHead):
    """Train a classifier of vessel trajectories, from scratch or on top of a model."""

    out: str = "runs/classify"
    """Run folder."""
    eval: VesselEvaluate = field(default_factory=VesselEvaluate)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(
            not self.tracks.keep_class_word,
            "tracks.keep_class_word is on: the class word is the answer",
            "only `anabatic classify pretrain` may keep it, on vessels it trains on",
        )

    def get_plan_facts(self) -> PlanFacts:
        """The head is over classes."""
        return replace(super().get_plan_facts(), has_lm_head=False)
