"""Which has the better model after equal CPU time: our dial's own choices, or nanochat's?

    python benchmarks/pretrain_bits.py --nanochat CHECKOUT [--seconds 60,120] [--turn S] [--depths 1,2] [--rates 1,4,8]

Every side trains a new model for so many CPU seconds, one thread each, taking turns; then its bits per byte on the same
held-out text are counted in the same way: every text begins with the mark of its beginning, every token behind it
counts, logits in fp32. All have one tokenizer of 4,096 words and read the same texts: the standard library's sources
and docstrings in pieces of at most 900 characters, short enough that neither loader has to cut many. What a side does
before its first step (imports, tokens, nanochat's batches, its compilation) is not counted; our loader, which works
while it trains, is.

Ours is what `anabatic pretrain --schedule.minutes M` chooses for that time on one core: depth, batch, rates; the
schedule follows the share of the time that is over. nanochat has its own model, loader, optimizer and schedules,
compiled as its script does it, in its own format for a CPU, fp32, and in bf16, with the depths of `--depths`. Its own
batch for such models, 65,536 tokens, would be a handful of steps, so it has 2,048; its rates follow its rule for that
batch, which makes them small, or are so many times that (`--rates`): the best of these is the peer.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from option_types import names_among, nanochat_checkout, positive_ints, positive_number, positive_numbers
from paired import Turns, in_own_process, to_the_end
from roofline_limit import has_bf16

VOCABULARY = 4096
PIECE = 900
"""Characters of a text at most."""
SEQ_LEN, BATCH_TOKENS = 256, 2048
"""nanochat's rows and tokens of a step."""
HELD_OUT = 600
WARM_UP_STEPS = 40
WARM_DOWN, FINAL_RATE = 0.65, 0.05
WEIGHT_DECAY, MATRIX_RATE, EMBEDDING_RATE, HEAD_RATE, SCALAR_RATE = 0.28, 0.02, 0.3, 0.008, 0.5
"""Defaults of nanochat's base_train."""
REFERENCE_DEPTH, REFERENCE_WIDTH, REFERENCE_BATCH, TOKENS_PER_PARAM = 12, 768, 2**19, 12
"""Its reference model, whose hyperparameters it carries over to others."""


@dataclass(frozen=True)
class Task:
    """Texts and tokenizer in `folder`, CPU seconds of training."""

    folder: Path
    seconds: float

    def shards(self, split: str) -> Any:
        from anabatic.config.sections.common import Data
        from anabatic.data.shards import dataset_cache

        data = Data(cache=str(self.folder), valid=["none"])
        return dataset_cache.build_dataset(
            str(self.folder / f"{split}.jsonl"), self.folder / "tokenizer", data, "train"
        )

    def texts(self, split: str) -> list[list[int]]:
        """Token ids of every text, the mark of its beginning in front."""
        shards = self.shards(split)
        return [shards.read_entry(number)[0].tolist() for number in range(shards.num_docs)]


def cut(text: str) -> Iterator[str]:
    """Pieces of at most `PIECE` characters that end at an empty line where there is one, else at a line's end."""
    while len(text) > PIECE:
        at = max(text.rfind("\n\n", 1, PIECE), 0) or max(text.rfind("\n", 1, PIECE), 0) or PIECE
        yield text[:at]
        text = text[at:].lstrip("\n")
    yield text


def prepare(folder: Path) -> None:
    """Write the texts, whole files held out by their hash, and train the tokenizer on those for training."""
    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.readers import sources
    from anabatic.data.tokenizer import bpe_training

    pieces: dict[str, list[str]] = {"train": [], "valid": []}
    for spec in ("stdlib:", "stdlib:docs"):
        for document in sources.read_documents(sources.parse_source(spec), Data()):
            text = document.text or ""
            held_out = hashlib.sha256(text[:2000].encode()).digest()[0] < 8
            pieces["valid" if held_out else "train"].extend(piece for piece in cut(text) if len(piece.strip()) > 40)
    for split, found in pieces.items():
        random.Random(0).shuffle(found)
        with open(folder / f"{split}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(
                json.dumps({"text": text}) + "\n" for text in found[: HELD_OUT if split == "valid" else None]
            )
    data = Data(train=[str(folder / "train.jsonl")])
    bpe_training.train_tokenizer(TokenizerTrainJob(out=str(folder / "tokenizer"), vocab_size=VOCABULARY, data=data))
    task = Task(folder, 0)
    print(f"{task.shards('train').num_tokens:,} tokens to train on, {task.shards('valid').num_tokens:,} held out")


