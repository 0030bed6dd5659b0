"""A folder with text and a tokenizer, and the commands that work on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from e2e import command

STEPS = 40
"""Of a pretraining."""
SHORT = 16
"""Of what continues it."""

Options = dict[str, object]
"""Setting -> value, or values."""


@dataclass(frozen=True)
class Home:
    """Where things are, and the words of short training commands; `more` adds settings or overrides them."""

    root: Path
    text: Path
    tokenizer: Path
    cache: Path
    device: str = "cpu"
    program: tuple[str, ...] = ()
    """What the commands run under; empty: nothing."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More variables of the commands."""

    def anabatic(self, *words: object, code: int | None = 0) -> command.Result:
        """Run a command to its end."""
        return command.end(self.start(*words), code)

    def together(self, *commands: Sequence[object], code: int | None = 0) -> list[command.Result]:
        """Run commands at the same time."""
        return [command.end(process, code) for process in [self.start(*words) for words in commands]]

    def start(self, *words: object) -> command.Running:
        """Start a command."""
        return command.start(words, self.cache, self.program, self.variables)

    def pretrain(self, out: Path, processes: int = 1, more: Options | None = None) -> list[object]:
        """Pretrain from scratch."""
        given: Options = {"out": out, "tokenizer": self.tokenizer, "data.train": self.text}
        given |= {"model.depth": 2, "model.width": 64}
        return ["pretrain", *_words(given | self._common(STEPS, processes) | (more or {}))]

    def mid(self, out: Path, model: Path, processes: int = 1, more: Options | None = None) -> list[object]:
        """Continue a model on a mixture."""
        sources = [f"{self.text}@0.3", "task:spelling#300@0.5", "task:counting#300"]
        given: Options = {"out": out, "model.path": model, "data.train": sources}
        given |= {"optim.lr": 0.01, "optim.matrix-lr": 0.005}
        return ["pretrain", *_words(given | self._common(SHORT, processes) | (more or {}))]

    def sft(self, out: Path, model: Path, processes: int = 1, more: Options | None = None) -> list[object]:
        """Fine-tune a model."""
        given: Options = {"out": out, "model": model, "data.train": "task:spelling#300", "optim.lr": 0.003}
        return ["sft", *_words(given | self._common(SHORT, processes) | (more or {}))]

    def dpo(self, out: Path, model: Path, data: Path, processes: int = 1, more: Options | None = None) -> list[object]:
        """Train a model on preferences."""
        given: Options = {"out": out, "model": model, "data.train": data, "optim.lr": 0.003, "beta": 0.5}
        return ["dpo", *_words(given | self._common(SHORT, processes) | (more or {}))]

    def rl(
        self, out: Path, model: Path, rewards: Path, processes: int = 1, more: Options | None = None
    ) -> list[object]:
        """Reward what a model answers."""
        given: Options = {"out": out, "model": model, "data.train": "task:spelling#40", "optim.lr": 0.003}
        given |= {"rewards": [f"{rewards}:vowels", "length=0.1"], "sampling.max-new-tokens": 8, "eval.rows": 6}
        given |= {"examples_per_step": 4, "num_samples": 4, "device_batch_size": 4, "no-mask-truncated": []}
        common = {key: value for key, value in self._common(4, processes).items() if "-batch-" not in key}
        return ["rl", *_words(given | common | (more or {}))]

    def reward(self, out: Path, model: Path, data: Path, more: Options | None = None) -> list[object]:
        """Train a reward model."""
        given: Options = {"out": out, "model": model, "data.train": data, "optim.lr": 0.003}
        return ["reward", *_words(given | self._common(SHORT, 1) | (more or {}))]

    def _common(self, steps: int, processes: int) -> Options:
        """Sizes for seconds, and the same global batch for any number of processes."""
        return {
            "batch.seq-len": 64,
            "batch.micro-batch-tokens": 256,
            "batch.global-batch-tokens": 512,
            "device.type": self.device,
            "device.dtype": "fp32",  # so that one process and two agree in more than a few digits
            "device.threads": 1,
            "device.nproc": processes,
            "log.every": 1,
            "save.every": 5,
            "eval.every": 4,
            "schedule.max-steps": steps,
        }


def _words(options: Options) -> list[object]:
    words: list[object] = []
    for name, value in options.items():
        if isinstance(value, bool):  # a switch
            words.append(f"--{name}={str(value).lower()}")
        else:
            words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return words
