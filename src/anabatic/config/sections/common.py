"""Sections that several commands share. `None` means: decided from the depth or the device, and printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.core import plugins
from anabatic.core.errors import ConfigError
from anabatic.core.formatting import did_you_mean

DEFAULT_SEQ_LEN = 1024
"""Longest segment in tokens where a recipe names none, and the model has the positions for it."""


def require_setting(condition: bool, message: str, hint: str = "") -> None:
    """Raise `ConfigError` unless `condition` holds; for `__post_init__` checks."""
    if not condition:
        raise ConfigError(message, hint)


@dataclass
class DerivedSizes:
    """Values of settings that were left open, with the reason of each; what the user has set takes precedence."""

    values: dict[str, float | int | bool] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add_value(self, name: str, setting: float | None, derived: float, reason: str) -> None:
        """Store `setting` if the user set it, else `derived`."""
        self.values[name] = derived if setting is None else setting
        self.reasons[name] = reason if setting is None else "given"

    def get_int(self, name: str) -> int:
        """Return a value as an int."""
        return int(self.values[name])

    def format_lines(self) -> list[str]:
        """Return one printable line per value."""
        return [f"  {name} = {_format_value(value)} ({self.reasons[name]})" for name, value in self.values.items()]


def _format_value(value: float | int | bool) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


@dataclass(kw_only=True)
class DeviceSettings:
    """Where the job runs and in which number format."""

    type: Literal["auto", "npu", "cuda", "mps", "cpu"] = "auto"
    """Device type; `auto` takes the accelerator that torch finds, else the cpu, and says why."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Number format of the matrix products; `auto` follows the device table."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; `auto` follows the device table and the length of the run."""
    threads: int | None = None
    """CPU threads for torch; default: the cores this process may use, divided by the local processes."""
    nproc: int = 1
    """Processes on this machine, one per device; where there are more devices, free ones are used."""
    bind: Literal["auto", "off"] = "auto"
    """auto: each of several processes runs on its share of the cores, near its device; off: on all."""

    def __post_init__(self) -> None:
        require_setting(self.nproc >= 1, f"device.nproc is {self.nproc}", "use 1 or more")
        require_setting(
            self.nproc <= 256, f"device.nproc is {self.nproc}", "use at most 256 on one machine, one per device"
        )
        require_setting(self.threads is None or self.threads >= 1, f"device.threads is {self.threads}", "use 1 or more")


@dataclass(kw_only=True)
class SourceData:
    """What to read.

    A source is `PATH[#ROWS][@WEIGHT]`: a file, a folder or a glob of .txt, .md, .py, .jsonl[.gz|.zst], .json, .csv,
    .tsv, .parquet, or a built-in source `stdlib:`, `stdlib:docs`, `task:NAME`, `chat:stdlib`. `#2000` takes 2,000
    rows, `@0.5` is the share of the tokens (sources without `@` share what is left in proportion to their size).
    """

    train: list[str] = field(default_factory=list)
    """Training sources."""
    valid: list[str] = field(default_factory=list)
    """Held-out sources; empty: a share of the training documents, chosen by hash, never trained on."""
    valid_fraction: float = 0.02
    """Share of documents held out when `valid` is empty."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> its name in the files, for example `{query: question_text, response: reply}`."""
    on_bad_row: Literal["fail", "skip"] = "fail"
    """A broken row stops the job, or is skipped, counted and reported."""
    long_share: float = 0.05
    """Rows that are too long and cannot be cut are skipped, counted and reported; more than this share of them (and
    more than one) stop the job."""

    def __post_init__(self) -> None:
        require_setting(
            0.0 <= self.valid_fraction < 1.0,
            f"data.valid_fraction is {self.valid_fraction}",
            "use a share from 0 up to, not including, 1; 0.02 holds out 2 %",
        )
        require_setting(
            0.0 <= self.long_share <= 1.0, f"data.long_share is {self.long_share}", "use a share from 0 to 1"
        )


@dataclass(kw_only=True)
class Data(SourceData):
    """What to read, and where its tokens are kept."""

    text_column: str = "text"
    """Column or key of the text."""
    cache: str | None = None
    """Folder of tokenised shards; default: ANABATIC_CACHE, else ~/.cache/anabatic."""
    workers: int | None = None
    """Threads for tokenisation; default: the cores this process may use."""