def bits_per_byte(task: Task, logits: Callable[[Any], Any]) -> float:
    """Nats of all tokens behind each beginning, over the bytes of the texts. logits: ids `[B, T]` -> `[B, T, V]`."""
    import torch
    import torch.nn.functional as F

    lines = (task.folder / "valid.jsonl").read_text(encoding="utf-8").splitlines()
    size = sum(len(json.loads(line)["text"].encode()) for line in lines)
    segments = [
        text[start : start + SEQ_LEN + 1] for text in task.texts("valid") for start in range(0, len(text) - 1, SEQ_LEN)
    ]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(segments), 16):
            part = segments[start : start + 16]
            ids = torch.zeros(len(part), SEQ_LEN, dtype=torch.int64)
            targets = torch.full((len(part), SEQ_LEN), -1)
            for row, segment in enumerate(part):
                ids[row, : len(segment) - 1] = torch.tensor(segment[:-1])
                targets[row, : len(segment) - 1] = torch.tensor(segment[1:])
            found = logits(ids).float().flatten(0, 1)
            nats += float(F.cross_entropy(found, targets.flatten(), ignore_index=-1, reduction="sum"))
    return nats / math.log(2) / size


class Budget:
    """How much of the CPU time is over; it starts with the first step."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps, self.start = seconds, 0, time.process_time()

    @property
    def used(self) -> float:
        return time.process_time() - self.start

    @property
    def is_over(self) -> bool:
        return self.used >= self.seconds

    def total(self) -> int:
        """Steps of the whole run by what the first ones took; a schedule may ask for it before every step."""
        if self.steps < 3:
            return 10**6
        return max(self.steps + 1, round(self.steps * self.seconds / self.used))


def ours(turns: Turns, task: Task, dtype: str) -> None:
    """What the pretrain recipe makes of `schedule.minutes` alone."""
    import functools

    import torch
    from transformers import AutoModelForCausalLM

    from anabatic.config.pretrain import PretrainJob
    from anabatic.config.sections.common import Data, DeviceSettings, Schedule
    from anabatic.data.batching.loader import Loader
    from anabatic.device.device import select_device
    from anabatic.models import fused_ops, model_init
    from anabatic.models.forward import ModelRoot, compute_summed_loss
    from anabatic.parallel.world import World
    from anabatic.plan import model_shape
    from anabatic.plan.depth_dial import derive_model_sizes
    from anabatic.train import sizing
    from anabatic.train.optim.optimizer import LearningRates, Optimizer, compute_lr_scale
    from anabatic.train.step import TrainStep

    device, world = select_device(DeviceSettings(dtype=dtype, threads=1)), World()
    shards = task.shards("train")
    schedule = Schedule(minutes=task.seconds / 60 / len(os.sched_getaffinity(0)))
    job = PretrainJob(tokenizer=str(task.folder / "tokenizer"), data=Data(train=["-"]), schedule=schedule)
    job = model_shape.with_depth(job, model_shape.choose_depth(job, sizing.get_local_chip(device), 1))
    plan = derive_model_sizes(job.model, VOCABULARY)
    model = model_init.build_model(
        plan, job.model, VOCABULARY, job.batch.resolved_seq_len, torch.device("cpu"), job.seed
    )
    fused_ops.apply_fused_setting(model, job.fused, device.type)
    context = SimpleNamespace(job=job, device=device, world=world)
    sizes = sizing.resolve_sizes(context, plan, model, sizing.Horizon(shards.num_tokens, 0, ""), None)
    model.train()
    optimizer = Optimizer(model, job.optim, LearningRates(sizes.lr, sizes.matrix_lr), device, world)
    loss = functools.partial(compute_summed_loss, chunk_bytes=device.device_row.chunk_bytes)
    step = TrainStep(ModelRoot(model), loss, optimizer, sizes.micro_batch_tokens)
    tokens, (total, multiplying) = 0, model_init.count_parameters(model)
    with Loader(
        [(shards, None)], seq_len=job.batch.resolved_seq_len, micro_batch_tokens=sizes.micro_batch_tokens
    ) as loader:
        turns.begin(
            parameters=total,
            multiplying=multiplying,
            batch=sizes.micro_batch_tokens * sizes.micro_steps,
            depth=job.model.depth,
        )
        budget = Budget(task.seconds)
        while not budget.is_over:
            whole = budget.total() if budget.steps >= 3 else sizes.steps
            batch = step.run_step(
                loader, sizes.micro_steps, compute_lr_scale(min(budget.steps + 1, whole), whole, schedule)
            )
            assert batch is not None
            budget.steps += 1
            tokens += sizes.micro_batch_tokens * sizes.micro_steps
            turns.step(batch.num_targets)
        facts = {"steps": budget.steps, "tokens": tokens, "cpu": budget.used}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns.finish(bits=bits_per_byte(task, lambda ids: plain(input_ids=ids).logits), **facts)


def nanochat_batches(task: Task) -> list[tuple[Any, Any]]:
    """The batches of its own loader, over our tokens."""
    from nanochat import dataloader

    texts = task.texts("train")

    class Ready:
        """In the place of its tokenizer."""

        def get_bos_token_id(self) -> int:
            return texts[0][0]

        def encode(self, documents: list[list[int]], **_: Any) -> list[list[int]]:
            return [list(document) for document in documents]

    def document_batches(*_: Any) -> Iterator[Any]:
        while True:
            for start in range(0, len(texts), 128):
                yield texts[start : start + 128], (0, 0, 1)

    dataloader._document_batches = document_batches
    rows = BATCH_TOKENS // SEQ_LEN
    found = dataloader.tokenizing_distributed_data_loader_bos_bestfit(Ready(), rows, SEQ_LEN, "train", device="cpu")
    batches = sum(map(len, texts)) // BATCH_TOKENS
    return [(x.clone(), y.clone()) for x, y in (next(found) for _ in range(batches))]


def nanochat(turns: Turns, task: Task, checkout: str, depth: int, faster: float, dtype: str) -> None:
    """Its base_train without its log, `faster` times its own rates."""
    os.environ["NANOCHAT_DTYPE"] = dtype
    sys.path.insert(0, checkout)
    import torch
    from nanochat.gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    batches = nanochat_batches(task)

    def build(layers: int, width: int) -> Any:
        heads = {"n_head": width // 64, "n_kv_head": width // 64, "n_embd": width}
        with torch.device("meta"):
            return GPT(
                GPTConfig(sequence_len=SEQ_LEN, vocab_size=VOCABULARY, n_layer=layers, window_pattern="L", **heads)
            )

    def horizon(model: Any) -> float:
        counts = model.num_scaling_params()
        return TOKENS_PER_PARAM * (counts["transformer_matrices"] + counts["lm_head"])

    model = build(depth, 64 * depth)
    model.to_empty(device="cpu")
    torch.manual_seed(42)
    model.init_weights()
    ratio = (BATCH_TOKENS / REFERENCE_BATCH) ** 0.5
    decay = WEIGHT_DECAY * ratio * horizon(build(REFERENCE_DEPTH, REFERENCE_WIDTH)) / horizon(model)
    optimizer = model.setup_optimizer(
        unembedding_lr=HEAD_RATE * ratio * faster,
        embedding_lr=EMBEDDING_RATE * ratio * faster,
        scalar_lr=SCALAR_RATE * ratio,
        matrix_lr=MATRIX_RATE * ratio * faster,
        weight_decay=decay / faster,
    )
    net = torch.compile(model, dynamic=False)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    net(*batches[-1]).backward()  # compiles all that a step needs
    optimizer.step()
    model.zero_grad(set_to_none=True)
    model.load_state_dict(start)
    optimizer.state.clear()
    turns.begin(
        parameters=sum(p.numel() for p in model.parameters()),
        multiplying=model.num_matmul_params(),
        batch=BATCH_TOKENS,
        depth=depth,
    )
    budget = Budget(task.seconds)
    while not budget.is_over:
        loss = net(*batches[budget.steps % len(batches)])
        loss.backward()
        number, total = budget.steps, budget.total()
        fall = round(WARM_DOWN * total)
        into = max(0.0, (number - (total - fall)) / fall)
        scale = min((number + 1) / WARM_UP_STEPS, 1 - into * (1 - FINAL_RATE))
        momentum = 0.85 + 0.12 * number / 400 if number < 400 else 0.97 - 0.07 * into
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * scale
            if group["kind"] == "muon":
                group["momentum"] = momentum
                group["weight_decay"] = decay / faster * 0.5 * (1 + math.cos(math.pi * number / total))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        budget.steps += 1
        turns.step(BATCH_TOKENS)
    facts = {"steps": budget.steps, "tokens": budget.steps * BATCH_TOKENS, "cpu": budget.used}
    turns.finish(bits=bits_per_byte(task, model), **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=nanochat_checkout, required=True, help="checkout of nanochat")
    parser.add_argument("--seconds", type=positive_numbers, default=[60.0, 120.0], help="CPU seconds of training")
    parser.add_argument("--turn", type=positive_number, default=2.0, help="wall seconds of a turn")
    parser.add_argument("--depths", type=positive_ints, default=[1, 2], help="depths of nanochat's models")
    parser.add_argument(
        "--formats",
        type=names_among(("fp32", "bf16")),
        default=["fp32", "bf16"],
        help="of both, of fp32,bf16; bf16 only where the processor has it",
    )
    parser.add_argument(
        "--rates", type=positive_numbers, default=[1.0, 4.0, 8.0], help="nanochat's rates, times its own"
    )
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    formats = {"fp32": ("", "float32"), "bf16": (", bf16", "bfloat16")}
    wanted = [name for name in options.formats if name == "fp32" or has_bf16()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_own_process(prepare, folder)
        for seconds in options.seconds:
            task = Task(folder, seconds)
            sides: dict[str, Any] = {f"anabatic{formats[name][0]}": (ours, (task, name)) for name in wanted}
            for depth, faster, name in itertools.product(options.depths, options.rates, wanted):
                label, theirs = formats[name]
                sides[f"nanochat, depth {depth}, rates x {faster:g}{label}"] = (
                    nanochat,
                    (task, options.nanochat, depth, faster, theirs),
                )
            print(f"{seconds:g} CPU seconds, one thread, load {os.getloadavg()[0]:.1f}", flush=True)
            show(to_the_end(sides, options.turn))


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print every side, the best of nanochat's marked."""
    best = min((one["bits"] for name, one in results.items() if name.startswith("nanochat")), default=0.0)
    heads = f"{'bits/byte':>9} {'depth':>5} {'params':>8} {'multiply':>8} {'batch':>6} {'steps':>6} {'tok/CPU s':>9}"
    print(f"  {'':34} {heads}")
    for name, one in results.items():
        sizes = f"{one['depth']:5} {one['parameters'] / 1e6:6.2f} M {one['multiplying'] / 1e6:6.2f} M"
        rate = f"{one['batch']:6,} {one['steps']:6,} {one['tokens'] / one['cpu']:9,.0f}"
        print(f"  {name:34} {one['bits']:9.3f} {sizes} {rate}{' <' if one['bits'] == best else ''}", flush=True)


if __name__ == "__main__":
    main()
