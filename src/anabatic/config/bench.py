"""Settings of `anabatic bench`: what is measured, how often, where the figures go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabatic.config.infer import Batching
from anabatic.config.sections.common import Data, DeviceSettings, require_setting
from anabatic.core.formatting import parse_whole


def _require_positive(job: object, *names: str) -> None:
    for name in names:
        value = getattr(job, name)
        require_setting(value is None or value >= 1, f"{name} is {value}", "use 1 or more")


@dataclass(kw_only=True)
class BenchJob:
    """How often is measured, and where the figures go: `bench.json`, `bench.md` and `bench.svg` in a folder."""

    out: str = "runs/bench"
    """Folder to write."""
    overwrite: bool = False
    """Write into a folder that holds figures already."""
    repeats: int = 5
    """Measurements; their median counts, and their range is shown."""
    warm_up: int = 1
    """Measurements before them that are not counted."""
    plot: Literal["auto", "on", "off"] = "auto"
    """Whether bench.svg is drawn; auto: yes."""

    def __post_init__(self) -> None:
        require_setting(bool(self.out.strip()), "out is empty", "give --out FOLDER")
        _require_positive(self, "repeats")
        require_setting(self.warm_up >= 0, f"warm_up is {self.warm_up}", "use 0 or more")


@dataclass(kw_only=True)
class BenchTrain(BenchJob):
    """Steps of a training, as the training itself counts them."""

    out: str = "runs/bench-train"
    """Folder to write."""
    steps: int = 5
    """Optimizer steps of a measurement."""
    length: int | None = None
    """Tokens of synthetic rows, which take the place of the command's data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "steps")
        require_setting(self.length is None or self.length >= 2, f"length is {self.length}", "use 2 tokens or more")


@dataclass(kw_only=True)
class BenchScaling(BenchTrain):
    """The same training on more and more devices."""

    out: str = "runs/bench-scaling"
    """Folder to write."""
    npus: str = "1,2"
    """Numbers of devices, one process on each: 1,2,4,8"""
    weak: bool = False
    """As many tokens a step for each device (weak scaling); else as many for all together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        words = [word.strip() for word in self.npus.split(",")]
        good = all(1 <= (parse_whole(word) or 0) <= 256 for word in words)
        require_setting(
            good, f"npus is {self.npus!r}", "give numbers from 1 to 256 with commas between them: --npus 1,2,4,8"
        )
        require_setting(len(set(map(int, words))) == len(words), f"npus is {self.npus!r}", "name each number once")

    @property
    def device_counts(self) -> list[int]:
        """Numbers of devices, the least first."""
        return sorted(int(word) for word in self.npus.split(","))


@dataclass(kw_only=True)
class BenchCompare(BenchJob):
    """A command of ours and another one, in turn."""

    out: str = "runs/bench-compare"
    """Folder to write."""
    ours: str = ""
    """The command of ours, as one text: "sft -c recipe.yaml --data {data} --out {out}"."""
    data: str | None = None
    """File or folder that stands for {data} in both commands; {out} is a fresh folder of each turn."""
    figure: str | None = None
    """Regular expression with one group: a rate that both commands print, more is better; the last one counts."""
    limit: float = 3600.0
    """Seconds after which a command that has not ended is ended."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(bool(self.ours.strip()), "ours is not given", 'give --ours "sft -c recipe.yaml --out {out}"')
        require_setting(0 < self.limit <= 1e6, f"limit is {self.limit:g}", "give seconds, up to 1000000")


@dataclass(kw_only=True)
class BenchInferJob(BenchJob):
    """How fast a model reads prompts and writes answers, many at once."""

    out: str = "runs/bench-infer"
    """Folder to write."""
    model: str = ""
    """Hugging Face folder, run folder or adapter folder; default: random weights, `depth` blocks."""
    depth: int = 4
    """Blocks of the model with random weights; its width is 64 x depth."""
    requests: int = 16
    """Prompts of a measurement."""
    prompt_tokens: int = 128
    """Tokens of each prompt."""
    new_tokens: int = 64
    """Tokens of each answer: nothing ends one earlier."""
    quantize: Literal["none", "int8", "nf4"] = "none"
    """Hold the weights of the linear layers in few bits."""
    batching: Batching = field(default_factory=Batching)
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "depth", "requests", "prompt_tokens")
        require_setting(
            self.new_tokens >= 2, f"new_tokens is {self.new_tokens}", "use 2 or more: the first comes of the prompt"
        )
        require_setting(
            self.device.nproc == 1, f"device.nproc is {self.device.nproc}", "one process is measured: leave it out"
        )


@dataclass(kw_only=True)
class BenchTokenizeJob(BenchJob):
    """How fast text becomes tokens, in memory and on its way into shards."""

    out: str = "runs/bench-tokenize"
    """Folder to write."""
    tokenizer: str = ""
    """Folder with tokenizer.json; default: synthetic words, a vocabulary of 32,768."""
    mib: float = 8.0
    """Synthetic text, where data.train names none."""
    data: Data = field(default_factory=Data)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting(0 < self.mib <= 2**20, f"mib is {self.mib:g}", "use a size above 0 such as 8")


@dataclass(kw_only=True)
class BenchCollectiveJob(BenchJob):
    """How fast the processes of a job exchange tensors."""

    out: str = "runs/bench-collective"
    """Folder to write."""
    mib: list[float] = field(default_factory=lambda: [0.0625, 1.0, 16.0])
    """Sizes of the tensors."""
    device: DeviceSettings = field(default_factory=lambda: DeviceSettings(nproc=2))

    def __post_init__(self) -> None:
        super().__post_init__()
        good = bool(self.mib) and all(0 < size <= 2**16 for size in self.mib)
        require_setting(
            good,
            f"mib is {', '.join(f'{size:g}' for size in self.mib) or 'empty'}",
            "use sizes up to 65536, such as 1 16 256",
        )


@dataclass(kw_only=True)
class BenchIoJob(BenchJob):
    """How fast models and checkpoints are saved and loaded, and batches read."""

    out: str = "runs/bench-io"
    """Folder to write; what is saved for a measurement goes there too, and is removed."""
    model: str = ""
    """Hugging Face folder; default: random weights, `depth` blocks."""
    depth: int = 8
    """Blocks of the model with random weights; its width is 64 x depth."""
    batch_tokens: int = 8192
    """Tokens of a batch."""
    device: DeviceSettings = field(default_factory=DeviceSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "depth")
        require_setting(self.batch_tokens >= 1024, f"batch_tokens is {self.batch_tokens}", "use 1024 or more")
        require_setting(
            self.device.nproc == 1, f"device.nproc is {self.device.nproc}", "one process is measured: leave it out"
        )