@dataclass(kw_only=True)
class BatchSettings:
    """How many tokens enter a step."""

    seq_len: int | None = None
    """Longest segment that attends to itself, in tokens; longer documents are cut into several. Default: 1024, or the
    model's positions where they are fewer."""
    micro_batch_tokens: int | None = None
    """Tokens per forward pass and rank."""
    global_batch_tokens: int | None = None
    """Tokens per optimizer step over all ranks; reached by gradient accumulation."""
    packing: bool = True
    """Conversations side by side without padding; false: rows of like length, padded to the longest, to compare."""

    def __post_init__(self) -> None:
        given = self.seq_len
        require_setting(
            given is None or given >= 2, f"batch.seq_len is {given}", "use at least 2 tokens; 1024 is common"
        )
        for name in ("micro_batch_tokens", "global_batch_tokens"):
            value = getattr(self, name)
            require_setting(
                value is None or value >= (given or 2),
                f"batch.{name} is {value}, less than batch.seq_len {given or 2}",
                f"raise batch.{name}" + (" or lower batch.seq_len" if given else ""),
            )

    @property
    def resolved_seq_len(self) -> int:
        """`seq_len`, or what is common where it is left open and no model is known."""
        room = [size for size in (self.micro_batch_tokens, self.global_batch_tokens) if size is not None]
        return self.seq_len or min([DEFAULT_SEQ_LEN, *room])


@dataclass(kw_only=True)
class Optim:
    """The optimizer."""

    name: Literal["muon", "adamw"] = "muon"
    """muon: Muon for the matrices inside the blocks, AdamW for the rest; adamw: AdamW for all."""
    lr: float | None = None
    """Peak learning rate of AdamW (embeddings, norms, head; with adamw: everything)."""
    matrix_lr: float | None = None
    """Peak learning rate of Muon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms and biases have none."""
    beta1: float = 0.9
    """AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-10
    """AdamW: added to the denominator."""
    momentum: float = 0.95
    """Muon: momentum (Nesterov)."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; 0 switches clipping off."""
    weights: Literal["fp32", "bf16_kahan", "bf16_stochastic"] = "fp32"
    """Trained weights and moments: fp32, or bf16 with Kahan summation or stochastic rounding."""
    router_aux_loss: float | None = None
    """Mixture of experts: factor of the load-balancing loss; default: what the model's config.json says
    (`router_aux_loss_coef` with `output_router_logits`), as in transformers."""
    on_bad_step: Literal["skip", "rewind", "stop"] = "skip"
    """A step that is not finite, or a spike, is never applied. skip: continue; rewind: go back to the newest checkpoint
    and skip the step's data; stop: end the run."""
    spike: float = 0.0
    """A spike: a loss or gradient norm so many robust standard deviations above the median of the last 64 steps;
    0: none is. 6 is cautious."""
    max_rewinds: int = 3
    """Rewinds of a run after which the next bad step ends it."""

    def __post_init__(self) -> None:
        for name in ("lr", "matrix_lr"):
            value = getattr(self, name)
            require_setting(
                value is None or value > 0, f"optim.{name} is {value}", "use a positive number such as 3e-4"
            )
        require_setting(
            self.weights == "fp32" or self.name == "adamw",
            f"optim.weights is {self.weights} and optim.name is {self.name}",
            "bf16 weights are updated by adamw alone: --optim.name adamw",
        )
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            require_setting(
                0.0 <= value < 1.0, f"optim.{name} is {value}", "use a number from 0 up to, not including, 1"
            )
        for name in ("weight_decay", "eps"):
            require_setting(getattr(self, name) >= 0, f"optim.{name} is {getattr(self, name)}", "use 0 or more")
        require_setting(self.max_grad_norm >= 0, f"optim.max_grad_norm is {self.max_grad_norm}", "use 0 or more")
        require_setting(
            self.spike == 0 or self.spike >= 1, f"optim.spike is {self.spike:g}", "use 6, or 0 for no spikes"
        )
        require_setting(
            self.router_aux_loss is None or self.router_aux_loss >= 0,
            f"optim.router_aux_loss is {self.router_aux_loss}",
            "use 0 or more; 0.001 is common",
        )
        require_setting(self.max_rewinds >= 0, f"optim.max_rewinds is {self.max_rewinds}", "use 0 or more")


MAX_MINUTES = 525_600
"""Of `schedule.minutes`: a year."""


