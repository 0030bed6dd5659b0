"""Stand-ins for what the commands of the pages work on: tiny models, runs and files under the names that they type."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anabatic.config.task import EvalTask
from e2e import command, warm
from e2e.vessels import write_demo
from house import tree
from pages import rows

LENGTH = 2048
"""Tokens that the models read at most: a conversation with tools, in a vocabulary of few words, has hundreds."""
MODELS = (
    "models/base", "models/qwen", "models/Qwen2.5-7B-Instruct", "models/other", "MODEL", "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-14B",
    "Qwen/Qwen1.5-7B-Chat",
)  # fmt: skip
"""The base model stands for each."""
COPIES = {
    "runs/mine/base": ("runs/mine/mid", "runs/base", "runs/demo/base"),
    "runs/mine/sft": ("runs/demo/sft", "runs/sft"),
    "runs/lora": (
        "runs/qwen32b-lora",
        "runs/qwen",
        "runs/style",
        "runs/facts",
        "runs/legal",
        "runs/law",
        "runs/mine/lora",
        "output",
    ),
    "runs/mine/tokenizer": ("runs/tokenizer",),
    "runs/vessel": ("runs/vessels", "runs/vessel-8npu"),
}
"""Run -> further names of it."""
SIZES = {
    "batch.seq-len": "64",
    "batch.micro-batch-tokens": "128",
    "batch.global-batch-tokens": "256",
    "schedule.max-steps": "2",
    "log.every": "1",
    "device.threads": "1",
}
"""Of a training that lasts a moment."""


@dataclass(frozen=True)
class Told:
    """What a command printed, and how it ended."""

    code: int
    out: str
    err: str


def run(words: Sequence[str], folder: Path, variables: dict[str, str], cache: Path) -> command.Running:
    """Start `anabatic WORDS` in a folder."""
    outer = {**os.environ, "ANABATIC_CACHE": str(cache), "GOMP_SPINCOUNT": "1000", **variables}
    started = warm.plain().start(["anabatic", *words], outer, folder)
    if started is None:
        raise AssertionError(f"these variables need their own process: {sorted(variables)}")
    return started


def end(process: command.Running) -> Told:
    """Wait for a command."""
    result = command.end(process, None)
    return Told(result.code, result.out, result.err)


def _place(source: str, target: str) -> None:
    """Weights are written anew or not at all, so that pages may share them; the rest is copied."""
    if source.endswith((".safetensors", ".distcp")):
        os.link(source, target)
    else:
        shutil.copy(source, target)


@dataclass(frozen=True)
class Stand:
    """A folder with everything, made once; each page works in a copy."""

    folder: Path
    cache: Path

    @property
    def paper(self) -> Path:
        """A folder without models, for plans of published ones."""
        folder = self.folder.with_name("paper")
        folder.mkdir(exist_ok=True)
        return folder

    def copy(self, to: Path) -> Path:
        """Return its own folder for a page."""
        shutil.copytree(self.folder, to, symlinks=True, copy_function=_place)
        return to

    def make(self) -> None:
        """Write the files, then train."""
        rows.make(self.folder)
        (self.folder / "benchmarks").symlink_to(tree.ROOT / "benchmarks")
        mine = "runs/mine"
        self.anabatic(
            "tokenizer", "train", "--data.train", "corpus", "--vocab-size", "320", "--out", f"{mine}/tokenizer"
        )
        longer = {
            "batch.seq-len": str(LENGTH),
            "batch.micro-batch-tokens": str(LENGTH),
            "batch.global-batch-tokens": str(LENGTH),
        }
        tokenizer = ["--tokenizer", f"{mine}/tokenizer", "--model.depth", "2", "--model.width", "64"]
        self.train("pretrain", f"{mine}/base", "corpus", *tokenizer, sizes=longer)
        for name in MODELS:
            shutil.copytree(self.folder / mine / "base/final_model", self.folder / name)
        self.train("sft", f"{mine}/sft", "chats.jsonl", "--model", f"{mine}/base", sizes=longer)
        self.train("sft", "runs/lora", "chats.jsonl", "--model", "models/base", "--tuner", "lora", sizes=longer)
        self.train("reward", "runs/judge", "pairs.jsonl", "--model", f"{mine}/sft")
        self.anabatic("classify", "words", "ais.csv", "-o", "words.jsonl")
        write_demo(self.folder / "train_dataset_demo.jsonl")
        shutil.copy(self.folder / "words.jsonl", self.folder / "test_data.jsonl")
        self.train("classify pretrain", "runs/vessel-words", "words.jsonl", "--depth", "1")
        self.train("classify train", "runs/vessel", "words.jsonl", "--model.path", "runs/vessel-words")
        self.anabatic("classify", "predict", "others.csv", "-m", "runs/vessel", "-o", "predictions.jsonl")
        for path in sorted(self.folder.glob(f"{mine}/sft/*")):  # `runs/mine` is itself a run on some pages
            here = self.folder / mine / path.name
            shutil.copytree(path, here) if path.is_dir() else shutil.copy(path, here)
        rows.write(self.folder / mine / "rank-1.log", rows.LOG * 3)
        rows.write(self.folder / mine / "rank-0.log", rows.TIMEOUT)
        for name, others in COPIES.items():
            for other in others:
                shutil.copytree(self.folder / name, self.folder / other, dirs_exist_ok=True)
        for name, number in (("runs/lora", 200), ("output", 100)):
            (self.folder / name / "checkpoint-2").rename(self.folder / name / f"checkpoint-{number}")
        self.tasks()

    def tasks(self) -> None:
        """Write data sets and the CORE bundle with questions of our own, in the formats of the public ones."""
        from anabatic.evals.tasks import registry
        from unit.evals.test_builtin_tasks import ROWS

        for name, (row, *_) in ROWS.items():
            task, _ = registry.read_task(name)
            assert isinstance(task, EvalTask)
            for split in {task.data.split, "train", "dev"}:
                place = self.folder / "datasets" / task.data.hub / task.data.config
                rows.jsonl(place / f"{split}.jsonl", lambda _, row=row: row, 4)
        rows.jsonl(self.folder / "datasets/HumanEval.jsonl", lambda _: rows.PROGRAM, 3)
        bundle = self.folder / "eval_bundle"
        rows.jsonl(
            bundle / "eval_data/last.jsonl", lambda n: {"context": "one two three", "continuation": f"four {n}"}, 3
        )
        entry = (
            "icl_tasks:\n- {label: last, dataset_uri: last.jsonl, num_fewshot: [0], icl_task_type: language_modeling}\n"
        )
        rows.write(bundle / "core.yaml", entry)
        rows.write(bundle / "eval_meta_data.csv", "Eval Task,Task Category,Random baseline\nlast,x,0\n")

    def train(self, name: str, out: str, data: str, *words: str, sizes: dict[str, str] | None = None) -> None:
        """Run a short training."""
        given = {**SIZES, **(sizes or {})}
        options = [word for key, value in given.items() for word in (f"--{key}", value)]
        self.anabatic(*name.split(), "--data.train", data, "--out", out, *words, *options)

    def anabatic(self, *words: str) -> None:
        """Run a command that must succeed."""
        told = end(run(words, self.folder, {}, self.cache))
        assert told.code == 0, f"{words}\n{told.out}\n{told.err}"
