"""How fast is pretraining beside nanochat's own loop?

    python benchmarks/pretrain_nanochat.py --nanochat CHECKOUT [--rounds N] [--seconds S] [--vocab 4096,32768]

CHECKOUT is a clone of github.com/karpathy/nanochat; its model and optimizer are imported from there. Its side does
what its `scripts/base_train.py` does in a step on a CPU in fp32: forward, backward, schedules, optimizer, read the
loss; with full attention in every layer, as it advises where there is no Flash Attention 3. It gets ready batches of
tokens: its own loader, which tokenises while it trains, is left out. `compiled` is torch.compile as its script has it,
`eager` without.

Most of its parameters are value embeddings here, and a look-up costs nothing. So there are two models of ours: `same
work` has as many parameters that multiply (blocks and head), `same total` as many parameters altogether.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from option_types import nanochat_checkout, positive_int, positive_ints, positive_number
from paired import Turns, alternate, in_own_process, table
from pretrain import BATCH_TOKENS, Task, ours, write_texts

DEPTH = 4


@dataclass(frozen=True)
class Shape:
    """nanochat's model."""

    vocab_size: int
    width: int
    heads: int
    seq_len: int


SHAPES = {4096: Shape(4096, 128, 4, 256), 32768: Shape(32768, 256, 4, 512)}


def nanochat_model(shape: Shape) -> Any:
    from nanochat.gpt import GPT, GPTConfig

    return GPT(
        GPTConfig(
            sequence_len=shape.seq_len,
            vocab_size=shape.vocab_size,
            n_layer=DEPTH,
            n_head=shape.heads,
            n_kv_head=shape.heads,
            n_embd=shape.width,
            window_pattern="L",
        )
    )


def matching(shape: Shape, wanted: int, total: bool) -> dict[str, int]:
    """Width, heads and inner size of ours with `wanted` parameters: the inner size nearest to 8/3 of the width."""
    if not total:
        widths = [(shape.width, shape.heads)]
    else:
        widths = [(width, width // 32) for width in range(shape.width, 3 * shape.width, 32)]
    fitting = []
    for width, heads in widths:
        others = (1 + total) * shape.vocab_size * width + DEPTH * 4 * width * width
        inner = round((wanted - others) / (DEPTH * 3 * width) / 8) * 8
        if inner > 0:
            fitting.append((abs(math.log(inner / (8 / 3 * width))), {"width": width, "heads": heads, "inner": inner}))
    return min(fitting, key=lambda pair: pair[0])[1]


def prepare(folder: Path, checkout: str, vocab_sizes: list[int]) -> None:
    """Text, tokenizers, and two model folders of ours for every vocabulary."""
    import torch

    sys.path.insert(0, checkout)
    from anabatic.config.pretrain import PretrainModel
    from anabatic.config.sections.common import Data
    from anabatic.config.tokenizer import TokenizerTrainJob
    from anabatic.data.tokenizer import bpe_training, hf_folder
    from anabatic.models.model_init import build_model, count_parameters
    from anabatic.models.pretrained import save_model
    from anabatic.plan.depth_dial import derive_model_sizes

    write_texts(folder)
    for vocab_size in vocab_sizes:
        size = SHAPES[vocab_size]
        with torch.device("meta"):
            peer = nanochat_model(size)
        total = sum(p.numel() for p in peer.parameters())
        work = peer.lm_head.weight.numel() + sum(p.numel() for p in peer.transformer["h"].parameters())
        print(f"vocabulary {vocab_size}: nanochat has {total / 1e6:.2f} M parameters, {work / 1e6:.2f} M multiply")
        first = folder / f"{vocab_size}-tokenizer"
        data = Data(train=["stdlib:", "stdlib:docs"])
        bpe_training.train_tokenizer(TokenizerTrainJob(out=str(first), vocab_size=vocab_size, data=data))
        for name in ("work", "total"):
            found = matching(size, total if name == "total" else work, name == "total")
            config = PretrainModel(
                depth=DEPTH,
                width=found["width"],
                heads=found["heads"],
                intermediate=found["inner"],
                tie_embeddings=False,
            )
            net = build_model(
                derive_model_sizes(config, vocab_size), config, vocab_size, size.seq_len, torch.device("cpu"), seed=0
            )
            have, multiplying = count_parameters(net)
            print(f"  same {name}: {found}: {have / 1e6:.2f} M parameters, {multiplying / 1e6:.2f} M multiply")
            save_model(net, folder / f"{vocab_size}-{name}", hf_folder.load_tokenizer(first))


def nanochat(turns: Turns, task: Task, checkout: str, vocab_size: int, compiled: bool, dtype: str = "float32") -> None:
    """The steps of nanochat's base_train; its own choice of a format on a CPU is float32."""
    os.environ["NANOCHAT_DTYPE"] = dtype
    if not compiled:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # also for its optimizer, which is compiled by decoration
    sys.path.insert(0, checkout)
    import torch

    shape = SHAPES[vocab_size]
    with torch.device("meta"):
        model = nanochat_model(shape)
    model.to_empty(device="cpu")
    model.init_weights()
    net = torch.compile(model, dynamic=False) if compiled else model
    optimizer = model.setup_optimizer()
    shards = task.shards()
    rows = BATCH_TOKENS // shape.seq_len
    length = shape.seq_len + 1
    flat = torch.cat(
        [torch.from_numpy(shards.read_entry(i)[0].astype("int64")) for i in range(min(shards.num_docs, 150))]
    )
    flat = flat[: len(flat) // (rows * length) * rows * length].view(-1, rows, length)
    turns.begin(parameters=sum(p.numel() for p in model.parameters()), threads=torch.get_num_threads())
    number = 0
    while True:
        batch = flat[number % len(flat)]
        loss = net(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
            if group["kind"] == "muon":
                group["momentum"] = 0.95
                group["weight_decay"] = 0.1
        optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        number += 1
        turns.step(rows * shape.seq_len)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=nanochat_checkout, required=True, help="checkout of nanochat")
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--seconds", type=positive_number, default=4.0, help="length of a turn")
    parser.add_argument("--vocab", type=positive_ints, default=[4096, 32768])
    options = parser.parse_args()
    if unknown := [size for size in options.vocab if size not in SHAPES]:
        parser.error(f"--vocab: there is no shape for {unknown[0]} tokens, but for {', '.join(map(str, SHAPES))}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        in_own_process(prepare, folder, options.nanochat, options.vocab)
        for vocab_size in options.vocab:
            text, seq_len = folder / "sources.jsonl", SHAPES[vocab_size].seq_len
            tasks = {name: Task(folder / f"{vocab_size}-{name}", text, seq_len) for name in ("work", "total")}
            peer = (tasks["work"], options.nanochat, vocab_size)
            results = alternate(
                {
                    "nanochat, compiled": (nanochat, (*peer, True)),
                    "nanochat, eager": (nanochat, (*peer, False)),
                    "anabatic, same work": (ours, (tasks["work"], "muon")),
                    "  compiled": (ours, (tasks["work"], "muon", True)),
                    "anabatic, same total": (ours, (tasks["total"], "muon")),
                },
                options.rounds,
                options.seconds,
                warm_up=2 * options.seconds,
            )
            print(f"vocabulary {vocab_size}, sequences of {seq_len}, {BATCH_TOKENS} tokens a step")
            table(results, "nanochat, compiled")


if __name__ == "__main__":
    main()