@dataclass(kw_only=True)
class Schedule:
    """How long to train and how the learning rate moves: up, level, down."""

    max_steps: int | None = None
    """Optimizer steps; default: from `epochs`, or from the depth (tokens per parameter)."""
    epochs: float | None = None
    """Passes over the training data."""
    tokens_per_param: float | None = None
    """Training tokens per parameter of the blocks and the head, without steps and epochs; default: 12."""
    minutes: float | None = None
    """Minutes of training without evaluations and compiling, in place of epochs; `max_steps` may end it earlier."""
    warmup_ratio: float = 0.02
    """Share of the steps in which the learning rate rises."""
    decay_ratio: float = 0.5
    """Share of the steps, at the end, in which it falls."""
    decay: Literal["linear", "cosine", "none"] = "linear"
    """Shape of the fall."""
    final_lr_ratio: float = 0.02
    """Last learning rate as a share of the peak."""

    def __post_init__(self) -> None:
        require_setting(
            self.max_steps is None or self.max_steps >= 1,
            f"schedule.max_steps is {self.max_steps}",
            "use 1 or more, or leave it out",
        )
        require_setting(
            self.max_steps is None or self.max_steps <= 10**9,
            f"schedule.max_steps is {self.max_steps}",
            "use at most 1,000,000,000",
        )
        require_setting(
            self.epochs is None or self.epochs > 0, f"schedule.epochs is {self.epochs}", "use a positive number"
        )
        require_setting(
            self.minutes is None or 0 < self.minutes <= MAX_MINUTES,
            f"schedule.minutes is {self.minutes}",
            f"use more than 0 and at most {MAX_MINUTES:,}",
        )
        for name in ("warmup_ratio", "decay_ratio", "final_lr_ratio"):
            value = getattr(self, name)
            require_setting(0.0 <= value <= 1.0, f"schedule.{name} is {value}", "use a share from 0 to 1")
        total = self.warmup_ratio + self.decay_ratio
        require_setting(
            total <= 1.0,
            f"schedule.warmup_ratio + schedule.decay_ratio is {total:g}, more than the whole run",
            "lower one of them",
        )


@dataclass(kw_only=True)
class Save:
    """Checkpoints (to continue) and models (to use)."""

    every: int = 0
    """Steps between checkpoints; 0: only at the end and when interrupted."""
    keep_last: int = 2
    """Newest checkpoints that are kept."""
    keep_best: bool = False
    """Keep the checkpoint of the best evaluation by eval.metric too; one is saved where that step has none."""
    background: Literal["auto", "on", "off"] = "auto"
    """Copy to the host's memory, then write while the training continues; auto: from 64 MiB on, where memory allows."""
    memory_every: int = 0
    """Steps between copies in the memory of this machine and the next one, from which a job continues after a machine
    was lost; 0: none."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest valid checkpoint of the run folder; never: start over; must: fail without one."""

    def __post_init__(self) -> None:
        require_setting(self.every >= 0, f"save.every is {self.every}", "use 0 or more steps")
        require_setting(self.memory_every >= 0, f"save.memory_every is {self.memory_every}", "use 0 or more steps")
        require_setting(self.keep_last >= 1, f"save.keep_last is {self.keep_last}", "keep at least one checkpoint")


@dataclass(kw_only=True)
class EvaluateRounds:
    """Evaluations during training, samples, early stopping."""

    every: int = 0
    """Steps between evaluations; 0: only at the end."""
    sample_prompts: list[str] = field(default_factory=list)
    """Prompts answered after each evaluation and kept for the report: questions of a user where a chat model is
    trained, beginnings of a text in `pretrain`."""
    metric: Literal["loss", "accuracy"] = "loss"
    """What makes a model the best: the lowest held-out loss, or the most targets (in `dpo`: pairs) predicted."""
    patience: int = 0
    """Early stopping: evaluations without an improvement after which the run ends, as finished; 0: never."""
    min_delta: float = 0.0
    """Least change of the metric, since the last improvement, that counts as one for `patience`."""

    def __post_init__(self) -> None:
        require_setting(self.every >= 0, f"eval.every is {self.every}", "use 0 or more steps")
        require_setting(self.patience >= 0, f"eval.patience is {self.patience}", "use 0 or more evaluations")
        require_setting(
            not self.patience or self.every > 0,
            f"eval.patience is {self.patience}, but eval.every is 0: there is one evaluation, at the end",
            "give --eval.every STEPS",
        )
        require_setting(self.min_delta >= 0, f"eval.min_delta is {self.min_delta}", "use 0 or more")


