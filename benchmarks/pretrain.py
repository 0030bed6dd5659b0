"""How fast is pretraining, and how much memory does it take, beside a plain transformers Trainer?

    python benchmarks/pretrain.py [--rounds N] [--seconds S] [--only demo/sources,32k/mixed,...]

Both sides load the same Qwen3 folder and read the same text. The Trainer does what its documentation shows: every
document cut into chunks of at most seq_len tokens, `DataCollatorForLanguageModeling` padding to the longest of the
batch, AdamW and clipping as by default. Our side is the recipe's path: shards, `Loader`, `TrainStep`. Only real target
tokens count. The Trainer's batch size is set so that both sides have as many of them per optimizer step.

Texts: `sources`, the standard library's modules; `docstrings`, each by itself; `mixed`, both.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from option_types import names_among, positive_int, positive_number
from paired import Turns, alternate, in_own_process, table

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Shape:
    """A model of four blocks."""

    vocab_size: int
    width: int
    heads: int
    seq_len: int


SHAPES = {"demo": Shape(4096, 128, 4, 256), "32k": Shape(32768, 256, 4, 512)}
CASES = ("demo/sources", "demo/docstrings", "32k/mixed", "32k/docstrings")


def write_texts(folder: Path) -> None:
    from anabatic.config.sections.common import Data
    from anabatic.data.readers import sources

    def read(spec: str) -> list[str]:
        return [each.text or "" for each in sources.read_documents(sources.parse_source(spec), Data())]

    modules = read("stdlib:")
    # `stdlib:docs` puts a module's docstrings one after the other, with two newlines before each heading.
    docstrings = [
        part.strip()
        for module in read("stdlib:docs")
        for part in module.replace("\n\nclass ", "\0class ").replace("\n\nmodule ", "\0module ").split("\0")
        if part.strip()
    ]
    for name, texts in (("sources", modules), ("docstrings", docstrings), ("mixed", modules + docstrings)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)


def prepare(folder: Path, cases: list[str]) -> None:
    """Texts, tokenizers, and a model folder for every shape that is asked for."""
    import torch

    from anabatic.config.pretrain import PretrainModel
    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.tokenizer import bpe_training, hf_folder
    from anabatic.models.model_init import build_model
    from anabatic.models.pretrained import save_model
    from anabatic.plan.depth_dial import derive_model_sizes

    write_texts(folder)
    for name in sorted({case.split("/")[0] for case in cases}):
        size, out = SHAPES[name], folder / name
        data = Data(train=["stdlib:", "stdlib:docs"])
        bpe_training.train_tokenizer(TokenizerTrainJob(out=str(out), vocab_size=size.vocab_size, data=data))
        config = PretrainModel(depth=4, width=size.width, heads=size.heads)
        plan = derive_model_sizes(config, size.vocab_size)
        net = build_model(plan, config, size.vocab_size, size.seq_len, torch.device("cpu"), seed=0)
        save_model(net, out, hf_folder.load_tokenizer(out))
    for case in cases:
        task(folder, case).shards()


@dataclass(frozen=True)
class Task:
    """What a side trains: the model and tokenizer in `folder`, the text in `text`."""

    folder: Path
    text: Path
    seq_len: int

    def shards(self) -> Any:
        """The tokenised text."""
        from anabatic.config.sections.common import Data
        from anabatic.data.shards import dataset_cache

        data = Data(cache=str(self.text.parent), valid=["none"])
        return dataset_cache.build_dataset(str(self.text), self.folder, data, "train")


def task(folder: Path, case: str) -> Task:
    """The task that `shape/text` names."""
    shape, text = case.split("/")
    return Task(folder / shape, folder / f"{text}.jsonl", SHAPES[shape].seq_len)


def ours(turns: Turns, task: Task, optimizer_name: str, compiled: bool = False, dtype: str = "fp32") -> None:
    """The path of the `pretrain` recipe, with the loop's log at every tenth step."""
    import torch

    from anabatic.config.sections.common import DeviceSettings, Optim
    from anabatic.data.batching.loader import Loader
    from anabatic.device.device import select_device
    from anabatic.models import fused_ops
    from anabatic.models.forward import ModelRoot, compute_summed_loss
    from anabatic.models.pretrained import load_model
    from anabatic.parallel.world import World
    from anabatic.train.optim.optimizer import LearningRates, Optimizer
    from anabatic.train.step import TrainStep

    device, world = select_device(DeviceSettings(dtype=dtype)), World()
    model = load_model(task.folder, device.torch_device)
    if compiled:
        fused_ops.compile_blocks(model)
    model.train()
    optimizer = Optimizer(model, Optim(name=optimizer_name), LearningRates(2e-3, 5e-3), device, world)
    loss = functools.partial(compute_summed_loss, chunk_bytes=device.device_row.chunk_bytes)
    step = TrainStep(ModelRoot(model), loss, optimizer, BATCH_TOKENS)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
    with Loader([(task.shards(), None)], seq_len=task.seq_len, micro_batch_tokens=BATCH_TOKENS) as loader:
        turns.begin(**facts)
        number = 0
        while True:
            batch = step.run_step(loader, 1, 1.0)
            number += 1
            if number % 10 == 0:
                step.read_stats()
            turns.step(batch.num_targets)


def trainer(turns: Turns, task: Task) -> None:
    """A plain Trainer on padded batches."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(task.folder)
    model = AutoModelForCausalLM.from_pretrained(task.folder, dtype=torch.float32)
    examples: list[dict[str, list[int]]] = []
    with open(task.text, encoding="utf-8") as file:
        for line in file:
            encoded = tokenizer(
                json.loads(line)["text"], truncation=True, max_length=task.seq_len, return_overflowing_tokens=True
            )
            examples.extend({"input_ids": ids} for ids in encoded["input_ids"] if len(ids) > 1)
    mean = sum(len(example["input_ids"]) - 1 for example in examples) / len(examples)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    targets: list[int] = []

    def counted(rows: list[dict[str, Any]]) -> Any:
        batch = collate(rows)
        targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    class Taking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            facts = {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
            turns.begin(**facts, sequences=size)

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.step(targets[state.global_step - 1])  # the loader makes its batches one step ahead

    size = max(1, round(BATCH_TOKENS / mean))
    arguments = TrainingArguments(
        output_dir=str(task.folder / "trainer"),
        per_device_train_batch_size=size,
        max_steps=10**6,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(model, arguments, train_dataset=examples, data_collator=counted, callbacks=[Taking()]).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--seconds", type=positive_number, default=4.0, help="length of a turn")
    parser.add_argument("--only", type=names_among(CASES), default=list(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--compile", action="store_true", help="also our side with device.compile on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_own_process(prepare, folder, options.only)
        for case in options.only:
            what = task(folder, case)
            sides: dict[str, Any] = {
                "Trainer, AdamW": (trainer, (what,)),
                "anabatic, Muon": (ours, (what, "muon")),
                "anabatic, AdamW": (ours, (what, "adamw")),
            }
            if options.compile:
                sides["anabatic, Muon, compiled"] = (ours, (what, "muon", True))
            results = alternate(sides, options.rounds, options.seconds, warm_up=2 * options.seconds)
            facts = results["Trainer, AdamW"].facts
            print(
                f"{case}: {facts['parameters'] / 1e6:.2f} M parameters, {facts['threads']} threads, "
                f"Trainer with {facts['sequences']} sequences a batch"
            )
            table(results, "Trainer, AdamW")


if __name__ == "__main__":
    main()
