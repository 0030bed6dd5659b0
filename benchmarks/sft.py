"""How fast is fine-tuning, and how much memory does it take, beside transformers' Trainer with PEFT?

    python benchmarks/sft.py [--rounds N] [--seconds S] [--threads N] [--only lora,full,lora-151k]

All sides train the same Qwen2 (4 layers, width 256, 4.0 M parameters; rank 16 in every linear layer) on the same 2,000
alpaca rows made from the standard library's docstrings, answers alone learned, with as many real tokens a step (about
500). The Trainer runs as its documentation shows, padding to the longest row of a batch, and once more with rows of
like length put together (`train_sampling_strategy="group_by_length"`), the best way that any peer offers. Ours: shards,
`Loader`, `TrainStep`, packed; and `padded`, the mode that is there for comparison.

Tokens: real tokens that went through the model, no padding. Process start to first step: wall time from a fresh
process to the end of the first optimizer step, imports included.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import random
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from option_types import names_among, positive_int, positive_number
from paired import Turns, alternate, in_own_process, table

ROWS = 2000
CUTOFF = 512
MICRO_ROWS = 4
BATCH_TOKENS = 512
RANK = 16
PEER = "Trainer + PEFT"
CASES = {"lora": (4096, True), "full": (4096, False), "lora-151k": (151_936, True)}
"""Name -> (size of the vocabulary, LoRA)."""
MODULES = (
    "argparse", "ast", "asyncio.base_events", "bdb", "calendar", "cmd", "codecs", "collections", "concurrent.futures",
    "configparser", "contextlib", "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest",
    "enum", "fileinput", "fractions", "ftplib", "functools", "gettext", "glob", "gzip", "heapq", "html.parser",
    "http.client", "http.cookiejar", "imaplib", "importlib.metadata", "inspect", "ipaddress", "json", "linecache",
    "locale", "logging", "lzma", "mailbox", "mimetypes", "multiprocessing.pool", "nntplib", "ntpath", "numbers",
    "optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "pkgutil", "platform", "plistlib", "poplib",
    "posixpath", "pprint", "pstats", "pydoc", "queue", "random", "re", "sched", "selectors", "shelve", "shlex",
    "smtplib", "socket", "socketserver", "sqlite3.dump", "ssl", "statistics", "string", "subprocess", "symtable",
    "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize", "trace", "traceback", "tracemalloc", "types",
    "typing", "unittest.case", "unittest.mock", "urllib.parse", "urllib.request", "uuid", "warnings", "wave", "weakref",
    "webbrowser", "xml.dom.minidom", "xml.etree.ElementTree", "zipfile",
)  # fmt: skip


def documented() -> list[dict[str, str]]:
    """Alpaca rows: what is asked for is the docstring of a function of the standard library."""
    rows = []
    for name in MODULES:
        with suppress(ImportError):  # gone from newer releases
            rows += rows_of(name)
    return rows


def rows_of(name: str) -> list[dict[str, str]]:
    """What is asked about one module: functions, classes and their methods."""
    module = importlib.import_module(name)
    members = {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == name}
    for owner, value in list(members.items()):
        if inspect.isclass(value):
            members |= {f"{owner}.{key}": each for key, each in vars(value).items() if inspect.isfunction(each)}
    rows = []
    for key, value in sorted(members.items()):
        text = inspect.getdoc(value) if inspect.isroutine(value) or inspect.isclass(value) else None
        if text and len(text) > 100:
            kind = "class" if inspect.isclass(value) else "function"
            rows.append({"instruction": f"What does the {kind} {key} of the module {name} do?", "output": text[:1000]})
    return rows


def prepare(folder: Path, cases: list[str]) -> None:
    """Rows, a tokenizer with a chat template, and a model folder for every size of vocabulary."""
    import torch

    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.tokenizer import bpe_training, hf_folder
    from anabatic.models.pretrained import save_model
    from anabatic_testing.tiny_models import build_tiny_qwen2

    rows = documented()
    random.Random(0).shuffle(rows)
    (folder / "rows.json").write_text(json.dumps(rows[:ROWS]), encoding="utf-8")
    tokens = folder / "tokenizer"
    bpe_training.train_tokenizer(TokenizerTrainJob(out=str(tokens), vocab_size=4096, data=Data(train=["stdlib:docs"])))
    for size in {CASES[case][0] for case in cases}:
        torch.manual_seed(0)
        model = build_tiny_qwen2(
            vocab_size=size,
            hidden_size=256,
            num_hidden_layers=4,
            intermediate_size=704,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
        )
        save_model(model, folder / f"model-{size}", hf_folder.load_tokenizer(tokens))


@dataclass(frozen=True)
class Task:
    """What a side trains."""

    model: Path
    rows: Path
    lora: bool
    threads: int
    dtype: str = "fp32"
    """Of matrix products, on both sides."""


def ours(turns: Turns, task: Task, packing: bool) -> None:
    """The path of the `sft` recipe, with the loop's log at every tenth step."""
    import torch

    from anabatic.config.sections.common import Data, DeviceSettings, Optim, Parallel
    from anabatic.config.sections.train_jobs import Lora
    from anabatic.data.batching.loader import Loader
    from anabatic.data.chat.loss_mask import LossPolicy
    from anabatic.data.shards import dataset_cache
    from anabatic.device.device import select_device
    from anabatic.models import fused_ops
    from anabatic.models.forward import compute_summed_loss
    from anabatic.models.lora import adapter
    from anabatic.models.model_init import materialize_model
    from anabatic.models.pretrained import build_meta_causal_lm, load_folder_weights
    from anabatic.parallel.sharding import resolve_sharding
    from anabatic.parallel.world import World
    from anabatic.train.optim.optimizer import LearningRates, Optimizer
    from anabatic.train.step import TrainStep

    device, world = select_device(DeviceSettings(type="cpu", threads=task.threads, dtype=task.dtype)), World()
    data = Data(cache=str(task.rows.parent / "cache"), valid=["none"])
    shard = dataset_cache.build_dataset(
        str(task.rows), task.model, data, "train", seq_len=CUTOFF, learning=LossPolicy()
    )
    lora = Lora(r=RANK, alpha=32)
    model = build_meta_causal_lm(task.model, device.dtype if task.lora else torch.float32)  # as the recipe does
    if task.lora:
        adapter.insert_adapter(model, lora)
    root = materialize_model(model, resolve_sharding(Parallel(), world, device), device, world)
    load_folder_weights(model, task.model)
    if task.lora:
        adapter.init_adapter_weights(model, lora, 0)
    fused_ops.apply_fused_setting(model, "auto", device.type)
    model.train()
    optim = Optim(name="adamw", weight_decay=0.0, beta2=0.999, eps=1e-8)
    optimizer = Optimizer(model, optim, LearningRates(1e-4, 0.0), device, world)
    loss = functools.partial(compute_summed_loss, chunk_bytes=device.device_row.chunk_bytes)
    step = TrainStep(root, loss, optimizer, BATCH_TOKENS)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "threads": torch.get_num_threads()}
    mode = {} if packing else {"packing": False}
    with Loader([(shard, None)], seq_len=CUTOFF, micro_batch_tokens=BATCH_TOKENS, **mode) as loader:
        turns.begin(**facts)
        number = 0
        while True:
            batch = step.run_step(loader, 1, 1.0)
            number += 1
            if number % 10 == 0:
                step.read_stats()
            turns.step(batch.num_tokens)