@dataclass(kw_only=True)
class Evaluate(EvaluateRounds):
    """Held-out loss during training, samples, early stopping."""

    tokens: int = 200_000
    """Held-out tokens per evaluation; the whole held-out set when it is smaller."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(self.tokens >= 1, f"eval.tokens is {self.tokens}", "use 1 or more")


SINKS = ("tensorboard", "swanlab", "wandb")


@dataclass(kw_only=True)
class LogSettings:
    """What is written while the job runs. `metrics.jsonl` is always written."""

    every: int = 10
    """Steps between printed lines; the only moments at which the host waits for the device."""
    sinks: list[str] = field(default_factory=list)
    """Trackers that receive a copy of the metrics: tensorboard, swanlab, wandb, or plug-ins."""
    callbacks: list[str] = field(default_factory=list)
    """Callbacks, which follow steps, evaluations and checkpoints: FILE.py:NAME, MODULE:NAME, or plug-ins."""
    name: str | None = None
    """Name of the run in the trackers; default: the run folder's name."""
    samples: int = 1
    """Conversations of the training data shown at the start, with what is learned marked; 0: none."""
    device_every: float = 5.0
    """Seconds between two looks at the utilisation, memory and power of the devices (`anabatic monitor` shows more);
    0: never. A processor has no such figures."""
    rows: bool = False
    """Write which rows of the data each step has read, and each rank: `rows-rank-N.jsonl`."""

    def __post_init__(self) -> None:
        require_setting(
            self.device_every >= 0, f"log.device_every is {self.device_every:g}", "use seconds, 0 for never"
        )
        require_setting(self.every >= 1, f"log.every is {self.every}", "use 1 or more steps")
        for at, name in enumerate(self.sinks):
            if name not in SINKS and plugins.find_plugin("anabatic.sinks", name) is None:
                known = [*SINKS, *plugins.list_plugins("anabatic.sinks")]
                raise ConfigError(f'log.sinks[{at}] is "{name}".{did_you_mean(name, known)}', f"use {', '.join(known)}")
        require_setting(self.samples >= 0, f"log.samples is {self.samples}", "use 0 or more conversations")


Strategy = Literal["auto", "single", "ddp", "zero2", "zero3"]
ContextMethod = Literal["ulysses", "ring"]
Recompute = Literal["none", "selective", "full"]
"""What the backward pass makes anew: nothing, all but matrix products and attention, or whole blocks."""


@dataclass(kw_only=True)
class Parallel:
    """How the model is divided over the processes."""

    strategy: Strategy = "auto"
    """ddp: a copy on every process; zero2: gradients and optimizer are sharded; zero3: weights too; auto: ddp."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: with zero2 and zero3, weights, gradients and optimizer stay in host memory."""
    replicate: int = 1
    """With zero2 and zero3: groups of processes that each hold all shards, so that only gradients cross between them;
    the number of machines, for example."""
    context: int = 1
    """Processes that share the tokens of a batch, for long sequences; the others divide the data."""
    context_method: ContextMethod = "ulysses"
    """How they compute attention. ulysses: each gets all tokens of some heads; ring: keys and values travel, for more
    processes than heads."""
    expert: int = 1
    """Mixture of experts: processes that share the experts of each layer; each has batches of its own."""
    tensor: int = 1
    """Processes that share attention heads and MLPs and work on the same data; the others divide the data."""
    pipeline: int = 1
    """Stages: processes that share the layers and work on the same data, one micro-batch behind the other."""
    pipeline_chunks: int = 1
    """Parts of the layers that each stage has, with those of other stages between them (interleaved): stages wait less
    and exchange more often."""
    check_replicas: int = 0
    """Steps between two comparisons of the weights' bits on all ranks, which find silent data corruption; they are also
    compared before checkpoints and evaluations. 0: never."""
    deepspeed: str | None = None
    """DeepSpeed's JSON file, or zero0, zero1, zero2, zero3, zero2-offload, zero3-offload: translated into settings."""

    def __post_init__(self) -> None:
        for name in ("replicate", "context", "expert", "tensor", "pipeline", "pipeline_chunks"):
            require_setting(getattr(self, name) >= 1, f"parallel.{name} is {getattr(self, name)}", "use 1 or more")
        require_setting(
            self.expert == 1 or self.tensor == 1,
            f"parallel.expert is {self.expert} and parallel.tensor is {self.tensor}",
            "use one of them; parallel.context and the strategies go with both",
        )
        require_setting(
            self.pipeline_chunks == 1 or self.pipeline > 1,
            f"parallel.pipeline_chunks is {self.pipeline_chunks}, parallel.pipeline is {self.pipeline}",
            "use --parallel.pipeline 2 or more with it",
        )
        require_setting(
            self.check_replicas >= 0,
            f"parallel.check_replicas is {self.check_replicas}",
            "use a number of steps such as 1000, or 0 for never",
        )
        sharded = self.strategy in ("zero2", "zero3")
        require_setting(
            self.offload == "none" or sharded or self.deepspeed is not None,
            f"parallel.offload is {self.offload}, parallel.strategy is {self.strategy}",
            "use zero2 or zero3 with it",
        )
        require_setting(
            self.replicate == 1 or sharded or self.deepspeed is not None,
            f"parallel.replicate is {self.replicate}, parallel.strategy is {self.strategy}",
            "use zero2 or zero3 with it: with ddp every process has a copy anyway",
        )