def trainer(turns: Turns, task: Task, grouped: bool) -> None:
    """A plain Trainer, PEFT's LoRA, dynamic padding."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.set_num_threads(task.threads)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    if task.lora:
        import peft

        config = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
    examples = []
    for row in json.loads(task.rows.read_text(encoding="utf-8")):
        asked = [{"role": "user", "content": row["instruction"]}]
        whole = [*asked, {"role": "assistant", "content": row["output"]}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(whole, return_dict=False)[:CUTOFF]
        examples.append({"input_ids": ids, "labels": [-100] * len(prompt) + ids[len(prompt) :]})
    collate = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=-100)
    tokens: list[int] = []

    def counted(rows: list[dict[str, Any]]) -> Any:
        tokens.append(sum(len(row["input_ids"]) for row in rows))
        return collate(rows)

    class Taking(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            turns.begin(parameters=sum(p.numel() for p in model.parameters()), threads=torch.get_num_threads())

        def on_step_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.step(tokens[state.global_step - 1])  # the loader makes its batches one step ahead

    arguments = TrainingArguments(
        output_dir=str(task.rows.parent / "trainer"),
        per_device_train_batch_size=MICRO_ROWS,
        max_steps=10**6,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=task.dtype == "bf16",
        disable_tqdm=True,
        logging_steps=10,
        learning_rate=1e-4,
        **({"train_sampling_strategy": "group_by_length"} if grouped else {}),
    )
    Trainer(model, arguments, train_dataset=examples, data_collator=counted, callbacks=[Taking()]).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--seconds", type=positive_number, default=4.0, help="length of a turn")
    parser.add_argument("--threads", type=positive_int, default=1)
    parser.add_argument("--only", type=names_among(CASES), default=list(CASES), help=f"of {','.join(CASES)}")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_own_process(prepare, folder, options.only)
        for case in options.only:
            size, lora = CASES[case]
            task = Task(folder / f"model-{size}", folder / "rows.json", lora, options.threads)
            sides: dict[str, Any] = {
                PEER: (trainer, (task, False)),
                "Trainer, like lengths": (trainer, (task, True)),
                "anabatic": (ours, (task, True)),
                "anabatic, padded": (ours, (task, False)),
            }
            results = alternate(sides, options.rounds, options.seconds, warm_up=2 * options.seconds)
            facts = results[PEER].facts
            print(f"{case}: {facts['parameters'] / 1e6:.2f} M parameters, {facts['threads']} threads")
            table(results, PEER)
            best = results["Trainer, like lengths"]
            print("  beside like lengths:")
            table({"anabatic": results["anabatic"], "Trainer, like lengths": best}, "Trainer, like lengths")


if __name__ == "__main__":
    main()
